"""The `evaluate` part of an experiment: when models are evaluated, on which data, and how."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from flray.client.scores import SCORES, Accuracy, MeanAbsoluteError, Score, columns_of
from flray.columns import ScoreColumns, is_taken
from flray.data.split import Part
from flray.engines.training import Training
from flray.measures import MEASURES
from flray.measures.drift import Drift
from flray.measures.measure import Measure
from flray.measures.robustness import Robustness
from flray.values import require_at_least, shown


@dataclass(frozen=True)
class FineTuning:
    """Training of each client's model on the client's own data before it is evaluated.

    It changes neither the models nor any column without the prefix `tuned_`.
    """

    epochs: int  # Epochs of fine-tuning on the client's own data
    lr: float | None = None  # Learning rate of fine-tuning. None: `train.lr`

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}; null: no fine-tuning")
        if self.lr is not None and not 0 < self.lr < np.inf:
            raise ValueError(
                f"lr must be > 0 and finite, got {self.lr}; null: that of the experiment"
            )


@dataclass(frozen=True)
class Evaluation:
    """When models are evaluated, and on which data.

    Each client's model is evaluated on the client's own test and validation examples.

    >>> Evaluation(on="global").parts
    ('test', 'validation', 'global')
    >>> Evaluation(fine_tune=FineTuning(epochs=5)).tuning(Training(lr=0.1)).epochs
    5
    """

    every: int = 1  # Rounds between evaluations; the last round is always evaluated
    also: tuple[int, ...] = ()  # Further rounds that are evaluated
    # Clients evaluated in a round, a sample drawn from the seed. None: all
    clients: int | None = None
    # Clients evaluated in the last round, if `clients` is set. None: all
    clients_at_end: int | None = None
    # Scores of predictions; the first decides the worst client, the target and the best row of a
    # sweep. []: accuracy for classes, mae for numbers
    scores: tuple[Annotated[Any, "score", SCORES], ...] = ()
    # Value of the first score, a fraction for percent, that each client, and the mean, should
    # reach. None: no target
    target: float | None = None
    # Evaluate models also after fine-tuning (columns tuned_*). None: do not
    fine_tune: FineTuning | None = None
    # Evaluate each client also with the model it trained last, as FLIS does: keys last_trained_* of
    # a summary
    last_trained: bool = False
    # Test data. local: the client's own; global: also the whole test set (columns global_*)
    on: Literal["local", "global"] = "local"
    similarity: bool = False  # Compare clusterings with the labels that clients hold
    # Compare signatures with how clients see the same images. None: do not
    drift: Drift | None = None
    # Measure whether clients similar to those of a cluster are placed in it. None: do not
    robustness: Robustness | None = None

    def __post_init__(self) -> None:
        require_at_least(self, every=1, clients=1, clients_at_end=1)
        if self.clients is None and self.clients_at_end is not None:
            raise ValueError("clients_at_end needs clients, the sample of the rounds before")
        names: list[Any] = [getattr(score, "name", None) for score in self.scores]  # Any: unchecked
        for name in names:
            if not isinstance(name, str) or not name.isidentifier() or names.count(name) > 1:
                raise ValueError(
                    "scores must have different names made of letters, digits and underscores, "
                    f"got {shown(name)}: set `name` in the class of the score"
                )
            if is_taken(name, names):
                raise ValueError(
                    f"scores must have names that no recorded column has, got {name}, which is or "
                    f"begins like one; choose another, such as my_{name}"
                )
        self.check_target("target", self.target)

    def check_target(self, key: str, target: float | None) -> None:
        """Refuse a target of the first score that cannot be one, such as 97 for a fraction."""
        is_share = self.score_columns[0].unit == "%"
        if target is not None and is_share and not 0 < target <= 1:
            raise ValueError(
                f"{key} must be in (0, 1], got {target}: a fraction, not percent; "
                "for a target in another unit name its score in evaluate.scores"
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

    def sample_size(self, t: int, num_rounds: int) -> float | None:
        """Clients that are evaluated in round t, inf for all; None: this run samples no clients.

        >>> [Evaluation(clients=9).sample_size(t, num_rounds=2) for t in (1, 2)]
        [9, inf]
        """
        if self.clients is None or t < num_rounds:
            return self.clients
        return np.inf if self.clients_at_end is None else self.clients_at_end

    @property
    def score_columns(self) -> tuple[ScoreColumns, ...]:
        """The columns of each score; the first one ranks.

        >>> [score.mean for score in Evaluation().score_columns]
        ['accuracy_mean']
        """
        return tuple(columns_of(score) for score in self.scores or (Accuracy(),))

    @property
    def computed(self) -> tuple[Score, ...]:
        """The scores that hosts compute; none for accuracy alone, which is counted anyway."""
        return () if self.scores == (Accuracy(),) else self.scores

    def of_task(self, has_classes: bool) -> "Evaluation":
        """The same with the default score of a task.

        >>> Evaluation().of_task(has_classes=False).score_columns[0].name
        'mae'
        """
        if self.scores or has_classes:
            return self
        return replace(self, scores=(MeanAbsoluteError(),))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the data that each client's model is evaluated on."""
        return ("test", "validation", "global") if self.on == "global" else ("test", "validation")

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What is measured of clusterings: measures without a key here, and those whose key is set.

        >>> [type(measure).__name__ for measure in Evaluation(similarity=True).measures]
        ['LabelSets', 'PlantedGroups', 'LabelSimilarity']
        """
        settings = [(kind, getattr(self, name, True)) for name, kind in MEASURES.items()]
        return tuple(kind() if value is True else value for kind, value in settings if value)

    def tuning(self, training: Training) -> Training | None:
        """How models are fine-tuned in an experiment with this training; None: they are not.

        Batch size, optimiser and the rest are those of the training.
        """
        if self.fine_tune is None:
            return None
        lr = training.lr if self.fine_tune.lr is None else self.fine_tune.lr
        return replace(training, epochs=self.fine_tune.epochs, lr=lr)
