"""Signature `pca_centres`: a client is the k-means centres of its pixels in a PCA of its own.

The baseline PCA+kM+HC of FLT (Jamali-Rad et al., IEEE TNNLS 2022, section IV-C), after Dennis, Li,
Smith (ICML 2021, arXiv 2103.00697). Bases differ between clients, and so do the coordinates.
"""

from dataclasses import dataclass
from math import prod

from flray.client.embedding import ProjectCentres
from flray.clustering.encoder_centres import points_of
from flray.clustering.points import Points
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params
from flray.values import require_at_least


@dataclass(frozen=True)
class PcaCentres:
    """k centres per client, in the coordinates of the client's own PCA; no model travels.

    Points are (m * k, components); a client with fewer examples repeats them.
    """

    components: int = 128  # Number of principal components
    k: int = 5  # Number of centres per client

    def __post_init__(self) -> None:
        require_at_least(self, components=1, k=1)

    def require(self, fed: Federation) -> None:
        """Refuse more components than an input has numbers."""
        num_numbers = prod(fed.input_shape or (self.components,))
        if self.components > num_numbers:
            raise ExperimentError(
                f"components must be at most the {num_numbers} numbers of an input, got "
                f"{self.components} (algorithm.clustering.signature.components)"
            )

    @property
    def is_set(self) -> bool:
        """True if a client may send several points."""
        return self.k != 1

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        centres = fed.map(ProjectCentres(self.components, self.k, cohort.t), cohort)
        fed.meter.count_transfer("signature", up=sum(rows.nbytes for rows in centres.values()))
        return points_of(centres), memory
