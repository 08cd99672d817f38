"""WD: REPA's baseline, clients are clustered by how f epochs of training change the joint model.

Radovič, Pejović (REPA, arXiv 2309.14088), after Briggs, Fan, Andras (FL+HC, IJCNN 2020):
e_i = θ^T - θ_i^{T+1}, of all parameters and as it is, by k-means; training as in REPA.

A holdout client is placed by training on its labelled training images, against what a holdout
client is: such runs have `holdout_labels_read` in their summary.
"""

from dataclasses import dataclass, field

from flray.algorithms.repa import Repa, StatisticsClustering
from flray.clustering import EmbedStage, SignatureStage
from flray.clustering.embeds import NoEmbed
from flray.clustering.update import Update


@dataclass(frozen=True)
class DifferenceClustering(StatisticsClustering):
    """Δ, which is -e_i and has the same clusters, after f epochs; raw, L2, k-means with K = 10."""

    # What the server learns of a client; `epochs` is f
    signature: SignatureStage = field(default_factory=lambda: Update(epochs=1))
    embed: EmbedStage = field(default_factory=NoEmbed)


@dataclass(frozen=True)
class Wd(Repa):
    """REPA whose clients are clustered by their updates instead of statistics of their data.

    algorithm: {name: wd, rounds_before: 5, clustering: {partition: {number: 4}}}
    """

    clustering: DifferenceClustering = field(default_factory=DifferenceClustering)
