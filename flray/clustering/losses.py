"""Signature `losses`: a client is the vector of several models' losses on its data (CLoVE)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from flray.clustering.points import Points
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.values import require_at_least

LOSS_BYTES = 4  # of one loss, sent as a number


@dataclass(frozen=True)
class Losses:
    """ℓ_i(θ_1) … ℓ_i(θ_U): the mean losses of U models on the client's training examples, (m, U).

    The models are those of the bank, or `number` independent draws of an initial model. All of them
    are sent to each client. Clients without training examples send nothing. Nothing is trained.

    >>> Losses(number=0)
    Traceback (most recent call last):
    ValueError: number must be >= 1 or null, got 0
    """

    reads_bank: ClassVar[bool] = True  # judges current models

    # Number of initial models that are drawn. None: the models that clients use so far
    number: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, number=1)

    def require(self, fed: Federation) -> None:
        """Refuse a model that does not give the loss of each example."""
        fed.require_example_losses()

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        if self.number is not None:
            bank = replace(bank, params=fed.initial_models(self.number))
        judgement = fed.judge(bank, cohort, "train")
        num_asked, num_answers = len(cohort.clients), len(judgement.clients)
        fed.meter.count_transfer(
            "signature",
            down=num_asked * bank.num_rows * bank.bytes_per_model,
            up=num_answers * bank.num_rows * LOSS_BYTES,
        )
        has_examples = np.flatnonzero(judgement.best >= 0)
        losses = torch.from_numpy(judgement.loss[has_examples])
        return Points.vectors(judgement.clients[has_examples], losses), memory
