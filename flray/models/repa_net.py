"""REPA's networks as one module: the classifier, and beside it the encoder that describes clients.

Radovič, Pejović: REPA: Client Clustering without Training and Data Labels for Improved Federated
Learning in Non-IID Settings. arXiv 2309.14088. Clustered training starts from the joint classifier
whatever encoder describes the clients, so both are trained at the same time, on the same batches.
They share no parameter, and optimisers step each parameter by itself: each is trained as if it were
alone. Layers as in `supervised_ae`.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from flray.models.bank import ModelBank
from flray.models.classifier import Classifier
from flray.models.predictor import Batch
from flray.models.supervised_ae import SupervisedAe

EMBEDDER = "embedder."  # prefix of the leaves that only describe clients


class RepaNet(Classifier):
    """Logits of the classifier as output; `encode` gives the latents that clients are described by.

    `sae` and `ae` have an encoder of their own, with a decoder; `clf` is the classifier's encoder.

    >>> net = RepaNet((3, 32, 32), 10, latent=16)
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.encode(torch.zeros(2, 3, 32, 32)).shape
    (torch.Size([2, 10]), torch.Size([2, 16]))
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        # Loss of the encoder. clf: cross-entropy; ae: squared error; sae: both
        encoder: Literal["sae", "clf", "ae"] = "sae",
        latent: int = 64,  # Size E of the latent vector
        weight: float = 1.0,  # Weight of the squared error, with encoder: sae
    ) -> None:
        super().__init__()
        self.classifier = SupervisedAe(image_shape, num_classes, latent, "clf")
        del self.classifier.decoder  # of no use to a classifier
        self.embedder: SupervisedAe | None = None
        if encoder != "clf":
            self.embedder = SupervisedAe(image_shape, num_classes, latent, encoder, weight)
        if encoder == "ae" and self.embedder is not None:
            del self.embedder.head  # an autoencoder has no labels

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x)
        return logits

    def encode(self, x: Tensor) -> Tensor:
        """(B, E) φ(x)"""
        return (self.embedder or self.classifier).encode(x)

    def classifier_losses(self, batch: Batch) -> Tensor:
        """(B,) cross-entropy alone, for training after the clustering."""
        return self.classifier.example_losses(batch)

    def example_losses(self, batch: Batch) -> Tensor:
        """(B,) losses of classifier and encoder; they share no parameter."""
        losses = self.classifier_losses(batch)
        return losses if self.embedder is None else losses + self.embedder.example_losses(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For use outside flray, and for `train.optimizer: module`."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def without_embedder(bank: ModelBank) -> ModelBank:
    """What travels once clients are clustered: no encoder beside the classifier."""
    params = {n: leaf for n, leaf in bank.params.items() if not n.startswith(EMBEDDER)}
    return replace(bank, params=params)
