"""A content-addressed folder of what runs share: equal keys, equal bits.

`<kind>/<key>/` is an entry, complete or absent. The process that computes it holds
`<kind>/<key>.lock` and works in `<kind>/.<key>/`; `<kind>/<key>.json` holds the client steps that
the entry took each sweep. Whoever claims an entry finishes it before waiting for another one, so
nobody waits in a circle; the claim of a process that died is free again.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import sleep, time
from typing import Any

from flray.clustering.points import Points
from flray.errors import ClientFailure, one_line_message
from flray.execution.executor import CLIENT_ERRORS
from flray.files import replace_text
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.lock import claimed

POLL_S = 0.1
VALUES_KEPT = 64  # by a process, of those it has read
DEVICE = "device"


class OutOfTime(Exception):
    """The time of the sweep ended before something was computed."""


@dataclass(frozen=True)
class Cache:
    root: Path
    sweep: str  # names the sweep that computes, for its costs
    session: str  # names this start of the sweep: what failed is tried again at the next start
    deadline: float = float("inf")  # by the clock
    wish: Path | None = None  # a file that exists once the sweep has to stop
    alive: Path | None = None  # a file that a trial touches as long as it makes progress

    def path(self, kind: str, key: str) -> Path:
        return self.root / kind / key

    def claim(self, kind: str, key: str) -> AbstractContextManager[bool]:
        """Claim an entry in order to compute it; True if no other process holds the claim."""
        return claimed(self.root / kind / f"{key}.lock")

    def obtain(self, kind: str, key: str, compute: Callable[[Path], int]) -> Path:
        """The folder of an entry: found, computed here, or awaited from whoever has claimed it.

        Args:
            compute: fills the folder it is given and returns the client steps it took. The folder
                holds what a process that was stopped has left.
        """
        path = self.path(kind, key)
        while not path.exists():
            with self.claim(kind, key) as is_mine:
                if is_mine and not path.exists():
                    self._compute_once(kind, key, compute)
            if not path.exists():
                self.wait()
        return path

    def value(self, kind: str, key: str, compute: Callable[[], Any]) -> Any:
        """A value of tensors, arrays and dataclasses by its key. Any: what `compute` returns."""

        def save(folder: Path) -> int:
            write_value(folder, compute())
            return 0

        return read_value(self.obtain(kind, key, save)).state

    def publish(self, kind: str, key: str, compute: Callable[[Path], int]) -> None:
        """Compute an entry whose claim is held and put it in place."""
        work = self.path(kind, f".{key}")
        work.mkdir(parents=True, exist_ok=True)
        steps = {**self._steps(kind, key), self.sweep: compute(work)}
        replace_text(self.path(kind, f"{key}.json"), json.dumps(steps))
        os.replace(work, self.path(kind, key))

    def costs(self, kind: str) -> dict[str, int]:
        """The client steps that the entries of a kind took this sweep, by key."""
        keys = [path.stem for path in (self.root / kind).glob("*.json")]
        steps = {key: self._steps(kind, key) for key in keys}
        return {key: each[self.sweep] for key, each in steps.items() if self.sweep in each}

    def wait(self) -> None:
        """Wait a moment for another process; raises OutOfTime once the sweep has to stop."""
        if self.is_over():
            raise OutOfTime
        sleep(POLL_S)

    def is_over(self) -> bool:
        """True once the sweep has to stop; a trial asks after each round and while it waits."""
        if self.alive is not None:
            self.alive.touch()
        return self.is_late()

    def is_late(self) -> bool:
        return time() > self.deadline or (self.wish is not None and self.wish.exists())

    def _compute_once(self, kind: str, key: str, compute: Callable[[Path], int]) -> None:
        """Compute an entry, or repeat the error with which it failed since the sweep began."""
        failed = self.path(kind, f"{key}.failed")
        if failed.is_file():
            session, message = json.loads(failed.read_text(encoding="utf-8"))
            if session == self.session:
                raise ClientFailure(message)
        try:
            self.publish(kind, key, compute)
        except CLIENT_ERRORS as error:
            shutil.rmtree(self.path(kind, f".{key}"), ignore_errors=True)
            replace_text(failed, json.dumps([self.session, one_line_message(error)]))
            raise

    def _steps(self, kind: str, key: str) -> dict[str, int]:
        path = self.path(kind, f"{key}.json")
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_value(folder: Path, value: Any, extra: Mapping[str, object] | None = None) -> None:
    """Store a value of tensors, arrays and dataclasses. Any: of any such type."""
    points = value[0] if isinstance(value, tuple) else value
    device = points.values.device.type if isinstance(points, Points) else "cpu"
    CheckpointStore(folder).save(0, value, {**(extra or {}), DEVICE: device})


@lru_cache(maxsize=VALUES_KEPT)
def read_value(folder: Path) -> Checkpoint:
    """What was stored, on the kind of device it was computed on, which distances depend on.

    A process reads it once, so equal keys are one object.
    """
    found = CheckpointStore(folder).load_latest()
    assert found is not None, folder
    if found.extra[DEVICE] != "cpu":
        found = CheckpointStore(folder).load_latest(found.extra[DEVICE])
        assert found is not None, folder
    return found
