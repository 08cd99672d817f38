"""FedAvg: the sampled clients train from one model, which becomes their weighted mean.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017, arXiv 1602.05629. Algorithm 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

from flray.algorithms.algorithm import Metrics
from flray.client.training import LocalBatch
from flray.data.dataset import Ids
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.models.mixing import mix, mixing_row


@dataclass(frozen=True)
class FedAvgState:
    bank: ModelBank  # one row: the global model


@dataclass(frozen=True)
class FedAvg:
    def init(self, fed: Federation) -> FedAvgState:
        return FedAvgState(fed.initial_bank())

    def cohort(self, state: FedAvgState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))  # Alg. 1 l. 4-5: S_t, max(C K, 1) clients

    def gradient(
        self,
        grad: Callable[[Params, LocalBatch], Params],
        w: Params,
        batch: LocalBatch,
        w0: Params,
        memo: Params,
    ) -> Params:
        return grad(w, batch)  # ClientUpdate l. 3: w <- w - eta grad l(w; b)

    def round(
        self, state: FedAvgState, cohort: Cohort, fed: Federation
    ) -> tuple[FedAvgState, Metrics]:
        trained = fed.train(state.bank, cohort, self.gradient)
        exchanged = len(cohort.clients) * state.bank.bytes_per_model
        fed.meter.count_transfer("model", down=exchanged, up=exchanged)
        with fed.meter.phase("mix"):
            # Alg. 1 l. 8: w_{t+1} <- sum_k n_k / n w^k_{t+1}
            row = mixing_row(fed.weights(), 0, trained.clients, state.bank, fed.aggregation)
            params = mix([row], trained.params, state.bank.params)
        return FedAvgState(ModelBank(params, state.bank.owner)), trained.metrics()

    def deploy(self, state: FedAvgState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank
