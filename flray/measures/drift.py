"""How alike clients see images: REPA's similarity of concept drift (Fig. 1).

Radovič, Pejović: REPA, arXiv 2309.14088: the clients' pipelines are applied to the same images, a
pre-trained network embeds them, and softmax makes distributions of the embeddings. The paper does
not name the network; here it is one that was trained centrally and clusters nobody.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flray.client.embedding import encode
from flray.clustering.encoder import Encoder, server_device
from flray.data.checks import check_at_least
from flray.data.dataset import Dataset
from flray.data.parts import Views, seen_alike
from flray.errors import ExperimentError
from flray.measures.scores import drift_similarity
from flray.models.bank import load_params
from flray.randomness import generator


@dataclass(frozen=True)
class Drift:
    """The network that embeds images, and how many of them are compared."""

    encoder: Encoder  # Encoder that embeds the images, trained centrally
    images: int = 100  # Number of images that every client's pipeline is applied to

    def __post_init__(self) -> None:
        check_at_least("images", self.images, 1)

    def check(self, split: Any, dataset: Dataset, has_events: bool) -> None:  # Any: a split
        """Refuse what has no similarity of drift, before anything is trained."""
        if not isinstance(split, Views) or has_events:
            raise ExperimentError(
                "evaluate.drift compares how clients see the same images all the time: it needs "
                "the split image_shift or rotation and no events; or set it to null"
            )
        wanted, shape = self.encoder.kind().image_shape, dataset.image_shape
        if tuple(wanted) != tuple(shape):
            raise ExperimentError(
                f"evaluate.drift: the encoder is for images {tuple(wanted)}, those of "
                f"{dataset.name} are {tuple(shape)}; choose another encoder.dataset"
            )

    def between_clients(self, split: Views, dataset: Dataset, seed: int) -> NDArray[np.float64]:
        """(M, M) similarity of the clients' ways to see images; 1: the same."""
        drawn = generator(seed, "drift").permutation(len(dataset.labels))[: self.images]
        place, views = seen_alike(split, dataset, np.sort(drawn), seed)
        device = torch.device(server_device())
        module = self.encoder.module(self.encoder.kind()).to(device)
        load_params(module, self.encoder.load_or_train(str(device)))
        every = torch.arange(len(drawn), device=device)
        unlabelled = np.zeros(len(drawn), np.int64)
        latents = np.stack(
            [encode(module, self.encoder.examples(x, unlabelled, device), every) for x in views]
        )  # (V, n, E)
        p = torch.from_numpy(latents).double().softmax(-1).numpy()
        similarity: NDArray[np.float64] = drift_similarity(p)[np.ix_(place, place)]
        return similarity
