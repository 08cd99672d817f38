"""Signature `metadata`: a client is what the server knows of it beforehand; nothing is trained."""

from dataclasses import dataclass

import numpy as np
import torch

from flray.clustering.points import Matrix, Points
from flray.data.datasets.own_files import Columns, read_table
from flray.data.datasets.tables import features_of, refuse_wrong_values
from flray.errors import ExperimentError
from flray.execution.federation import GROUND_TRUTH, Cohort, Federation
from flray.models.bank import ModelBank, Params


@dataclass(frozen=True)
class Metadata:
    """One vector per client: columns of a file, or the group that the data name for the client.

    Of a file with a row for each client, numbers are scaled to mean 0 and standard deviation 1 and
    texts become one-hot. Without a file the vector is the client's group, one-hot; groups that a
    split plants are ground truth, which must be allowed and marks the run. Newcomers are placed
    without training or labels.

        signature: {name: metadata, file: hospitals.csv, client: hospital, columns: [beds, region]}
    """

    # CSV or Parquet file with a row for each client, at a path or URL. None: the groups of clients
    file: str | None = None
    # Column of the file with the clients' names, or their numbers from 0 where the data name no
    # owners. None: rows are in the clients' order
    client: str | None = None
    columns: tuple[str, ...] = ()  # Columns of the file that describe a client; [] means all others

    def __post_init__(self) -> None:
        if self.file is None and (self.client is not None or self.columns):
            raise ValueError("client and columns are those of a file: give file, or leave them out")

    def require(self, fed: Federation) -> None:
        """Refuse an experiment whose clients have no such attributes."""
        split = fed.timeline.at(1)
        if self.file is not None:
            self._table(self.file, fed)
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
            table = self._table(self.file, fed)
        values = table[clients]  # (m, e)
        fed.meter.count_transfer("signature", up=values.nbytes)
        return Points.vectors(clients, torch.from_numpy(values)), memory

    def _table(self, file: str, fed: Federation) -> Matrix:
        """(M, e) the vectors of all clients; refuses a file that lacks one of them."""
        frame = read_table(file)
        columns, num = Columns.of_frame(file, frame), fed.num_clients
        names = fed.timeline.at(1).client_names or tuple(map(str, range(num)))
        rows, where = dict(zip(names, range(len(frame)), strict=False)), "in their order"
        if self.client is not None:
            rows = {str(name): row for row, name in enumerate(columns[self.client])}
            where = f"whose names in {self.client!r} are {names[0]} to {names[-1]}"
        missing = [name for name in names if name not in rows]
        if missing or len(rows) < len(frame):
            first = f" and none of client {missing[0]}" if missing else ""
            raise ExperimentError(
                f"{file} must have one row for each of the {num} clients, {where}; it has "
                f"{len(frame)} rows{first}"
            )
        chosen = self.columns or [str(name) for name in frame.columns if name != self.client]
        for column in chosen:
            columns[column]  # refuses one that is missing
            refuse_wrong_values(frame[column])
        of_clients = frame.iloc[[rows[name] for name in names]]
        values, is_number = features_of(of_clients[list(chosen)])
        std = np.where(is_number & (values.std(0) > 0), values.std(0), 1.0)
        return (values - np.where(is_number, values.mean(0), 0.0)) / std
