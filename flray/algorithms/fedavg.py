"""FedAvg: the sampled clients train from one model, which becomes their weighted mean.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017, arXiv 1602.05629. Algorithm 1.
"""

from dataclasses import dataclass

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.models.mixing import Relation


@dataclass(frozen=True)
class FedAvgState:
    """State of FedAvg: the global model."""

    bank: ModelBank  # one row: the global model


@dataclass(frozen=True)
class FedAvg:
    """Alg. 1: one model for all clients; holdout clients and newcomers use it too.

    In each round `participation` of the clients train from the global model, which becomes the mean
    of their models, weighted by their numbers of examples (`aggregate.weights`). It has no keys:

        algorithm: fedavg

    >>> FedAvg().gradient is plain_gradient  # clients run SGD, or `train.optimizer`
    True
    """

    def init(self, fed: Federation) -> Outcome[FedAvgState]:
        return Outcome(FedAvgState(fed.initial_bank()))

    def cohort(self, state: FedAvgState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))  # Alg. 1 l. 4-5: S_t, max(C K, 1) clients

    gradient = staticmethod(plain_gradient)  # ClientUpdate l. 3: w <- w - eta grad l(w; b)

    def round(self, state: FedAvgState, cohort: Cohort, fed: Federation) -> Outcome[FedAvgState]:
        # Alg. 1 l. 8: w_{t+1} <- sum_k n_k / n w^k_{t+1}
        everybody = Relation.joint(fed.num_clients)
        bank, trained = fed.average(everybody, state.bank, cohort, self.gradient)
        return Outcome(FedAvgState(bank), trained.metrics())

    def deploy(self, state: FedAvgState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: FedAvgState) -> Ids:
        return state.bank.owner
