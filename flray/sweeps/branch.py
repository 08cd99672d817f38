"""A row that continues FedAvg's shared rounds from its own clustering on."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from flray.algorithms.algorithm import Branching, Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.clustering.pipeline import Clustering
from flray.columns import COUNTED, TRAIN_LOSS
from flray.config.experiment import Experiment
from flray.data.dataset import Ids
from flray.engines.training import Gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.server.evaluation import RoundRow

OF_EVALUATION = "_evaluation"  # ends the columns of costs of evaluating, not of the round itself
METRICS = frozenset({TRAIN_LOSS})  # of a round; computed again from the records of its clients


def branches(experiment: Experiment) -> bool:
    """True if the experiment is FedAvg up to a clustering, and has enough rounds to reach it."""
    algorithm = experiment.algorithm.build()
    if not isinstance(algorithm, Branching):
        return False
    return algorithm.rounds_before <= experiment.settings.rounds


class OwnMetrics(Exception):
    """A round returned metrics that are recorded neither in the prefix nor for groups."""


@dataclass(frozen=True)
class Branch:
    """Replaces a branching algorithm from the round of its clustering on.

    The server's own loop records and evaluates that round, as it would in a run alone. Raises
    OwnMetrics if the algorithm returns metrics that only a run of its own records.
    """

    algorithm: Branching[Any]  # Any: the state is the algorithm's own
    state: Any  # after the clustering
    clustering: Clustering
    counts: Counter[str]  # costs of the clustering
    row: RoundRow  # the prefix's, of the round of the clustering; empty for round 0

    @property
    def gradient(self) -> Gradient:
        return self.algorithm.gradient

    def init(self, fed: Federation) -> Outcome[Any]:
        fed.meter.counts.update(self.counts)
        return Outcome(self.state, clusterings=(self.clustering,))

    def cohort(self, state: Any, t: int, fed: Federation) -> Cohort:
        if t == self.algorithm.rounds_before:
            return FedAvg().cohort(state, t, fed)
        return self.algorithm.cohort(state, t, fed)

    def round(self, state: Any, cohort: Cohort, fed: Federation) -> Outcome[Any]:
        if cohort.t > self.algorithm.rounds_before:
            outcome = self.algorithm.round(state, cohort, fed)
            if outcome.metrics.keys() - METRICS:
                raise OwnMetrics
            return outcome
        # A branch is evaluated anew, so what the prefix's evaluation cost is not its own.
        costs = {
            key: value
            for key, value in self.row.items()
            if key.startswith(COUNTED) and not key.endswith(OF_EVALUATION)
        }
        fed.meter.counts.update(costs)
        fed.meter.counts.update(self.counts)
        metrics = {key: value for key, value in self.row.items() if key in METRICS}
        return Outcome(self.state, metrics, (self.clustering,))

    def deploy(self, state: Any, clients: Ids, fed: Federation) -> ModelBank:
        if isinstance(state, FedAvgState):  # as it was before the clustering
            return state.bank
        return self.algorithm.deploy(state, clients, fed)

    def partition(self, state: Any) -> Ids:
        return self.algorithm.partition(state)

    @property
    def nearest_clusters(self) -> Any:  # Any: a method that only some algorithms have
        return self.algorithm.nearest_clusters  # type: ignore[attr-defined]  # raised without one
