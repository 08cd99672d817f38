"""How alike clients see images: REPA's similarity of concept drift (Fig. 1).

Radovič, Pejović: REPA, arXiv 2309.14088: the clients' pipelines are applied to the same images, a
pre-trained network embeds them, and softmax makes distributions of the embeddings. The paper does
not name the network; here it is one that was trained centrally and clusters nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flray.client.embedding import encode
from flray.clustering.encoder import Encoder, server_device
from flray.clustering.points import Matrix
from flray.columns import DATA_CORRELATION, DRIFT_CORRELATION, Column
from flray.data.dataset import Dataset, Ids
from flray.data.events import Timeline
from flray.data.parts import Deal
from flray.data.splits.options import PartOptions
from flray.errors import ExperimentError
from flray.measures.label_similarity import correlation_column, cosines, pair_correlation
from flray.measures.measure import ClusteringContext, Measure, Measurement, Numbers, RunData
from flray.models.bank import load_params
from flray.randomness import generator
from flray.values import require_at_least


@dataclass(frozen=True)
class Drift(Measure):
    """`evaluate.drift`: correlation of signatures with how clients see the same images.

    `drift_correlation` compares with the similarity of the clients' views alone, and
    `data_correlation` with its sum with the similarity of their labels. NaN where clients do not
    differ.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        DRIFT_CORRELATION: correlation_column("correlation with drift", "drift"),
        DATA_CORRELATION: correlation_column("correlation with both", "both"),
    }

    encoder: Encoder  # Encoder that embeds the images, trained centrally
    images: int = 100  # Number of images that every client's pipeline is applied to

    def __post_init__(self) -> None:
        require_at_least(self, images=1)

    def prepare(self, data: RunData) -> Timeline:
        deal = data.split.deal(data.dataset, data.seed) if hasattr(data.split, "deal") else None
        if deal is None or deal.views is None or data.has_events:
            raise ExperimentError(
                "evaluate.drift compares how clients see the same images all the time: it needs "
                "the split image_shift or rotation and no events; or set it to null"
            )
        expected, shape = self.encoder.kind().image_shape, data.dataset.image_shape
        if tuple(expected) != tuple(shape):
            raise ExperimentError(
                f"evaluate.drift: the encoder is for images {tuple(expected)}, those of "
                f"{data.dataset.name} are {tuple(shape)}; choose another encoder.dataset"
            )
        return data.timeline

    def start(self, data: RunData) -> Measurement:
        return partial(self.correlations, self.between_clients(data.split, data.dataset, data.seed))

    def correlations(self, seen: Matrix, context: ClusteringContext) -> Numbers:
        """The columns of one clustering; `seen` is (M, M), the result of `between_clients`."""
        clients, sent = context.clustering.clients, context.signature_similarity()
        views = seen[np.ix_(clients, clients)]
        both = views + cosines(context.split.label_counts(clients))
        return {
            DRIFT_CORRELATION: pair_correlation(sent, views),
            DATA_CORRELATION: pair_correlation(sent, both),
        }

    def between_clients(self, split: PartOptions, dataset: Dataset, seed: int) -> Matrix:
        """(M, M) similarity of the clients' ways to see images; 1: the same."""
        rows = np.sort(generator(seed, "drift").permutation(len(dataset.labels))[: self.images])
        view_of_client, views = _views(split.deal(dataset, seed), rows)
        device = torch.device(server_device())
        module = self.encoder.module(self.encoder.kind()).to(device)
        load_params(module, self.encoder.load_or_train(str(device)))
        ids, unlabelled = torch.arange(len(rows), device=device), np.zeros(len(rows), np.int64)
        latents = np.stack(
            [encode(module, self.encoder.examples(x, unlabelled, device), ids) for x in views]
        )  # (V, n, E)
        p = torch.from_numpy(latents).double().softmax(-1).numpy()
        return drift_similarity(p)[np.ix_(view_of_client, view_of_client)]


def _views(deal: Deal, rows: Ids) -> tuple[Ids, list[NDArray[np.uint8]]]:
    """(M,) the view that each client has, and the same images in each of the V views."""
    assert deal.views is not None  # checked by `prepare`
    assert deal.render is not None  # a deal with views can render them
    views, view_of_client = np.unique(deal.views, return_inverse=True)
    return view_of_client, [deal.render(int(view), rows) for view in views]


def drift_similarity(p: Matrix) -> Matrix:
    """(V, V) 1 - the mean Jensen-Shannon divergence over images, to the base 2 (REPA, Fig. 1).

    Args:
        p: (V, n, E) of each of n images in each of V views, a distribution over E.

    >>> p = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    >>> drift_similarity(p).tolist()
    [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    """
    entropy = _entropy(p)  # (V, n)
    between = [_entropy((p + q) / 2) - (entropy + h) / 2 for q, h in zip(p, entropy, strict=True)]
    similarity: Matrix = 1 - np.stack(between).mean(2)
    return similarity


def _entropy(p: Matrix) -> Matrix:
    """Entropy over the last axis, to the base 2."""
    logs = np.log2(p, out=np.zeros_like(p), where=p > 0)
    entropy: Matrix = -(p * logs).sum(-1)
    return entropy
