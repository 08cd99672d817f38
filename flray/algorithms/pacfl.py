"""PACFL: one clustering before training, by the principal angles between clients' data.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin: Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles Between Client Data Subspaces.
AAAI 2023, arXiv 2209.10526. Algorithm 1.

Deviates from the authors' code, which takes the smallest angle between two singular vectors
(`distance.form: entries`), makes one decomposition a label (`signature.per_label`), and judges
each client by the model that it trained last (`evaluate.last_trained`). Deviates from the paper in
newcomers, which are compared with the mean of the vectors of each cluster instead of being
clustered again with everybody.
"""

from dataclasses import dataclass, field

from flray.algorithms.flhc import CohortSize, Flhc, UpdateClustering
from flray.clustering import DistanceStage, PartitionStage, SignatureStage
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.subspace import PrincipalAngles, Subspace


@dataclass(frozen=True)
class SubspaceClustering(UpdateClustering):
    """U_i, smallest principal angles, average linkage until β degrees."""

    signature: SignatureStage = field(default_factory=Subspace)
    distance: DistanceStage = field(default_factory=PrincipalAngles)
    partition: PartitionStage = field(
        default_factory=lambda: Hierarchical(linkage="average", threshold=10.0)
    )


@dataclass(frozen=True)
class Pacfl(Flhc):
    """Alg. 1: clusters before the first round, then FedAvg in each of them from one initial model.

    The server learns the main directions of each client's inputs; the first is nearly their mean.

        algorithm: {name: pacfl, clustering: {partition: {linkage: average, threshold: 10}}}
    """

    rounds_before: int = 0  # Rounds of FedAvg before the clustering; 0 in the paper
    # How clients are clustered; `partition.threshold` is β, in degrees
    clustering: SubspaceClustering = field(default_factory=SubspaceClustering)
    # Clients that train in a round, as for flhc; the paper draws them whatever their clusters
    cohort_size: CohortSize = "joint"
