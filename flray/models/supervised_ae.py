"""Supervised autoencoder of REPA: an encoder shared by a decoder and a classifier.

The paper says "encoder, decoder, classifier: convolution, ReLU, max pooling, softmax" and no more:
widths, kernels, latent size and the weight of the two losses are ours (docs/deviations.md).
Output are the logits. A variant decides the loss and not the parts, so that the params of one fit
all; the part it does not train stays as it was initialised, so the labels of `ae` are guesses.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from flray.models.autoencoder import Autoencoder, mean_over_pixels, quartered
from flray.models.predictor import Batch
from flray.values import require_sizes


class SupervisedAe(Autoencoder):
    """Images to logits (B, classes); `encode` gives (B, latent), `reconstruct` the images.

    >>> import torch
    >>> SupervisedAe((3, 32, 32), 10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        latent: int = 64,  # Size E of the latent vector
        # Training loss. clf: cross-entropy; ae: squared error; sae: both
        variant: Literal["sae", "clf", "ae"] = "sae",
        weight: float = 1.0,  # Weight of the squared error, with variant: sae
    ) -> None:
        super().__init__()
        require_sizes(latent=latent)
        if weight < 0:
            raise ValueError(f"weight must be >= 0, got {weight}")
        channels = image_shape[0]
        rows, columns = quartered(image_shape)
        self.variant = variant
        self.weight = weight
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * rows * columns, latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 64 * rows * columns),
            nn.ReLU(),
            nn.Unflatten(1, (64, rows, columns)),
            _doubling(64, 32),
            nn.ReLU(),
            _doubling(32, channels),
        )
        self.head = nn.Linear(latent, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encode(x))
        return logits

    def example_losses(self, batch: Batch) -> Tensor:
        x, y = batch
        z = self.encode(x)
        if self.variant == "clf":
            return self._label_losses(z, y)
        if self.variant == "ae":
            return self._pixel_losses(z, x)
        return self._label_losses(z, y) + self.weight * self._pixel_losses(z, x)

    def _label_losses(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z), y, reduction="none")

    def _pixel_losses(self, z: Tensor, x: Tensor) -> Tensor:
        return mean_over_pixels((self.decode(z) - x).square())


def _doubling(inputs: int, outputs: int) -> nn.Module:
    """Mirrors a 3x3 convolution and the pooling after it."""
    return nn.ConvTranspose2d(inputs, outputs, kernel_size=3, stride=2, padding=1, output_padding=1)
