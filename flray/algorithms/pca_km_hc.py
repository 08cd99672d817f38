"""PCA+kM+HC: FLT's baseline with a linear code for the encoder and no manifold learning.

Jamali-Rad, Abdizadeh, Singh (FLT), section IV-C, after Dennis, Li, Smith: Heterogeneity for the
Win: One-Shot Federated Clustering. ICML 2021, arXiv 2103.00697. Each client's PCA has a basis of
its own, so centres of different clients live in different coordinates: weak by construction.
"""

from dataclasses import dataclass, field

from flray.algorithms.flt import Flt, Taskonomy
from flray.clustering import EmbedStage, RelateStage, SignatureStage
from flray.clustering.embeds import NoEmbed
from flray.clustering.pca_centres import PcaCentres
from flray.clustering.relations import Threshold


@dataclass(frozen=True)
class LinearTaskonomy(Taskonomy):
    """FCR with a PCA of each client in place of the encoder, without UMAP; D < 1.2."""

    signature: SignatureStage = field(default_factory=PcaCentres)
    embed: EmbedStage = field(default_factory=NoEmbed)
    relate: RelateStage = field(default_factory=lambda: Threshold(gamma=1.2))


@dataclass(frozen=True)
class PcaKmHc(Flt):
    """FLT with linear signatures; everything else is as in `flt`.

    algorithm: {name: pca_km_hc, clustering: {relate: {gamma: 1.2}}}
    """

    clustering: LinearTaskonomy = field(default_factory=LinearTaskonomy)
