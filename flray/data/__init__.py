"""Datasets, and splits of them among clients. Adding one is one file and one line here."""

from flray.data.datasets.cifar_mixes import Cifar20, Cifar100Subset
from flray.data.datasets.digits import Digits
from flray.data.datasets.downloaded import Cifar10, Cifar100, Emnist, FashionMnist, Mnist, Svhn
from flray.data.datasets.femnist import Femnist
from flray.data.datasets.mnist_mixes import MnistFashion
from flray.data.datasets.own_files import Arrays, Series, Text
from flray.data.datasets.prepared import Cifar100Jpeg, MnistWriters, SvhnRecut, Usps
from flray.data.datasets.synthetic import Synthetic
from flray.data.datasets.tables import Table
from flray.data.splits.by_writer import ByWriter
from flray.data.splits.dirichlet import Dirichlet
from flray.data.splits.iid import Iid
from flray.data.splits.image_shift import ImageShift
from flray.data.splits.label_groups import LabelGroups
from flray.data.splits.label_skew import LabelSkew
from flray.data.splits.label_swap import LabelSwap
from flray.data.splits.natural import Natural
from flray.data.splits.pathological import Pathological
from flray.data.splits.power_law_groups import PowerLawGroups
from flray.data.splits.rotation import Rotation

# A dataset is a frozen dataclass whose fields are its keys in YAML, with load() -> Dataset.
DATASETS: dict[str, type] = {
    "digits": Digits,
    "synthetic": Synthetic,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "mnist_fashion": MnistFashion,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "cifar100_jpeg": Cifar100Jpeg,
    "cifar100_subset": Cifar100Subset,
    "cifar20": Cifar20,
    "svhn": Svhn,
    "svhn_recut": SvhnRecut,
    "emnist": Emnist,
    "femnist": Femnist,
    "mnist_writers": MnistWriters,
    "usps": Usps,
    "arrays": Arrays,
    "series": Series,
    "table": Table,
    "text": Text,
}

# A split is one with split(dataset, seed) -> Split.
SPLITS: dict[str, type] = {
    "iid": Iid,
    "pathological": Pathological,
    "label_groups": LabelGroups,
    "label_swap": LabelSwap,
    "dirichlet": Dirichlet,
    "label_skew": LabelSkew,
    "power_law_groups": PowerLawGroups,
    "rotation": Rotation,
    "image_shift": ImageShift,
    "by_writer": ByWriter,
    "natural": Natural,
}
