"""What a run keeps that trains a part of its clients, for the runs in which they go on alike.

Below `part/` of its run directory: `components.json` says which components it trains and who their
clients are; `round_000012.npz` holds what was heard of each client in round 12 and, where the round
was evaluated, how far the models moved and which model every client of the run uses.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.records.atomic import replace_file, replace_text

FOLDER = "part"

_ROUND = re.compile(r"round_(\d+)\.npz")

Arrays = dict[str, NDArray[Any]]


class PartRecords:
    """The records of the components that one run directory trains."""

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER
        self._components = self.path / "components.json"

    def start(self, components: Mapping[str, Ids]) -> None:
        """Name the components by their keys, with their clients."""
        self.path.mkdir(parents=True, exist_ok=True)
        plain = {key: [int(i) for i in clients] for key, clients in components.items()}
        replace_text(self._components, json.dumps(plain))

    def components(self) -> dict[str, Ids]:
        held = json.loads(self._components.read_text(encoding="utf-8"))
        return {key: np.array(clients, dtype=np.int64) for key, clients in held.items()}

    def append(self, t: int, arrays: Arrays) -> None:
        """Keep what is known of round t."""

        def write(path: Path) -> None:
            with path.open("wb") as file:  # given a path, numpy would add .npz to its name
                np.savez(file, **arrays)  # type: ignore[arg-type]  # none is its keyword

        replace_file(self.path / f"round_{t:06d}.npz", write)

    def truncate(self, after_round: int) -> None:
        for file in self.path.glob("round_*.npz"):
            if _round_of(file) > after_round:
                file.unlink()

    def rounds(self) -> dict[int, Arrays]:
        found: dict[int, Arrays] = {}
        for file in sorted(self.path.glob("round_*.npz")):
            with np.load(file) as arrays:
                found[_round_of(file)] = dict(arrays)
        return found


def _round_of(file: Path) -> int:
    name = _ROUND.fullmatch(file.name)
    assert name is not None, file
    return int(name[1])
