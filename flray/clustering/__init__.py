"""Clustering in five stages, each a small component that YAML can replace."""

from typing import Annotated, Any

from flray.clustering.distances import L1, L2, Cosine, Disagreement
from flray.clustering.embeds import NoEmbed, Pca, Standardise, SvdDirections, Umap, Unit
from flray.clustering.encoder_centres import EncoderCentres
from flray.clustering.gradient_memory import GradientMemory
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.losses import Losses
from flray.clustering.metadata import Metadata
from flray.clustering.neighbours import Neighbours
from flray.clustering.partitions import (
    Components,
    Given,
    Hdbscan,
    KMeans,
    LabelCounts,
    Random,
    Rows,
    Spectral,
)
from flray.clustering.pca_centres import PcaCentres
from flray.clustering.predictions import PublicPredictions
from flray.clustering.relations import Kernel, NoRelation, Similarity, Threshold
from flray.clustering.set_distances import Matching, MinPair, Wasserstein
from flray.clustering.sketch import Sketch
from flray.clustering.statistics import Statistics
from flray.clustering.subspace import PrincipalAngles, Subspace
from flray.clustering.two_level import TwoLevel
from flray.clustering.update import Update, Weights

SIGNATURES: dict[str, type] = {
    "encoder_centres": EncoderCentres,
    "gradient_memory": GradientMemory,
    "losses": Losses,
    "metadata": Metadata,
    "pca_centres": PcaCentres,
    "predictions": PublicPredictions,
    "statistics": Statistics,
    "subspace": Subspace,
    "update": Update,
    "weights": Weights,
}
EMBEDS: dict[str, type] = {
    "none": NoEmbed,
    "pca": Pca,
    "sketch": Sketch,
    "standardise": Standardise,
    "svd_directions": SvdDirections,
    "umap": Umap,
    "unit": Unit,
}
DISTANCES: dict[str, type] = {
    "cosine": Cosine,
    "disagreement": Disagreement,
    "l1": L1,
    "l2": L2,
    "matching": Matching,
    "min_pair": MinPair,
    "principal_angles": PrincipalAngles,
    "wasserstein": Wasserstein,
}
RELATIONS: dict[str, type] = {
    "kernel": Kernel,
    "none": NoRelation,
    "similarity": Similarity,
    "threshold": Threshold,
}
PARTITIONS: dict[str, type] = {
    "components": Components,
    "given": Given,
    "hdbscan": Hdbscan,
    "hierarchical": Hierarchical,
    "kmeans": KMeans,
    "label_counts": LabelCounts,
    "neighbours": Neighbours,
    "random": Random,
    "rows": Rows,
    "spectral": Spectral,
    "two_level": TwoLevel,
}
STAGES = {
    "signature": SIGNATURES,
    "embed": EMBEDS,
    "distance": DISTANCES,
    "relate": RELATIONS,
    "partition": PARTITIONS,
}

# Annotations of fields that hold a stage. Any: a registered class or `package.module:Name`.
SignatureStage = Annotated[Any, "signature", SIGNATURES]
EmbedStage = Annotated[Any, "embed", EMBEDS]
DistanceStage = Annotated[Any, "distance", DISTANCES]
RelateStage = Annotated[Any, "relate", RELATIONS]
PartitionStage = Annotated[Any, "partition", PARTITIONS]
