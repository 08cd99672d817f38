"""LG-FedAvg: the last layers are one global model, the layers before them each client's own.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally:
Federated Learning with Local and Global Representations. 2020, arXiv 2001.01523. Algorithm 1.

A layer is a module with parameters or float buffers of its own, in the order of the module's
definition; the buffers of a private BatchNorm layer are private too. A client that never trained, a
newcomer or a holdout client, has the initial private layers.

Deviates: no rounds of FedAvg before, and no choice of models on test data, as in the authors' code.
"""

from dataclasses import dataclass

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, last_layers
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation
from flray.values import require_at_least


@dataclass(frozen=True)
class LgFedAvgState:
    """State of LG-FedAvg: private first layers of each client, shared last layers."""

    local: ClientTable  # theta_l of each client: the leaves of the first layers
    shared: ModelBank  # theta_g, one row: the leaves of the last layers


@dataclass(frozen=True)
class LgFedAvg:
    """Alg. 1: clients keep their first layers and average the last ones.

    A client that has never trained, such as a holdout client, has the initial first layers. Only
    the shared layers are sent, in both directions. `global_layers: 0` is local training, all layers
    of the model are FedAvg.

        algorithm: {name: lg_fedavg, global_layers: 1}

    >>> LgFedAvg().global_layers
    2
    """

    # Number of last layers that clients share; 2 in FLIS's comparison, 0 shares nothing
    global_layers: int = 2

    gradient = staticmethod(plain_gradient)

    def __post_init__(self) -> None:
        require_at_least(self, global_layers=0)

    def require(self, fed: Federation) -> None:
        last_layers(fed.initial, self.global_layers)  # refuses more layers than the model has

    def init(self, fed: Federation) -> Outcome[LgFedAvgState]:
        names = last_layers(fed.initial, self.global_layers)
        private = {name: leaf for name, leaf in fed.initial.items() if name not in names}
        shared = {name: leaf for name, leaf in fed.initial.items() if name in names}
        local = ClientTable.empty(private, fed.num_clients)
        return Outcome(LgFedAvgState(local, ModelBank(shared, fed.initial_bank().owner)))

    def cohort(self, state: LgFedAvgState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def round(
        self, state: LgFedAvgState, cohort: Cohort, fed: Federation
    ) -> Outcome[LgFedAvgState]:
        trained = fed.train(self.deploy(state, cohort.clients, fed), cohort, self.gradient)
        private = trained.leaves(list(state.local.default))
        local = state.local.updated(trained.clients, private)  # Alg. 1: theta_l stays on the device
        if state.shared.params:
            fed.count_models(state.shared, cohort, trained)
        # Alg. 1: theta_g <- sum_k n_k / n theta_g,k
        shared = fed.mix(Relation.joint(fed.num_clients), trained, state.shared)
        return Outcome(LgFedAvgState(local, shared), trained.metrics())

    def deploy(self, state: LgFedAvgState, clients: Ids, fed: Federation) -> ModelBank:
        """Each client's own first layers with the global last ones."""
        private = state.local.bank(clients)
        num_rows = int(private.owner.max()) + 1
        shared = {
            name: leaf.expand(num_rows, *leaf.shape[1:])
            for name, leaf in state.shared.params.items()
        }
        return ModelBank(private.params | shared, private.owner)

    def partition(self, state: LgFedAvgState) -> Ids:
        """One cluster: everybody's global layers are the same."""
        return state.shared.owner
