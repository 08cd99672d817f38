"""Local: every client keeps its own model; the sampled ones train, nothing is averaged or sent."""

from dataclasses import dataclass

from flray.algorithms.algorithm import Metrics
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.execution.federation import Cohort, Federation


@dataclass(frozen=True)
class Local(FedAvg):
    def round(
        self, state: FedAvgState, cohort: Cohort, fed: Federation
    ) -> tuple[FedAvgState, Metrics]:
        trained = fed.train(state.bank, cohort, self.gradient)
        return FedAvgState(state.bank.owned_by(trained.clients, trained.params)), trained.metrics()
