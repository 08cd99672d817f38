"""Residual convolutional autoencoder of FLT (Jamali-Rad et al.) for CIFAR images in [-1, 1].

BatchNorm keeps running statistics, so it runs on the engines `loop` and `lightning`. Batch norm
follows the ReLU (there is none after the third) of the encoder's five convolutions outside the
residual blocks: scale and shift of 64 + 128 + 128 + 64 + 8 channels, 784 parameters. The decoder
has none. Convolutions have a bias, except inside the residual blocks. At latent 128 that makes
439,064 parameters in the encoder and 438,659 in the decoder, as in FLT's code.

Deviates: FLT's code of the paper's time declares all five batch norms and uses the first two
(`batch_norm: first_two`, here without the idle 400 parameters); and as the first ReLU of its
residual blocks works in place, they add to relu(x) rather than to x.
"""

from typing import Literal

from torch import nn

from flray.models.autoencoder import Autoencoder, quartered
from flray.models.resnet9 import Residual
from flray.values import require_sizes

WIDTH = 128
BOTTLENECK = 32  # channels inside a residual block
THIN = 8  # channels that are flattened


class ResidualConvAe(Autoencoder):
    """Images to their reconstruction; height and width must be multiples of 4.

    >>> import torch
    >>> ResidualConvAe((3, 32, 32), latent=16).encode(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        # Size e of the latent vector; 64 in FLT's code when the paper was written
        latent: int = 128,
        # Batch norms of the encoder. first_two: as FLT's code used them at the time of the paper
        batch_norm: Literal["all", "first_two"] = "all",
    ) -> None:
        super().__init__()
        require_sizes(latent=latent)
        channels = image_shape[0]
        rows, columns = quartered(image_shape)
        later = nn.BatchNorm2d if batch_norm == "all" else nn.Identity
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, WIDTH // 2, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(WIDTH // 2),
            nn.Conv2d(WIDTH // 2, WIDTH, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(WIDTH),
            nn.Conv2d(WIDTH, WIDTH, kernel_size=3, padding=1),
            later(WIDTH),
            *_residual_blocks(),
            nn.Conv2d(WIDTH, WIDTH // 2, kernel_size=1),
            nn.ReLU(),
            later(WIDTH // 2),
            nn.Conv2d(WIDTH // 2, THIN, kernel_size=1),
            nn.ReLU(),
            later(THIN),
            nn.Flatten(),
            nn.Linear(THIN * rows * columns, latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, THIN * rows * columns),
            nn.Unflatten(1, (THIN, rows, columns)),
            nn.ConvTranspose2d(THIN, WIDTH // 2, kernel_size=1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH // 2, WIDTH, kernel_size=1),
            nn.ReLU(),
            *_residual_blocks(),
            nn.Conv2d(WIDTH, WIDTH, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, WIDTH // 2, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH // 2, channels, kernel_size=4, stride=2, padding=1),
        )


def _residual_blocks() -> tuple[nn.Module, ...]:
    return (_residual_block(), _residual_block(), nn.ReLU())


def _residual_block() -> Residual:
    return Residual(
        nn.ReLU(),
        nn.Conv2d(WIDTH, BOTTLENECK, kernel_size=3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(BOTTLENECK, WIDTH, kernel_size=1, bias=False),
    )
