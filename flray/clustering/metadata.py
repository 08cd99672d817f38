"""Signature `metadata`: a client is what the server knows of it beforehand; nothing is trained."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from flray.clustering.points import Matrix, Points
from flray.errors import ExperimentError
from flray.execution.federation import GROUND_TRUTH, Cohort, Federation
from flray.models.bank import ModelBank, Params

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start


@dataclass(frozen=True)
class Metadata:
    """One vector per client: columns of a file, or the group that the data name for the client.

    Of a file with a row for each client, numbers are scaled to mean 0 and standard deviation 1 and
    texts become one-hot. Without a file the vector is the client's group, one-hot; groups that a
    split plants are ground truth, which must be allowed and marks the run. Newcomers are placed
    without training or labels.

        signature: {name: metadata, file: hospitals.csv, columns: [beds, region]}

    >>> Metadata().file is None  # the groups
    True
    """

    # CSV or Parquet file with a row for each client. None: the groups of the clients
    file: str | None = None
    # Column of the file with the clients' numbers, from 0. None: rows are in the clients' order
    client: str | None = None
    columns: tuple[str, ...] = ()  # Columns of the file that describe a client; [] means all others

    def __post_init__(self) -> None:
        if self.file is None and (self.client is not None or self.columns):
            raise ValueError("client and columns are those of a file: give file, or leave them out")

    def require(self, fed: Federation) -> None:
        """Refuse an experiment whose clients have no such attributes."""
        split = fed.timeline.at(1)
        if self.file is not None:
            self._table(fed.num_clients)
        elif not split.knows_groups:
            fed.require_ground_truth(GROUND_TRUTH)
        if self.file is None and split.groups is None:
            raise ExperimentError(
                "nothing is known of the clients of this split, which have no groups: give "
                "clustering.signature.file, or choose another signature or split"
            )

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        clients = cohort.clients
        if len(clients) and clients.max() >= fed.num_clients:
            raise ExperimentError(
                "metadata know nothing of clients that are made up: leave evaluate.robustness out"
            )
        if self.file is None:
            groups = fed.groups(np.arange(fed.num_clients))
            table = np.eye(groups.max() + 1)[groups]
        else:
            table = self._table(fed.num_clients)
        values = table[clients]  # (m, e)
        fed.meter.count_transfer("signature", up=values.nbytes)
        return Points.vectors(clients, torch.from_numpy(values)), memory

    def _table(self, num_clients: int) -> Matrix:
        """(M, e) the vectors of all clients."""
        frame = self._frame()
        if self.client is not None:
            frame = frame.set_index(self.client).sort_index()
        numbers = list(range(num_clients))
        if len(frame) != num_clients or frame.index.tolist() != numbers:
            where = f"whose numbers in {self.client!r} are 0 to {num_clients - 1}"
            raise ExperimentError(
                f"{self.file} must have one row for each of the {num_clients} clients"
                f"{f', {where}' if self.client else ', in their order'}; it has {len(frame)} rows"
            )
        frame = frame[list(self.columns)] if self.columns else frame
        if (empty := frame.isna()).any(axis=None):
            column = frame.columns[int(empty.any().argmax())]
            row = int(empty[column].argmax())
            raise ExperimentError(f"{self.file} has no value of {column!r} for client {row}")
        numeric = frame.select_dtypes(["number", "bool"]).astype(np.float64)
        scaled = (numeric - numeric.mean()) / numeric.std(ddof=0).replace(0.0, 1.0)
        kinds = frame.drop(columns=numeric.columns).astype(str)
        from pandas import get_dummies

        one_hot = get_dummies(kinds, dtype=np.float64) if len(kinds.columns) else kinds
        return np.concatenate([scaled.to_numpy(), one_hot.to_numpy(np.float64)], axis=1)

    def _frame(self) -> "pd.DataFrame":
        """The file; refused if it cannot be read or lacks a column."""
        import pandas as pd

        assert self.file is not None
        read = pd.read_parquet if self.file.endswith(".parquet") else pd.read_csv
        try:
            frame: pd.DataFrame = read(self.file)
        except (OSError, ValueError) as error:
            raise ExperimentError(f"{self.file} cannot be read: {error}") from error
        wanted = [*self.columns, *([] if self.client is None else [self.client])]
        if missing := [name for name in wanted if name not in frame]:
            raise ExperimentError(
                f"{self.file} has no column {missing[0]!r}; it has {', '.join(frame.columns)}"
            )
        return frame
