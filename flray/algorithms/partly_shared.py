"""Methods that average some leaves of a model and leave the others to each client.

LG-FedAvg, FedPer, FedRep and FedBN differ in which leaves are private; APFL's are a second model.
"""

from dataclasses import dataclass

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation


@dataclass(frozen=True)
class PartlySharedState:
    """Private leaves of each client, and the shared leaves of all."""

    private: ClientTable
    shared: ModelBank  # one row


class PartlyShared:
    """Base class: clients train all leaves and send the shared ones only.

    A client that has never trained, such as a holdout client, has the initial private leaves. Where
    no leaf is private this is FedAvg, where all are it is Local, to the last bit.
    """

    gradient = staticmethod(plain_gradient)

    def private_leaves(self, fed: Federation) -> frozenset[str]:
        """Names of the leaves that clients keep for themselves."""
        raise NotImplementedError

    def require(self, fed: Federation) -> None:
        self.private_leaves(fed)  # refuses a model that does not have the layers asked for

    def init(self, fed: Federation) -> Outcome[PartlySharedState]:
        names = self.private_leaves(fed)
        private = {name: leaf for name, leaf in fed.initial.items() if name in names}
        shared = {name: leaf for name, leaf in fed.initial.items() if name not in names}
        table = ClientTable.empty(private, fed.num_clients)
        return Outcome(PartlySharedState(table, ModelBank(shared, fed.initial_bank().owner)))

    def cohort(self, state: PartlySharedState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def round(
        self, state: PartlySharedState, cohort: Cohort, fed: Federation
    ) -> Outcome[PartlySharedState]:
        trained = self.train(state, cohort, fed)
        # Private leaves are kept for the client in the server's table and not counted as sent.
        leaves = trained.leaves(list(state.private.default))
        private = state.private.updated(trained.clients, leaves)
        if state.shared.params:
            fed.count_models(state.shared, cohort, trained)
        # The shared leaves are averaged: sum_k n_k / n w_k
        shared = fed.mix(Relation.joint(fed.num_clients), trained, state.shared)
        return Outcome(PartlySharedState(private, shared), trained.metrics())

    def train(self, state: PartlySharedState, cohort: Cohort, fed: Federation) -> Trained:
        """Local training from the shared leaves and the clients' own."""
        return fed.train(self.assembled(state, cohort.clients), cohort, self.gradient)

    def deploy(self, state: PartlySharedState, clients: Ids, fed: Federation) -> ModelBank:
        return self.assembled(state, clients)

    def assembled(self, state: PartlySharedState, clients: Ids) -> ModelBank:
        """Each client's own leaves with the shared ones."""
        private = state.private.bank(clients)
        num_rows = int(private.owner.max()) + 1
        shared = {
            name: leaf.expand(num_rows, *leaf.shape[1:])
            for name, leaf in state.shared.params.items()
        }
        return ModelBank(private.params | shared, private.owner)

    def partition(self, state: PartlySharedState) -> Ids:
        """One cluster: everybody's shared leaves are the same."""
        return state.shared.owner
