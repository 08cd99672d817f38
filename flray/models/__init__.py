"""Models: LightningModules, the bank they travel in, and how banks are mixed."""

from pytorch_lightning import LightningModule

from flray.models.conv_ae import ConvAe
from flray.models.flhc_cnn import FlhcCnn
from flray.models.leaf_cnn import LeafCnn
from flray.models.lenet5 import LeNet5
from flray.models.mlp import Linear, Mlp
from flray.models.mlp200 import Mlp200
from flray.models.repa_net import RepaNet
from flray.models.residual_conv_ae import ResidualConvAe
from flray.models.resnet9 import ResNet9
from flray.models.sequences import CharGru, Cnn1d, Gru
from flray.models.supervised_ae import SupervisedAe

MODELS: dict[str, type[LightningModule]] = {
    "conv_ae": ConvAe,
    "flhc_cnn": FlhcCnn,
    "leaf_cnn": LeafCnn,
    "lenet5": LeNet5,
    "mlp200": Mlp200,
    "linear": Linear,
    "mlp": Mlp,
    "cnn1d": Cnn1d,
    "gru": Gru,
    "char_gru": CharGru,
    "repa_net": RepaNet,
    "residual_conv_ae": ResidualConvAe,
    "resnet9": ResNet9,
    "supervised_ae": SupervisedAe,
}
