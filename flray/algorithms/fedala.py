"""FedALA: each client learns, number by number, how much of the global model it starts from.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated
Learning. AAAI 2023, arXiv 2212.01197. Algorithm 1.

The server learns what it learns in FedAvg, and bytes are FedAvg's: weights and local models stay
with the client. Learning the weights costs a pass over its data in each round, more in the first.

Deviates: a client that has never trained starts from the global model and learns no weights; models
are judged with the weights that a client learned last; the share of data is drawn by weights of
examples, 0 or n / drawn. In PFLlib p counts tensors and p = 0 means all of them; in FL-bench all
clients of a worker share one set of weights.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.affine import stacked
from flray.engines.training import LocalBatch, LossGradient, plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params, last_layers
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation
from flray.values import require_at_least

WINDOW, SETTLED = 10, 0.1  # losses whose standard deviation must be below this (authors' code)
MOST_PASSES = 100  # over a client's data, when it learns its weights for the first time


@dataclass(frozen=True)
class FedAlaState:
    """State of FedALA: the global model, and the top layers and weights of each client."""

    bank: ModelBank  # w, one row
    models: ClientTable  # v_i, top leaves of the model that a client trained last
    weights: ClientTable  # W_i of these leaves, in [0, 1]; 1 before they are learned


@dataclass(frozen=True)
class FedAla:
    """Alg. 1: a client starts from v + (w - v) ⊙ W in its top layers, and from w below them.

    W is learned before each local training: one pass over `share` of the client's data, when it is
    learned for the first time passes until the loss settles. All layers of what clients train are
    averaged as in FedAvg. With no top layers, or with `weight_lr: 0`, which leaves W at 1, this is
    FedAvg.

        algorithm: {name: fedala, top_layers: 1, weight_lr: 1.0, share: 0.8}

    >>> w, memo = {"a": torch.tensor([3.0])}, {"v/a": torch.tensor([1.0])}
    >>> w["W/a"] = torch.tensor([0.5])
    >>> square = lambda at, batch: at  # gradient of |w|² / 2: at v + (w - v) W = 2 it is 2
    >>> FedAla(weight_lr=0.125).weight_gradient(square, w, None, w, memo)["W/a"]  # 2 (3 - 1)
    tensor([4.])
    """

    top_layers: int = 1  # Number p of last layers with weights W; 0 is FedAvg
    weight_lr: float = 1.0  # Step size η_W of the weights; 0: they stay 1
    share: float = 0.8  # Share s of a client's data on which weights are learned

    gradient = staticmethod(plain_gradient)

    def __post_init__(self) -> None:
        require_at_least(self, top_layers=0, weight_lr=0)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def require(self, fed: Federation) -> None:
        last_layers(fed.initial, self.top_layers)  # refuses more layers than the model has
        if self.share < 1 and self.top_layers and self.weight_lr:
            fed.require_example_losses()

    def init(self, fed: Federation) -> Outcome[FedAlaState]:
        top = last_layers(fed.initial, self.top_layers)
        v = {n: leaf for n, leaf in fed.initial.items() if n in top}
        ones = {f"W/{n}": torch.ones_like(leaf) for n, leaf in v.items() if n not in fed.buffers}
        models, weights = (ClientTable.empty(leaves, fed.num_clients) for leaves in (v, ones))
        return Outcome(FedAlaState(fed.initial_bank(), models, weights))

    def cohort(self, state: FedAlaState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    @stacked
    def weight_gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        """The direction of a step of size η_W to cut(W - η_W ∇ ⊙ (w - v))."""
        top = [name.removeprefix("W/") for name in w if name.startswith("W/")]
        start = {name: leaf for name, leaf in w.items() if not name.startswith("W/")}
        mixed = {n: torch.lerp(memo[f"v/{n}"], w[n], w[f"W/{n}"]) for n in top}
        g = grad(start | mixed, batch)
        direction = {}
        for n in top:
            # Alg. 1: W <- cut(W - η_W grad L ⊙ (w - v), 0, 1)
            weight = w[f"W/{n}"]
            cut = (weight - self.weight_lr * g[n] * (w[n] - memo[f"v/{n}"])).clamp(0, 1)
            direction[f"W/{n}"] = (weight - cut) / self.weight_lr
        return direction

    def round(self, state: FedAlaState, cohort: Cohort, fed: Federation) -> Outcome[FedAlaState]:
        trained_before = np.intersect1d(cohort.clients, state.models.clients)
        if len(trained_before) and state.weights.default and self.weight_lr:
            state = replace(state, weights=self._learned(state, trained_before, fed))
        start = self.deploy(state, cohort.clients, fed)
        trained = fed.train(start, cohort, self.gradient)
        fed.count_models(state.bank, cohort, trained)
        models = state.models.updated(trained.clients, trained.leaves(list(state.models.default)))
        bank = fed.mix(Relation.joint(fed.num_clients), trained, state.bank)
        return Outcome(replace(state, bank=bank, models=models), trained.metrics())

    def _learned(self, state: FedAlaState, clients: Ids, fed: Federation) -> ClientTable:
        """The table of weights after the clients have learned theirs, from what they were."""
        is_new = ~np.isin(np.arange(fed.num_clients), state.weights.clients)
        training = replace(fed.training, optimizer="sgd", lr=self.weight_lr, epochs=1)
        training = replace(training, momentum=0.0, weight_decay=0.0).only(state.weights.default)
        table = state.weights
        losses: dict[int, list[float]] = {int(i): [] for i in clients}
        for _ in range(MOST_PASSES):
            rows = table.bank(clients)
            w = {n: v.expand(rows.num_rows, *v.shape[1:]) for n, v in state.bank.params.items()}
            trained = fed.train(
                replace(rows, params=rows.params | w),
                Cohort(fed.t, clients, is_probe=True),
                self.weight_gradient,
                {f"v/{n}": leaf for n, leaf in state.models.of_clients(clients).items()},
                training=training,
                weights=[self._drawn(int(i), fed) for i in clients] if self.share < 1 else (),
            )
            table = table.updated(trained.clients, trained.leaves(list(table.default)))
            for i, loss in zip(trained.clients.tolist(), trained.loss.tolist(), strict=True):
                losses[i].append(loss)
            is_active = [is_new[i] and not _is_settled(losses[i]) for i in trained.clients.tolist()]
            clients = trained.clients[np.array(is_active, np.bool_)]
            if not len(clients):
                break
        return table

    def _drawn(self, client: int, fed: Federation) -> NDArray[np.float64]:
        """(n,) weights of the client's examples: those drawn count n / drawn, the others 0."""
        num = int(fed.num_examples[client])
        num_drawn = int(np.ceil(self.share * num))
        weights = np.zeros(num)
        chosen = fed.generator("fedala", fed.t, client).permutation(num)[:num_drawn]
        weights[chosen] = num / max(num_drawn, 1)
        return weights

    def deploy(self, state: FedAlaState, clients: Ids, fed: Federation) -> ModelBank:
        """What clients start from; row 0 is w, for those that have never trained."""
        holders = np.intersect1d(clients, state.models.clients)
        owner = np.zeros(fed.num_clients, np.int64)
        owner[holders] = 1 + np.arange(len(holders))
        v, weights = state.models.of_clients(holders), state.weights.of_clients(holders)
        params = {}
        for n, w in state.bank.params.items():
            start = w.expand(len(holders), *w.shape[1:])
            if f"W/{n}" in weights:
                start = torch.lerp(v[n], start, weights[f"W/{n}"])
            params[n] = torch.cat([w, start])
        return ModelBank(params, owner)

    def partition(self, state: FedAlaState) -> Ids:
        """One cluster: everybody starts from the same global model, more or less."""
        return state.bank.owner


def _is_settled(losses: list[float]) -> bool:
    """True if the last losses of a client differ little.

    >>> _is_settled([2.0] * 10), _is_settled([2.0] * 11), _is_settled([2.0, *range(10)])
    (False, True, False)
    """
    return len(losses) > WINDOW and float(np.std(losses[-WINDOW:])) < SETTLED
