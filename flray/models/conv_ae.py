"""Convolutional autoencoder of FLT (Jamali-Rad et al.) for 28x28 images in [0, 1].

The output is a sigmoid: pixels outside [0, 1] cannot be met, and make no sense of `bce`.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flray.models.autoencoder import Autoencoder, mean_over_pixels, quartered
from flray.models.predictor import Batch
from flray.values import require_sizes


class ConvAe(Autoencoder):
    """Images to their reconstruction; height and width must be multiples of 4.

    >>> ConvAe((1, 28, 28), latent=8).encode(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        latent: int = 128,  # Size e of the latent vector
        # Reconstruction loss. mse: as in the paper; bce: FLT's code when the paper was written
        loss: Literal["mse", "bce"] = "mse",
    ) -> None:
        super().__init__()
        require_sizes(latent=latent)
        channels = image_shape[0]
        rows, columns = quartered(image_shape)
        self.loss = loss
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 4, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * rows * columns, latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 4 * rows * columns),
            nn.Unflatten(1, (4, rows, columns)),
            nn.ConvTranspose2d(4, 16, kernel_size=2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(16, channels, kernel_size=2, stride=2),
        )

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(z))

    def example_losses(self, batch: Batch) -> Tensor:
        if self.loss == "mse":
            return super().example_losses(batch)
        x, _ = batch
        logits = self.decoder(self.encode(x))  # log(sigmoid) of these stays finite
        return mean_over_pixels(F.binary_cross_entropy_with_logits(logits, x, reduction="none"))
