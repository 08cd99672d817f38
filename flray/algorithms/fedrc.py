"""FedRC: FedEM whose components differ in p(y | x) alone, not in which labels clients hold.

Guo, Tang, Lin: FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by
Robust Clustering. ICML 2024, arXiv 2301.12379. Algorithm 1.

The server learns what FedEM's does, and the sums of weights by label of each client, which contain
its label counts: 4 K C bytes more for C labels. By design, groups that differ in the labels or
in the images they hold, but not in how they label them, are one component.

Deviates: clients that have never trained use C too; in the authors' code their weights are FedEM's.
"""

from dataclasses import dataclass, replace

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.algorithms.fedem import FedEm, FedEmState, Shares
from flray.client.tasks import ClientLosses
from flray.execution.federation import Federation

SMALLEST = 1e-8  # share of a label in a component (authors' code)
NUMBER_BYTES = 4  # of one sum, sent as a number


@dataclass(frozen=True)
class FedRcState(FedEmState):
    """State of FedRC: that of FedEM, and the weight of each label in each component."""

    label_sums: Shares  # (M, labels, K) Σ_j γ_ijk of each label of the clients that have trained


@dataclass(frozen=True)
class FedRc(FedEm):
    """Alg. 1: the E step divides likelihoods by the share C_yk of the label in the component.

    A component that has seen a label often is no more likely for that alone, so clients that label
    alike meet in one component whatever labels they hold. The server learns label sums of every
    client, which contain its label counts. With C constant (`label_prior: false`) this is FedEM.

        algorithm: {name: fedrc, number: 3}

    >>> sums = np.array([[[3.0, 1.0], [1.0, 1.0]]])  # one client, two labels, two components
    >>> label_shares(sums).tolist()  # columns sum to 1
    [[0.75, 0.5], [0.25, 0.5]]
    """

    label_prior: bool = True  # Divide by C_yk. False: C is constant, which is FedEM

    def require(self, fed: Federation) -> None:
        super().require(fed)
        if self.label_prior:
            remedy = "choose fedem, or algorithm.label_prior=false"
            fed.timeline.at(1).require_classes("fedrc", remedy)

    def init(self, fed: Federation) -> Outcome[FedEmState]:
        state = super().init(fed).state
        sums = np.zeros((fed.num_clients, 0, self.number))
        return Outcome(FedRcState(state.bank, state.shares, sums))

    def log_likelihoods(self, state: FedEmState, answer: ClientLosses) -> Shares:
        assert isinstance(state, FedRcState)  # by `init`
        if not self.label_prior or not state.label_sums.any():
            return -answer.loss
        # Alg. 1: γ_ijk ∝ ω_ik exp(-l(x_j; θ_k)) / C_yk
        c = np.full((1 + max(answer.labels, default=0), self.number), SMALLEST)
        shares = label_shares(state.label_sums)[: len(c)]
        c[: len(shares)] = np.maximum(shares, SMALLEST)
        log_p: Shares = -answer.loss - np.log(c[answer.labels])
        return log_p

    def heard(
        self,
        state: FedEmState,
        q: dict[int, Shares],
        answers: dict[int, ClientLosses],
        fed: Federation,
    ) -> FedEmState:
        state = super().heard(state, q, answers, fed)
        assert isinstance(state, FedRcState)
        if not self.label_prior or self.number == 1:
            return state
        # Alg. 1: the sums of which C is made, of every client's last E step
        labels = [
            state.label_sums.shape[1],
            *(max(answer.labels, default=-1) + 1 for answer in answers.values()),
        ]
        sums = np.zeros((len(state.shares), max(labels), self.number))
        sums[:, : labels[0]] = state.label_sums
        for i, answer in answers.items():
            sums[i] = 0
            np.add.at(sums[i], answer.labels, q[i])
        fed.meter.count_transfer("label_sums", up=len(answers) * sums[0].size * NUMBER_BYTES)
        return replace(state, label_sums=sums)


def label_shares(sums: Shares) -> Shares:
    """(labels, K) C: the share of each label in each component, from sums (M, labels, K)."""
    total = sums.sum(0)
    c: Shares = total / np.maximum(total.sum(0), SMALLEST)
    return c
