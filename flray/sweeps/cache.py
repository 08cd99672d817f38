"""A content-addressed folder of what runs share: equal keys, equal bits.

`<kind>/<key>/` is an entry, complete or absent. The process that computes it holds
`<kind>/<key>.lock` and works in `<kind>/.<key>/`; `<kind>/<key>.json` has the client steps that the
entry took each sweep, `<kind>/<key>.failed` the error with which it failed. Whoever claims an entry
finishes it before waiting for another one, so no two processes wait for each other; the claim of a
process that died is free again.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep, time
from typing import Any

from flray.clustering.points import Points
from flray.columns import CLIENT_STEPS, ROUND
from flray.errors import CLIENT_ERRORS, ClientFailure, is_gpu_fault, is_gpu_full, one_line_message
from flray.execution.meter import Meter
from flray.files import replace_text
from flray.records.checkpoint import CheckpointStore
from flray.records.encoding import decode, encode
from flray.records.lock import claimed
from flray.server.evaluation import RoundRow

POLL_S = 0.1  # seconds between two looks at an entry that another process computes
WAITING = "waiting"  # phase of a trial: for what another process computes
VALUES_KEPT = 16  # values that a process keeps
COUNTS, DEVICE = "counts", "device"  # with a value: what it cost, and the device it was computed on

Counted = tuple[Any, Mapping[str, int]]  # a value, and counts of what it cost; Any: of any type
_VALUES: dict[Path, Counted] = {}  # by folder of their entries, the one used last at the end


class OutOfTime(Exception):
    """The time of the sweep ended, or it was asked to stop, before something was computed."""


@dataclass(frozen=True)
class Cache:
    """Entries that the trials of one or several sweeps share, and the end of a sweep's time.

    Safe to use from several processes, on several machines if their file system has locks. Equal
    keys must mean equal bits (`flray.sweeps.keys`): an entry that exists is never computed again,
    compared or changed.

    >>> from tempfile import mkdtemp
    >>> cache = Cache(Path(mkdtemp()), sweep="a", session="1")
    >>> def train(folder: Path) -> int:
    ...     print("training")
    ...     return 20  # client steps
    >>> path = cache.obtain("prefix", "key", train)
    training
    >>> cache.obtain("prefix", "key", train) == path, cache.costs("prefix")
    (True, {'key': 20})
    """

    root: Path
    sweep: str  # id of the sweep that computes, for its costs
    session: str  # id of this start of the sweep: what failed is tried again at the next start
    deadline: float = float("inf")  # time at which the sweep has to stop
    wish: Path | None = None  # a file that exists once the sweep has to stop
    # A file that a trial touches as long as it makes progress, with the number of its last round
    alive: Path | None = None
    meter: Meter = field(default_factory=Meter)  # has the seconds of waiting

    def path(self, kind: str, key: str) -> Path:
        """The folder of an entry, whether it exists or not."""
        return self.root / kind / key

    def claim(self, kind: str, key: str) -> AbstractContextManager[bool]:
        """Claim an entry in order to compute it; True if no other process holds the claim.

        A context: the claim ends with it, or with the process. Check once more that the entry is
        absent, since another process may have completed it before the claim.
        """
        return claimed(self.root / kind / f"{key}.lock")

    def obtain(self, kind: str, key: str, compute: Callable[[Path], int]) -> Path:
        """The folder of an entry, which exists, is computed here or awaited from another process.

        The folder is to be read only. Several processes may ask for one entry at a time; exactly
        one computes it.

        Args:
            kind: Folder of entries of this kind.
            key: Key of the entry, as `flray.sweeps.keys` makes it.
            compute: Fills the folder it is given and returns the client steps it took. The folder
                has what a process that was stopped has left.

        Raises:
            OutOfTime: The sweep has to stop.
            ClientFailure: The entry has failed since the sweep was started; the message is
                repeated.
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
        """A value of tensors, arrays and dataclasses by its key; Any: what `compute` returns.

        Equal keys are one object within a process, which callers must not change.
        """
        return self.counted(kind, key, lambda: (compute(), {}))[0]

    def counted(
        self, kind: str, key: str, compute: Callable[[], Counted], is_shared: bool = True
    ) -> Counted:
        """As `value`, with counts of what it cost whoever computed it.

        The process that computes a value keeps it, as it was written: it does not read it.

        Args:
            is_shared: False if no other process asks for the value: then it is not written.
        """
        path = self.path(kind, key)

        def save(folder: Path) -> int:
            value, counts = compute()
            _keep(path, (_written(folder, value, counts), counts))
            return counts.get(CLIENT_STEPS, 0)

        if is_shared:
            self.obtain(kind, key, save)
        elif path not in _VALUES:
            for entry in [entry for entry in _VALUES if not entry.exists()]:
                del _VALUES[entry]  # of another row, which no row asks for
            counts = _keep(path, compute())[1]
            self._count(kind, key, counts.get(CLIENT_STEPS, 0))
        return _keep(path, _VALUES.get(path) or _read(path))

    def publish(self, kind: str, key: str, compute: Callable[[Path], int]) -> None:
        """Compute an entry whose claim is held and put it in place.

        The entry appears as a whole, by a rename; if `compute` raises, nothing appears.
        """
        work = self.path(kind, f".{key}")
        work.mkdir(parents=True, exist_ok=True)
        self._count(kind, key, compute(work))
        os.replace(work, self.path(kind, key))

    def costs(self, kind: str) -> dict[str, int]:
        """The client steps that the entries of a kind took this sweep, by key.

        Entries that other sweeps computed in a common cache cost nothing.
        """
        keys = [path.stem for path in (self.root / kind).glob("*.json")]
        steps = {key: self._steps(kind, key) for key in keys}
        return {key: by[self.sweep] for key, by in steps.items() if self.sweep in by}

    def wait(self) -> None:
        """Wait a moment for another process; call it in a loop until that process is done.

        Raises:
            OutOfTime: The sweep has to stop.
        """
        if self.is_over():
            raise OutOfTime
        with self.meter.phase(WAITING):
            sleep(POLL_S)

    def is_over(self) -> bool:
        """True once the sweep has to stop; a trial asks after each round and while it waits.

        Each call touches `alive`: a trial that does not ask for long is taken to hang.
        """
        self.show_life()
        return self.is_late()

    def show_life(self) -> None:
        """Touch `alive`; called after each block of clients too, since a round may take long."""
        if self.alive is not None:
            self.alive.touch()

    def note_round(self, row: RoundRow) -> None:
        """Write the number of the round that has ended into `alive`."""
        if self.alive is not None:
            self.alive.write_text(str(row[ROUND]), encoding="utf-8")

    def is_late(self) -> bool:
        """True once the sweep has to stop; unlike `is_over`, gives no sign of progress."""
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
            if not (is_gpu_fault(error) or is_gpu_full(error)):  # which need not happen again
                replace_text(failed, json.dumps([self.session, one_line_message(error)]))
            raise

    def _count(self, kind: str, key: str, num_steps: int) -> None:
        path = self.path(kind, f"{key}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({**self._steps(kind, key), self.sweep: num_steps}))

    def _steps(self, kind: str, key: str) -> dict[str, int]:
        path = self.path(kind, f"{key}.json")
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _keep(path: Path, value: Counted) -> Counted:
    """Remember a value, and forget the one that was not used for longest."""
    _VALUES.pop(path, None)
    _VALUES[path] = value
    if len(_VALUES) > VALUES_KEPT:
        del _VALUES[next(iter(_VALUES))]
    return value


def _written(folder: Path, value: Any, counts: Mapping[str, int]) -> Any:
    """Store a value of tensors, arrays and dataclasses, and return it as `_read` would."""
    points = value[0] if isinstance(value, tuple) else value
    device = points.values.device.type if isinstance(points, Points) else "cpu"
    store = CheckpointStore(folder)
    snapshot = store.snapshot(0, value, {COUNTS: dict(counts), DEVICE: device})
    store.write(snapshot)
    return decode(snapshot.trees["state"], snapshot.arrays, device)


def _read(folder: Path) -> Counted:
    """A stored value, on the kind of device it was computed on: distances depend on it."""
    stored = CheckpointStore(folder).load_latest()
    assert stored is not None, folder
    return decode(*encode(stored.state), stored.extra[DEVICE]), stored.extra[COUNTS]
