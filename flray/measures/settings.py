"""The `evaluate` part of an experiment: when models are judged, on what, and how."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flray.data.similar import Robustness
from flray.data.split import Part
from flray.engines.training import Training
from flray.measures.drift import Drift


@dataclass(frozen=True)
class FineTuning:
    """Training of each client's model on the client's own data before it is judged."""

    epochs: int
    lr: float | None = None  # None: that of the experiment

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}; null: no fine-tuning")
        if self.lr is not None and not 0 < self.lr < np.inf:
            raise ValueError(
                f"lr must be > 0 and finite, got {self.lr}; null: that of the experiment"
            )


@dataclass(frozen=True)
class Evaluation:
    every: int = 1  # rounds between evaluations; the last round is always evaluated
    also: tuple[int, ...] = ()  # rounds evaluated in any case
    target: float | None = None  # accuracy that a client, and the mean, should reach
    fine_tune: FineTuning | None = None  # judge models after fine-tuning too: tuned_ columns
    # Judge each client by the model it trained last, as FLIS does: last_trained_ keys of a summary.
    last_trained: bool = False
    on: Literal["local", "global"] = "local"  # global: on the whole test set too, global_ columns
    similarity: bool = False  # compare clusterings with the labels that clients hold
    drift: Drift | None = None  # compare signatures with how clients see the same images
    robustness: Robustness | None = None  # do clients like those of a cluster belong to it?

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be >= 1, got {self.every}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(
                f"target must be in (0, 1], got {self.target}: a fraction, not percent"
            )

    def is_regular(self, t: int, num_rounds: int) -> bool:
        """True if round t is evaluated whatever happens in it.

        >>> [t for t in range(1, 8) if Evaluation(every=3, also=(2,)).is_regular(t, num_rounds=7)]
        [2, 3, 6, 7]
        """
        return t % self.every == 0 or t == num_rounds or t in self.also

    def is_due(self, t: int, num_rounds: int, clusters_in: Callable[[int], bool]) -> bool:
        """True if round t is evaluated: regularly, or in or after the round of a clustering.

        Papers report the round of a clustering and the one after it. Of clusterings in consecutive
        rounds the first counts: FLIS (DC) clusters in all.
        """
        begins = any(clusters_in(n) and not clusters_in(n - 1) for n in (t, t - 1))
        return begins or self.is_regular(t, num_rounds)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What each client's model is judged on."""
        return ("test", "validation", "global") if self.on == "global" else ("test", "validation")

    def tuning(self, training: Training) -> Training | None:
        """How models are fine-tuned in an experiment that trains so; None: they are not."""
        if self.fine_tune is None:
            return None
        lr = training.lr if self.fine_tune.lr is None else self.fine_tune.lr
        return replace(training, epochs=self.fine_tune.epochs, lr=lr)
