"""What the autoencoders share: two halves, and a loss that is a mean over pixels."""

import copy
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from flray.models.predictor import Batch

NormStatistics = Literal["running", "image"]  # of batch norms while an encoder embeds


class Autoencoder(LightningModule):
    """Reconstruction as output, squared error as loss; a subclass sets encoder and decoder.

    There is no `losses(output, labels)` as classifiers have it: the loss needs the images.
    """

    takes = "numbers"  # as `Predictor.takes`
    encoder: nn.Module
    decoder: nn.Module

    def encode(self, x: Tensor) -> Tensor:
        """(B, latent) codes of images (B, channels, height, width)."""
        z: Tensor = self.encoder(x)
        return z

    def decode(self, z: Tensor) -> Tensor:
        """(B, channels, height, width) images of codes (B, latent)."""
        image: Tensor = self.decoder(z)
        return image

    def reconstruct(self, x: Tensor) -> Tensor:
        """The images as the autoencoder sees them, of the same shape."""
        return self.decode(self.encode(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.reconstruct(x)

    def example_losses(self, batch: Batch) -> Tensor:
        """(B,) mean squared error over the pixels of each image; labels are not used."""
        x, _ = batch
        return mean_over_pixels((self.reconstruct(x) - x).square())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.example_losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """What FLT pre-trains its encoders with."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def mean_over_pixels(errors: Tensor) -> Tensor:
    """One number for each example.

    >>> mean_over_pixels(torch.tensor([[[[1.0, 3.0]]], [[[5.0, 5.0]]]]))
    tensor([2., 5.])
    """
    return errors.flatten(1).mean(1)


def quartered(image_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Height and width after two halvings, which the decoder can undo.

    >>> quartered((1, 28, 32))
    (7, 8)
    """
    _, height, width = image_shape
    if height % 4 or width % 4:
        raise ValueError(f"height and width must be multiples of 4, got images {image_shape}")
    return height // 4, width // 4


def with_image_statistics(module: LightningModule) -> LightningModule:
    """A copy whose batch norms take mean and variance of each image, as with batches of one image.

    >>> module = LightningModule()
    >>> module.norm = nn.BatchNorm2d(1)
    >>> image = torch.tensor([[[[1.0, 3.0]]]])
    >>> with_image_statistics(module).norm(image).round().flatten().tolist()
    [-1.0, 1.0]
    """
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, nn.BatchNorm2d):
                of_image = nn.InstanceNorm2d(norm.num_features, norm.eps, affine=norm.affine)
                of_image.weight, of_image.bias = norm.weight, norm.bias
                setattr(parent, name, of_image)
    return module
