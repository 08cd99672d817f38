"""Signature `gradient_memory`: updates of one common model, averaged over clusterings (CFL-GP).

Kim, Kim, de Veciana: Clustered Federated Learning via Gradient-based Partitioning. ICML 2024.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from flray.clustering.points import Points
from flray.clustering.update import Update
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params, rows_of


@dataclass(frozen=True)
class GradientMemory(Update):
    """The mean of a client's updates so far, all of which start from one model for all clients.

    That model is a row of the bank, the next one in each clustering. Points are (m, p). The server
    keeps a mean per client; a client that is asked for the first time sends its first update.
    """

    reads_bank: ClassVar[bool] = True  # starts from current models, of which it chooses one

    # Weight β of the newest update in the mean. None: all updates count alike
    weight: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None and not 0 < self.weight <= 1:
            raise ValueError(f"weight must be in (0, 1] or null, got {self.weight}")

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        heard, _ = super().__call__(fed, _common(bank, memory), cohort, {})
        return self._averaged(heard, len(bank.owner), memory)

    def sketched(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params, dim: int
    ) -> tuple[Points, Params]:
        """Means (m, dim) of sketches, which are sketches of the means: a sketch is linear."""
        heard, _ = super().sketched(fed, _common(bank, memory), cohort, {}, dim)
        return self._averaged(heard, len(bank.owner), memory)

    def _averaged(self, heard: Points, num_clients: int, memory: Params) -> tuple[Points, Params]:
        """The means of the clients heard, and those of all clients for the next call."""
        size = heard.values.shape[1]
        count = memory["count"].clone() if memory else torch.zeros(num_clients, dtype=torch.int64)
        mean = memory["mean"].clone() if memory else heard.values.new_zeros(num_clients, size)
        clients = torch.from_numpy(heard.clients)
        count[clients] += 1
        newest = 1 / count[clients].to(mean.dtype)
        if self.weight is not None:
            newest = torch.where(count[clients] == 1, 1.0, self.weight).to(mean.dtype)
        # g_i <- (1 - β) g_i + β Δ_i
        there = clients.to(mean.device)
        mean[there] += newest.to(mean.device)[:, None] * (heard.values - mean[there])
        kept = {"mean": mean, "count": count, "calls": torch.tensor([_num_calls(memory) + 1])}
        return Points.vectors(heard.clients, mean[there]), kept


def _num_calls(memory: Params) -> int:
    return int(memory["calls"][0]) if memory else 0


def _common(bank: ModelBank, memory: Params) -> ModelBank:
    """The row of the bank whose turn it is, as the model of all clients."""
    row = np.array([_num_calls(memory) % bank.num_rows])
    common = {name: rows_of(leaf, row) for name, leaf in bank.params.items()}
    return ModelBank(common, np.zeros_like(bank.owner))
