"""What a run keeps that trains a part of its clients, for the runs in which they go on alike.

Below `part/` of its run directory: `components.json` says which components it trains and who their
clients are; `round_000012.parquet` holds what was heard of each client in round 12 and, where the
round was evaluated, how far the models moved.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from flray.columns import CLIENT, LOSS, ROUND
from flray.data.dataset import Ids
from flray.files import replace_file, replace_text
from flray.records.recorded import COMPONENTS
from flray.records.tables import files_of_rounds, remove_later_files

FOLDER = COMPONENTS  # of a run directory
STEPS, MOVED = "steps", "moved"  # columns: of a client's training; ||w_i^t - w_i^(t-1)||^2


class PartRecords:
    """The records of the components that one run directory trains.

    >>> from tempfile import mkdtemp
    >>> records = PartRecords(Path(mkdtemp()))
    >>> records.start({"left": np.array([0, 2])})
    >>> records.append(1, pd.DataFrame({CLIENT: [0, 2], LOSS: [0.5, 0.7], STEPS: [3, 3]}))
    >>> records.components()["left"].tolist(), len(records.table())
    ([0, 2], 2)
    """

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER
        self._components = self.path / "components.json"

    def start(self, components: Mapping[str, Ids]) -> None:
        """Name the components by their keys, with their clients."""
        self.path.mkdir(parents=True, exist_ok=True)
        plain = {key: [int(i) for i in clients] for key, clients in components.items()}
        replace_text(self._components, json.dumps(plain))

    def components(self) -> dict[str, Ids]:
        """The clients of each component by its key."""
        plain = json.loads(self._components.read_text(encoding="utf-8"))
        return {key: np.array(clients, dtype=np.int64) for key, clients in plain.items()}

    def append(self, t: int, table: pd.DataFrame) -> None:
        """Keep the rows of round t, with CLIENT, and LOSS and STEPS, or MOVED."""
        table = table.assign(**{ROUND: t})
        replace_file(self.path / f"round_{t:06d}.parquet", lambda path: table.to_parquet(path))

    def truncate(self, after_round: int) -> None:
        """Drop the rows of later rounds."""
        remove_later_files(self.path, "parquet", after_round)

    def table(self) -> pd.DataFrame:
        """The rows of all rounds, with ROUND; columns that a row lacks are NaN."""
        tables = [pd.read_parquet(file) for file in files_of_rounds(self.path, "parquet")]
        joined = pd.concat([table for table in tables if len(table)] or [pd.DataFrame()])
        return joined.reindex(columns=[ROUND, CLIENT, LOSS, STEPS, MOVED])
