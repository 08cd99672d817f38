"""What a run keeps of clients that never hear others, for every run in which they are the same.

Below `strands/` of its run directory: `only.json` names the clients it trains, `round_000012.npz`
holds what was heard of each in round 12 (and, where the round was evaluated, how far its model
moved, and the model every client of the run uses), and at the end `clients.parquet` the scores and,
last, `digests.json` the final models.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.records.atomic import replace_file, replace_text

FOLDER = "strands"
METRICS = frozenset({"train_loss"})  # of a round, that follow from what is kept of its clients

_ROUND = re.compile(r"round_(\d+)\.npz")

Arrays = dict[str, NDArray[Any]]


class Strands:
    """The strands of one run directory."""

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER
        self._only = self.path / "only.json"
        self._clients = self.path / "clients.parquet"
        self._digests = self.path / "digests.json"

    def start(self, clients: Ids) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self._only, json.dumps([int(i) for i in clients]))

    def only(self) -> Ids | None:
        """The clients that the run trains; None: it has no strands, it trains everybody."""
        if not self._only.is_file():
            return None
        return np.array(json.loads(self._only.read_text(encoding="utf-8")), dtype=np.int64)

    def append(self, t: int, arrays: Arrays) -> None:
        """Keep what was heard in round t: `clients`, `loss`, `steps`, and what else is known."""

        def write(path: Path) -> None:
            with path.open("wb") as file:  # given a path, numpy would add .npz to its name
                np.savez(file, **arrays)  # type: ignore[arg-type]  # none is its keyword

        replace_file(self.path / f"round_{t:06d}.npz", write)

    def truncate(self, after_round: int) -> None:
        for file in self.path.glob("round_*.npz"):
            if _round_of(file) > after_round:
                file.unlink()

    def finish(self, scores: pd.DataFrame, digests: dict[int, str]) -> None:
        replace_file(self._clients, lambda path: scores.to_parquet(path))
        replace_text(self._digests, json.dumps({str(i): text for i, text in digests.items()}))

    def is_finished(self) -> bool:
        return self._digests.is_file()

    def rounds(self) -> dict[int, Arrays]:
        files = sorted(self.path.glob("round_*.npz"))
        found: dict[int, Arrays] = {}
        for file in files:
            with np.load(file) as arrays:
                found[_round_of(file)] = dict(arrays)
        return found

    def clients(self) -> pd.DataFrame:
        return pd.read_parquet(self._clients)

    def digests(self) -> dict[int, str]:
        held = json.loads(self._digests.read_text(encoding="utf-8"))
        return {int(i): text for i, text in held.items()}


def _round_of(file: Path) -> int:
    name = _ROUND.fullmatch(file.name)
    assert name is not None, file
    return int(name[1])
