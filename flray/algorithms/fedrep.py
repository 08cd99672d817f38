"""FedRep: clients train a head of their own, then the body, which is averaged.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021, arXiv 2102.07078. Algorithm 1.

Deviates from the authors' code, in which a client that was never sampled has the mean of the
heads: here it has the initial one.
"""

from dataclasses import dataclass, replace

from flray.algorithms.algorithm import Outcome
from flray.algorithms.partly_shared import PartlyShared, PartlySharedState
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import last_layers
from flray.models.mixing import Relation
from flray.values import require_at_least


@dataclass(frozen=True)
class FedRep(PartlyShared):
    """Alg. 1: `head_epochs` with the body fixed, then `body_epochs` with the new head fixed.

    Both see the same batches in the same order. With no epochs of the head this is FedBABU.
    """

    head_layers: int = 1  # Number of last layers that form the head
    head_epochs: int = 10  # Epochs of the head per round; 0: heads stay as they were drawn
    body_epochs: int = 1  # Epochs of the body per round

    def __post_init__(self) -> None:
        require_at_least(self, head_layers=1, head_epochs=0, body_epochs=0)

    def require(self, fed: Federation) -> None:
        if len(self.private_leaves(fed)) == len(fed.initial) and self.body_epochs:
            raise ExperimentError(
                f"head_layers must leave a layer for the body, got {self.head_layers}, which is "
                "all layers of this model; without a body set body_epochs to 0"
            )

    def private_leaves(self, fed: Federation) -> frozenset[str]:
        return last_layers(fed.initial, self.head_layers)

    def round(
        self, state: PartlySharedState, cohort: Cohort, fed: Federation
    ) -> Outcome[PartlySharedState]:
        head = self.private_leaves(fed)
        body = frozenset(fed.initial) - head
        metrics: dict[str, float] = {}
        if self.head_epochs:
            # l. 7-9: h_i <- GRD(f_i(h, φ^t), h), `head_epochs` times
            training = replace(fed.training, epochs=self.head_epochs).only(head)
            models = self.deploy(state, cohort.clients, fed)
            trained = fed.train(models, cohort, self.gradient, training=training)
            heads = state.private.updated(trained.clients, trained.leaves(sorted(head)))
            state, metrics = replace(state, private=heads), trained.metrics()
            cohort = replace(cohort, clients=trained.clients)
        if self.body_epochs:
            # l. 10: φ_i <- GRD(f_i(h_i, φ^t), φ)
            training = replace(fed.training, epochs=self.body_epochs).only(body)
            models = self.deploy(state, cohort.clients, fed)
            trained = fed.train(models, cohort, self.gradient, training=training)
            fed.count_models(state.shared, cohort, trained)
            # l. 12: φ^{t+1} <- mean of φ_i
            shared = fed.mix(Relation.joint(fed.num_clients), trained, state.shared)
            state, metrics = replace(state, shared=shared), metrics or trained.metrics()
        return Outcome(state, metrics)
