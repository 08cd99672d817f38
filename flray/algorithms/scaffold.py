"""SCAFFOLD: local steps are corrected by how a client's gradient differs from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning. ICML 2020, arXiv 1910.06378. Algorithm 1, option II; K is the client's own
number of steps, eta_l is train.lr and eta_g is aggregate.server_lr.

N is the number of clients that may train in the round: holdout and absent clients are not part of
the objective. Where clients leave or join, c becomes the mean of c_i over those that are present.
Weight decay is a part of the client's gradient.

Deviates: models are averaged as aggregate.weights says, by default with n_k; the paper has
aggregate.weights: uniform. Control variates always have 1/N, so that the objective is the paper's
unweighted mean over clients. With momentum, K becomes the number of steps without momentum that go
as far (`effective_steps`), or control variates would be too large by 1 / (1 - rho).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from flray.algorithms.algorithm import Outcome
from flray.algorithms.fednova import effective_steps, require_sgd
from flray.data.dataset import Ids
from flray.engines.affine import affine
from flray.engines.training import LocalBatch, LossGradient
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, Params, num_bytes
from flray.models.client_table import ClientTable
from flray.models.mixing import Relation

ROWS_AT_ONCE = 1000  # control variates copied at a time for their mean


@dataclass(frozen=True)
class ScaffoldState:
    """State of SCAFFOLD: the model x and the control variates of server and clients."""

    bank: ModelBank  # x, one row
    c: Params  # the server's control variate, leaves (...)
    c_i: ClientTable  # those of the clients
    members: Ids  # the clients whose mean c is, ascending


@dataclass(frozen=True)
class Scaffold:
    """Alg. 1, option II: local steps follow g_i(y_i) - c_i + c. Needs SGD.

    c_i is the mean gradient of client i in its last training, c the mean of all c_i. Each client of
    a cohort is sent x and c, and returns both of its own: twice the bytes of FedAvg. Clients that
    never trained have c_i = 0. It has no keys:

        algorithm: scaffold

    >>> w = {"w": torch.tensor([0.0])}
    >>> memo = {"c_i/w": torch.tensor([3.0]), "c/w": torch.tensor([1.0])}
    >>> g = Scaffold().gradient(lambda w, batch: {"w": torch.tensor([10.0])}, w, None, w, memo)
    >>> g["w"]  # 10 - 3 + 1
    tensor([8.])
    """

    def require(self, fed: Federation) -> None:
        require_sgd(fed.training, "scaffold")

    def init(self, fed: Federation) -> Outcome[ScaffoldState]:
        learned = fed.learned(fed.initial)
        zeros = {name: torch.zeros_like(leaf) for name, leaf in learned.items()}
        c = {name: leaf[0] for name, leaf in zeros.items()}
        c_i = ClientTable.empty(zeros, fed.num_clients)
        return Outcome(ScaffoldState(fed.initial_bank(), c, c_i, fed.clients))

    def cohort(self, state: ScaffoldState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))  # l. 4

    @affine
    def gradient(
        self, grad: LossGradient, w: Params, batch: LocalBatch, w0: Params, memo: Params
    ) -> Params:
        g = grad(w, batch)
        # l. 10: y_i <- y_i - eta_l (g_i(y_i) - c_i + c)
        return {name: g[name] - memo[f"c_i/{name}"] + memo[f"c/{name}"] for name in g}

    def round(
        self, state: ScaffoldState, cohort: Cohort, fed: Federation
    ) -> Outcome[ScaffoldState]:
        state = _among_present(state, fed)
        controls = _named("c_i", state.c_i.of_clients(cohort.clients))
        shared = _named("c", state.c)
        trained = fed.train(state.bank, cohort, self.gradient, controls, shared=shared)
        fed.count_models(state.bank, cohort, trained)  # l. 5 and 13: x and Δy_i, c and Δc_i
        down, up, size = len(cohort.clients), len(trained.clients), num_bytes(state.c, 1)
        fed.meter.count_transfer("control", down=down * size, up=up * size)
        # l. 16-17: x <- x + eta_g mean Δy_i
        bank = fed.mix(Relation.joint(fed.num_clients), trained, state.bank)
        c, c_i = _updated_controls(state, trained.with_steps(), fed)
        return Outcome(replace(state, bank=bank, c=c, c_i=c_i), trained.metrics())

    def deploy(self, state: ScaffoldState, clients: Ids, fed: Federation) -> ModelBank:
        return state.bank

    def partition(self, state: ScaffoldState) -> Ids:
        return state.bank.owner


def _among_present(state: ScaffoldState, fed: Federation) -> ScaffoldState:
    """The state with c = (1/N) sum_i c_i over the clients that are present, if they have changed.

    The update of line 17 keeps this mean as long as nobody leaves or joins.
    """
    if not len(fed.clients) or np.array_equal(state.members, fed.clients):
        return state
    c = {name: torch.zeros_like(leaf) for name, leaf in state.c.items()}
    heard = np.intersect1d(fed.clients, state.c_i.clients)  # c_i is zero for all others
    for start in range(0, len(heard), ROWS_AT_ONCE):
        rows = state.c_i.of_clients(heard[start : start + ROWS_AT_ONCE])
        c = {name: leaf + rows[name].sum(0) / len(fed.clients) for name, leaf in c.items()}
    return replace(state, c=c, members=fed.clients)


def _updated_controls(
    state: ScaffoldState, heard: Trained, fed: Federation
) -> tuple[Params, ClientTable]:
    """c and c_i after the round; those of clients that were not heard stay as they are."""
    if not len(heard.clients):
        return state.c, state.c_i
    before = state.c_i.of_clients(heard.clients)
    way = fed.training.eta * effective_steps(heard.num_steps, fed.training.momentum)  # K eta_l
    after, c = {}, {}
    for name, leaf in state.c.items():
        moved = state.bank.params[name] - heard.params[name]  # x - y_i, (K, ...)
        scale = torch.from_numpy(1 / way).to(moved).view(-1, *[1] * leaf.dim())
        # l. 12: c_i - c + (x - y_i) / (K eta_l)
        after[name] = (before[name] - leaf).add_(moved.mul_(scale))
        # l. 17: c <- c + |S| / N mean Δc_i
        change = torch.sub(after[name], before[name], out=moved)
        c[name] = leaf + change.sum(0) / len(fed.clients)
    return c, state.c_i.updated(heard.clients, after)


def _named(prefix: str, params: Params) -> Params:
    return {f"{prefix}/{name}": leaf for name, leaf in params.items()}
