"""The meter of a federation: what a round costs."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray


@dataclass
class Meter:
    """Costs of a round: bytes by kind, steps, failures, reads of ground truth, seconds by phase.

    Algorithms and signatures add to it; the server reads and resets it after each round, and every
    count becomes a column of the round's row.

    >>> meter = Meter()
    >>> meter.count_transfer("model", down=8, up=4)
    >>> meter.counts["client_steps"] += 30
    >>> meter.read_and_reset()
    {'bytes_down_model': 8, 'bytes_up_model': 4, 'client_steps': 30}
    >>> meter.read_and_reset()
    {}
    """

    counts: Counter[str] = field(default_factory=Counter)  # by column
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    logged: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # Seconds of all rounds by phase, which are never reset
    spent: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to the column `seconds_<name>`.

        Phases may be inside each other; the outer one then includes the inner one.
        """
        begin = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - begin
            self.seconds[name] += seconds
            self.spent[name] += seconds  # type: ignore[assignment]  # typeshed counts with integers

    def count_transfer(self, kind: str, down: int = 0, up: int = 0) -> None:
        """Bytes a real system would have sent to clients (down) and received from them (up).

        Args:
            kind: What was sent, as in `bytes_up_<kind>`: model, signature, ...
            down: Bytes to all clients together.
            up: Bytes from all clients together.
        """
        self.counts[f"bytes_down_{kind}"] += down
        self.counts[f"bytes_up_{kind}"] += up

    def note_logged(self, blocks: Sequence[Mapping[str, NDArray[np.float64]]]) -> None:
        """Keep what modules logged, one value per client; the row has the mean.

        Args:
            blocks: For each block, by name, (K,) values of its clients; NaN for a client that
                logged nothing.
        """
        for block in blocks:
            for name, values in block.items():
                self.logged[name] += values[~np.isnan(values)].tolist()

    def read_and_reset(self) -> dict[str, float]:
        """The columns of the round so far; counting starts again at zero."""
        row: dict[str, float] = dict(self.counts)
        row |= {f"seconds_{name}": value for name, value in self.seconds.items()}
        row |= {f"logged_{n}": float(np.mean(v)) for n, v in self.logged.items() if v}
        self.counts.clear()
        self.seconds.clear()
        self.logged.clear()
        return row
