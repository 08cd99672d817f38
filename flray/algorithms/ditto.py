"""Ditto: a personal model beside FedAvg's, held near it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization.
ICML 2021, arXiv 2012.04221. Algorithm 1.
"""

from dataclasses import dataclass, replace

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.affine import affine
from flray.engines.training import LocalBatch, LossGradient, plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation
from flray.values import require_at_least


@dataclass(frozen=True)
class DittoState:
    """State of Ditto: the global model w and the personal models v_k."""

    bank: ModelBank  # w, one row
    personal: ClientTable  # v_k of the clients that have trained


@dataclass(frozen=True)
class Ditto:
    """Alg. 1: rounds of FedAvg for w; each client of the cohort also trains v_k and uses it.

    The global model is FedAvg's to the last bit, whatever λ is. With λ = 0 and `own_epochs` equal
    to `train.epochs`, personal models are those of Local. Two trainings of a round see the same
    batches. A client that has never trained uses w.

    >>> import torch
    >>> v, memo = {"w": torch.tensor([3.0])}, {"global/w": torch.tensor([1.0])}
    >>> loss_gradient = {"w": torch.tensor([10.0])}
    >>> Ditto(lam=0.5).personal_gradient(lambda w, batch: loss_gradient, v, None, v, memo)["w"]
    tensor([11.])
    """

    lam: float = 1.0  # Weight λ of the distance to the global model
    own_epochs: int | None = None  # Epochs of the personal model per round. None: `train.epochs`

    gradient = staticmethod(plain_gradient)

    def __post_init__(self) -> None:
        require_at_least(self, lam=0, own_epochs=1)

    def init(self, fed: Federation) -> Outcome[DittoState]:
        table = ClientTable.empty(fed.initial, fed.num_clients)
        return Outcome(DittoState(fed.initial_bank(), table))

    def cohort(self, state: DittoState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))  # l. 3

    @affine
    def personal_gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        # l. 7: v_k <- v_k - η (grad F_k(v_k) + λ (v_k - w^t))
        return {name: g[name] + self.lam * (w[name] - memo[f"global/{name}"]) for name in g}

    def round(self, state: DittoState, cohort: Cohort, fed: Federation) -> Outcome[DittoState]:
        # l. 6, 9: w^{t+1}, by any solver; here FedAvg
        joint = Relation.joint(fed.num_clients)
        bank, trained = fed.average(joint, state.bank, cohort, self.gradient)
        before = {f"global/{name}": leaf for name, leaf in state.bank.row(0).items()}  # w^t
        personal = fed.train(
            state.personal.bank(cohort.clients),
            cohort,
            self.personal_gradient,
            shared=before,
            training=replace(fed.training, epochs=self.own_epochs or fed.training.epochs),
        )
        table = state.personal.updated(personal.clients, personal.params)
        return Outcome(DittoState(bank, table), trained.metrics())

    def deploy(self, state: DittoState, clients: Ids, fed: Federation) -> ModelBank:
        """v_k, and w for clients that have never trained."""
        return replace(state.personal, default=state.bank.params).bank(clients)

    def partition(self, state: DittoState) -> Ids:
        """One cluster: everybody's personal model is held near the same global one."""
        return state.bank.owner
