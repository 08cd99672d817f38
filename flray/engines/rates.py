"""Learning rates that change from round to round."""

import math
import sys
from dataclasses import dataclass
from typing import Literal

from flray.values import require_at_least


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate of each round, the same for every client and all steps of the round.

    With `decay` the rate is multiplied by a factor every so many rounds; with `cosine` it follows
    half a cosine from `start` in round 1 to `end` after the last round. It is never below `end`,
    nor below the smallest number of the machine. Within a round the rate does not change.

        train: {lr: {start: 0.1, decay: 0.99}}
        train: {lr: {start: 0.1, schedule: cosine, end: 0.001}}

    >>> [RateSchedule(0.8, decay=0.5, every=2).at(t) for t in (1, 2, 3, 5)]
    [0.8, 0.8, 0.4, 0.2]
    >>> cosine = RateSchedule(0.8, "cosine", end=0.2, rounds=4)
    >>> [round(cosine.at(t), 3) for t in (1, 3, 5, 9)]  # round 3 is half of the way
    [0.8, 0.5, 0.2, 0.2]
    """

    start: float  # Learning rate of round 1
    # How it changes. decay: by a factor; cosine: along half a cosine from start to end
    schedule: Literal["decay", "cosine"] = "decay"
    decay: float = 1.0  # Factor in (0, 1], of schedule decay
    every: int = 1  # Rounds between two changes by this factor
    end: float = 0.0  # Least learning rate, to which schedule cosine leads
    rounds: int | None = None  # Rounds that schedule cosine takes. None: those of the experiment

    def __post_init__(self) -> None:
        if not 0 < self.start < math.inf:
            raise ValueError(f"start must be > 0 and finite, got {self.start}")
        if not 0 <= self.end <= self.start:
            raise ValueError(f"end must be in [0, start], got {self.end} with start {self.start}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")
        require_at_least(self, every=1, rounds=1)
        if self.schedule == "cosine" and (self.decay, self.every) != (1, 1):
            raise ValueError("decay and every belong to schedule decay, got schedule cosine")
        if self.schedule == "decay" and self.rounds is not None:
            raise ValueError(f"rounds belongs to schedule cosine, got {self.rounds} with decay")

    def at(self, t: int) -> float:
        """The learning rate of round t, which is > 0."""
        if self.schedule == "decay":
            rate = self.start * self.decay ** ((t - 1) // self.every)
        else:
            assert self.rounds is not None  # `Training.over` comes first
            share = min((t - 1) / self.rounds, 1.0)
            rate = self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2
        return max(rate, self.end, sys.float_info.min)
