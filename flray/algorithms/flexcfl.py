"""FlexCFL (FedGroup): groups by the directions of the first updates, found before the first round.

Duan, Liu, Ji, Liu, Liang, Chen, Tan: FedGroup: Efficient Federated Learning via Decomposed
Similarity-Based Clustering. ISPA 2021, arXiv 2010.06870. Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren:
Flexible Clustered Federated Learning for Client-Level Data Distribution Shift. TPDS 2022, arXiv
2108.09749.

Founders train the initial model w0: Δ_i. V are the first K right singular vectors of all Δ, and
E_i = cos(Δ_i, v_k) is clustered by k-means into K groups. A group starts from the mean of its
founders' models; the direction of a group is the mean of their Δ. Others train w0 once and join the
group whose direction has the largest cosine with theirs. Then FedAvg in each group. The server
learns one update of each client, which costs a model each way.

Deviates: the first training takes epochs, not 50 steps; clients that are not founders are placed
together at the end of round 1, not when they are first sampled; the mean of founders is weighted by
n_i as every mean is (`aggregate.weights: uniform` is the paper's). The authors' code tells a change
of labels by the Wasserstein distance of label *counts taken as samples*, which is 0 for permuted
labels; here a client reports that its data changed, all clients send a new update, and those
that reported join the group with the nearest direction (`recluster`).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from flray.algorithms.algorithm import Outcome
from flray.algorithms.clustered import cluster
from flray.algorithms.flhc import CohortSize, Flhc, FlhcState, UpdateClustering
from flray.algorithms.recluster import Recluster, When
from flray.algorithms.regrouping import Then
from flray.clustering import DistanceStage, EmbedStage, PartitionStage
from flray.clustering.distances import Cosine
from flray.clustering.embeds import SvdDirections
from flray.clustering.partitions import KMeans
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, flat_rows
from flray.values import require_at_least


@dataclass(frozen=True)
class DirectionClustering(UpdateClustering):
    """E_i = cos(Δ_i, v_k) for K = 3 singular vectors, k-means with K = 3; newcomers by cosine."""

    embed: EmbedStage = field(default_factory=lambda: SvdDirections(number=3))
    distance: DistanceStage = field(default_factory=Cosine)
    partition: PartitionStage = field(default_factory=lambda: KMeans(number=3))


@dataclass(frozen=True)
class Migration(Recluster):
    """Clients whose data changed, and say so, move to the group with the nearest direction."""

    when: When = "on_drift"  # When clients migrate
    then: Then = "move"  # What becomes of groups, as for flhc
    # What tells a drift. events: a client reports that its data changed; loss: its training loss
    # has jumped; update: the server finds that its params change more than before
    drift_by: Literal["events", "loss", "update"] = "events"


@dataclass(frozen=True)
class FlexCfl(Flhc):
    """Groups by decomposed cosine similarity, then FedAvg in groups, which may attract each other.

    algorithm:
      name: flexcfl
      clustering: {embed: {number: 4}, partition: {number: 4}}
    """

    rounds_before: int = 0  # Rounds of FedAvg before the clustering; 0 in the paper
    # How founders are clustered; `embed.number` and `partition.number` are K
    clustering: DirectionClustering = field(default_factory=DirectionClustering)
    # Clients that train in a round, as for flhc; the paper draws them whatever their groups
    cohort_size: CohortSize = "joint"
    keep_pass: bool = True  # Groups start from the mean of their founders' models
    founders: int = 60  # Clients that are clustered before round 1, at most all; 20 K in the paper
    # Migration: clients whose data changed train the initial model again and change groups
    recluster: Migration = field(default_factory=Migration)
    # Rate η_G at which groups attract each other after each round that they train in
    eta_g: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, founders=1, eta_g=0)

    def require(self, fed: Federation) -> None:
        super().require(fed)
        if not self.rounds_before:
            self.clustering.require_number(min(self.founders, len(fed.clients)))

    @property
    def spent_fields(self) -> tuple[str, ...] | None:
        """None if groups learn from each other."""
        spent = super().spent_fields
        return None if spent is None or self.eta_g else (*spent, "founders")

    def init(self, fed: Federation) -> Outcome[FlhcState]:
        if self.rounds_before:
            return super().init(fed)
        size = min(self.founders, len(fed.clients))
        drawn = fed.generator("founders").choice(fed.clients, size, replace=False)
        return cluster(self, fed.initial_bank(), fed, np.sort(drawn))

    def round(self, state: FlhcState, cohort: Cohort, fed: Federation) -> Outcome[FlhcState]:
        outcome = super().round(state, cohort, fed)
        is_joint = self.recluster.is_joint(state.watch, self.rounds_before, cohort.t)
        if not self.eta_g or is_joint:
            return outcome
        return replace(outcome, state=self._attracted(outcome.state))

    def _attracted(self, state: FlhcState) -> FlhcState:
        """θ_g <- (θ_g + η_G sum_l θ_l / ||θ_l||) / (1 + η_G sum_l 1 / ||θ_l||), l != g."""
        bank: ModelBank = state.bank
        groups = np.unique(bank.owner[state.labels >= 0])  # rows
        squares = [flat_rows(leaf).double().square().sum(1) for leaf in bank.params.values()]
        norm = torch.stack(squares).sum(0).sqrt().cpu().numpy()  # (U,)
        shares = np.eye(bank.num_rows)
        shares[np.ix_(groups, groups)] += self.eta_g * (1 - np.eye(len(groups))) / norm[groups]
        shares /= shares.sum(1, keepdims=True)
        near = bank.combined(shares, bank.owner)
        return replace(state, bank=replace(near, moments=bank.moments))
