"""Models: LightningModules, the bank they travel in, and how banks are mixed."""

from pytorch_lightning import LightningModule

from flray.models.flhc_cnn import FlhcCnn
from flray.models.lenet5 import LeNet5
from flray.models.mlp200 import Mlp200

MODELS: dict[str, type[LightningModule]] = {
    "flhc_cnn": FlhcCnn,
    "lenet5": LeNet5,
    "mlp200": Mlp200,
}
