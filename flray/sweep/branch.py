"""A run from the round of its clustering on, of which the state is known already."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from flray.algorithms.algorithm import Branching, Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.client.training import Gradient
from flray.clustering.pipeline import Clustering
from flray.config.experiment import Experiment
from flray.data.dataset import Ids
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.records.columns import COUNTED, TRAIN_LOSS
from flray.server.evaluation import RoundRow

OF_EVALUATION = "_evaluation"  # how those end that are not of the round itself
METRICS = frozenset({TRAIN_LOSS})  # of a round, that follow from what is kept of its clients


def branches(experiment: Experiment) -> bool:
    """True if it is FedAvg up to a clustering that it comes to."""
    algorithm = experiment.algorithm.build()
    if not isinstance(algorithm, Branching):
        return False
    return algorithm.rounds_before <= experiment.settings.rounds


class OwnMetrics(Exception):
    """A round returned metrics that neither FedAvg's prefix nor components have."""


@dataclass(frozen=True)
class Branch:
    """Stands for a branching algorithm from the round of its clustering on.

    The server's own loop records and evaluates that round, as it would in a run alone.
    """

    algorithm: Branching[Any]  # Any: the state is the algorithm's own
    state: Any  # after the clustering
    clustering: Clustering
    counts: Counter[str]  # of the clustering
    row: RoundRow  # the prefix's, of the round of the clustering
    are_metrics_known: bool  # refuse metrics that the prefix or components lack

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
            if self.are_metrics_known and outcome.metrics.keys() - METRICS:
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
    def assign(self) -> Any:  # Any: a method that only some algorithms have
        return self.algorithm.assign  # type: ignore[attr-defined]  # raised where it has none
