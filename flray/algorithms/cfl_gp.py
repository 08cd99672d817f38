"""CFL-GP: clients are clustered every few rounds by their updates of one common model.

Kim, Kim, de Veciana: Clustered Federated Learning via Gradient-based Partitioning. ICML 2024, PMLR
235. Every H rounds, until round T_c, all clients train one criterion model, the same for all and in
turn one of the cluster models, and send their update. The server averages the updates of each
client over clusterings, G_i <- (1 - β) G_i + β Δ_i, takes the first K components of an uncentred
singular value decomposition of all G_i and clusters them by k-means. New clusters are matched to
the old ones by the clients they have in common.

The server learns an update of each client whenever clients are clustered, which costs a model each
way beside that of the round.

Deviates: updates of all criterion models go into one mean, not into a block for each; there is one
joint model until the first clustering; Δ is the update after an epoch, not one gradient. In the
authors' code the criterion never advances, and the gradients that are compared belong to each
client's own model once there are clusters. A newcomer, of which the paper has none, goes to the
nearest mean.
"""

from dataclasses import dataclass, field

from flray.algorithms.flhc import CohortSize, Flhc, UpdateClustering
from flray.algorithms.recluster import Recluster, When
from flray.clustering import EmbedStage, PartitionStage, SignatureStage
from flray.clustering.embeds import SvdDirections
from flray.clustering.gradient_memory import GradientMemory
from flray.clustering.partitions import KMeans


@dataclass(frozen=True)
class GradientClustering(UpdateClustering):
    """Remembered updates after an epoch, K = 4 singular components, k-means with K = 4."""

    signature: SignatureStage = field(default_factory=lambda: GradientMemory(epochs=1))
    embed: EmbedStage = field(default_factory=lambda: SvdDirections(number=4, unit=False))
    partition: PartitionStage = field(default_factory=lambda: KMeans(number=4))


@dataclass(frozen=True)
class EveryFewRounds(Recluster):
    """Clients are clustered anew every H = 2 rounds until round T_c = 10."""

    when: When = "every"  # When clients are clustered again
    every: int = 2  # Rounds H from one clustering to the next
    until: int | None = 10  # Last round T_c after which clients are clustered. None: no last


@dataclass(frozen=True)
class CflGp(Flhc):
    """Clusters by remembered updates of common models, every H = 2 rounds until round T_c = 10.

    algorithm:
      name: cfl_gp
      clustering: {embed: {number: 2}, partition: {number: 2}}
    """

    rounds_before: int = 2  # Rounds of FedAvg before the first clustering
    # How clients are clustered; `embed.number` and `partition.number` are K, `signature.weight` β
    clustering: GradientClustering = field(default_factory=GradientClustering)
    # Clients that train in a round, as for flhc; in the paper all do
    cohort_size: CohortSize = "joint"
    # When clients are clustered again: `every` is H, `until` is T_c
    recluster: EveryFewRounds = field(default_factory=EveryFewRounds)
