"""FedBABU: only the body is trained and averaged; the head stays as it was drawn.

Oh, Kim, Yun: FedBABU: Towards Enhanced Representation for Federated Image Classification.
ICLR 2022, arXiv 2106.06042. Algorithm 1.

Clients personalise the model by fine-tuning: `evaluate.fine_tune` shows what it becomes.
"""

from dataclasses import dataclass, replace

from flray.algorithms.algorithm import Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import last_layers
from flray.models.mixing import Relation
from flray.values import require_at_least


@dataclass(frozen=True)
class FedBabu(FedAvg):
    """Alg. 1: FedAvg of the body; the head has the bits of its initialisation in every round."""

    frozen_layers: int = 1  # Number of last layers, the head, that are not trained; 0 is FedAvg

    def __post_init__(self) -> None:
        require_at_least(self, frozen_layers=0)

    def require(self, fed: Federation) -> None:
        head = last_layers(fed.initial, self.frozen_layers)  # refuses more layers than there are
        if len(head) == len(fed.initial):
            raise ExperimentError(
                f"frozen_layers must leave a layer to train, got {self.frozen_layers}, which is "
                "all layers of this model"
            )

    def round(self, state: FedAvgState, cohort: Cohort, fed: Federation) -> Outcome[FedAvgState]:
        head = last_layers(fed.initial, self.frozen_layers)
        if not head:
            return super().round(state, cohort, fed)
        body = {n: leaf for n, leaf in state.bank.params.items() if n not in head}
        trained = fed.train(state.bank, cohort, self.gradient, training=fed.training.only(body))
        sent = replace(state.bank, params=body)
        fed.count_models(sent, cohort, trained)
        # Mixing equal heads would round them, so they take no part in it
        mixed = fed.mix(Relation.joint(fed.num_clients), trained, sent)
        bank = replace(mixed, params=state.bank.params | mixed.params)
        return Outcome(FedAvgState(bank), trained.metrics())
