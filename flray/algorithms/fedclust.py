"""FedClust: one clustering before training, by the last layer that each client trains.

Islam, Javaherian, Xu, Yuan, Chen, Tzeng: FedClust: Tackling Data Heterogeneity in Federated
Learning through Weight-Driven Client Clustering. ICPP 2024, arXiv 2407.07124.

Every client trains the initial model w0 and sends its last layer; D_ij is the L2 distance of two
last layers; hierarchical clustering up to a threshold λ; then FedAvg in each cluster from w0. The
server learns one trained last layer of each client, and only that layer is sent for the clustering.

Deviates: the paper does not name its linkage; here it is average linkage. A newcomer joins the
cluster whose mean last layer is nearest. No code of the authors was found.
"""

from dataclasses import dataclass, field

from flray.algorithms.flhc import CohortSize, Flhc, UpdateClustering
from flray.clustering import PartitionStage, SignatureStage
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.update import Weights


@dataclass(frozen=True)
class LastLayerClustering(UpdateClustering):
    """Last layers w_i^L after training from w0, L2 distances, average linkage until λ = 1."""

    signature: SignatureStage = field(default_factory=lambda: Weights(layers="last"))
    partition: PartitionStage = field(
        default_factory=lambda: Hierarchical(linkage="average", threshold=1.0)
    )


@dataclass(frozen=True)
class FedClust(Flhc):
    """Clusters by last layers before the first round, then FedAvg in each of them.

    algorithm: {name: fedclust, clustering: {partition: {linkage: average, threshold: 2}}}
    """

    rounds_before: int = 0  # Rounds of FedAvg before the clustering; 0 in the paper
    # How clients are clustered; `partition.threshold` is λ
    clustering: LastLayerClustering = field(default_factory=LastLayerClustering)
    # Clients that train in a round, as for flhc; the paper draws them whatever their clusters
    cohort_size: CohortSize = "joint"
