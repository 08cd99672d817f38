"""The `stop` part of an experiment: when a run ends before its last round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flray.columns import ACCURACY_COLUMNS, ScoreColumns
from flray.errors import ExperimentError
from flray.execution.federation import Federation
from flray.measures.scores import reaches
from flray.values import require_at_least


@dataclass(frozen=True)
class Stop:
    """Ends a run by the mean of the first score over clients on their validation parts.

    Test data decide nothing. The rules look at evaluated rounds after the clustering of a method
    that clusters after `rounds_before` rounds, and at all evaluated rounds of any other.

    >>> Stop(patience=2).reason([0.5, 0.7, 0.6]), Stop(patience=2).reason([0.5, 0.7, 0.6, 0.7])
    (None, 'patience')
    >>> Stop(target=0.7).reason([0.5, 0.7])
    'target'
    """

    # Value of the first score, a fraction for percent, that ends the run. None: none does
    target: float | None = None
    # Evaluations in a row without a new best validation score that end the run. None: any number
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.target is None and self.patience is None:
            raise ValueError("give target or patience; null instead of the mapping: all rounds")
        require_at_least(self, patience=1)

    def reason(self, scores: Sequence[float], score: ScoreColumns = ACCURACY_COLUMNS) -> str | None:
        """The rule that ends the run after evaluations with these scores; None: it goes on."""
        if not scores:
            return None
        best = max if score.higher_is_better else min
        if self.target is not None and reaches(np.array(scores[-1]), self.target, score):
            return "target"
        since_best = len(scores) - 1 - scores.index(best(scores))
        is_over = self.patience is not None and since_best >= self.patience
        return "patience" if is_over else None

    def require(self, fed: Federation) -> None:
        """Refuse an experiment whose clients have nothing that may decide."""
        split = fed.timeline.at(1)
        if not any(len(split.validation[i]) for i in split.clients):
            raise ExperimentError(
                "stop decides by the validation parts of clients, test data decide nothing, and no "
                "client has a validation part: set split.validation > 0 or leave stop out"
            )
