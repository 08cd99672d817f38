"""Datasets, and splits of them among clients. Adding one is one file and one line here."""

from flray.data.datasets.digits import Digits
from flray.data.datasets.downloaded import Cifar10, FashionMnist, Mnist
from flray.data.datasets.synthetic import Synthetic
from flray.data.splits.dirichlet import Dirichlet
from flray.data.splits.iid import Iid
from flray.data.splits.label_groups import LabelGroups
from flray.data.splits.label_swap import LabelSwap
from flray.data.splits.pathological import Pathological

# A dataset is a dataclass whose fields are its configuration, with load() -> Dataset.
DATASETS: dict[str, type] = {
    "digits": Digits,
    "synthetic": Synthetic,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "cifar10": Cifar10,
}

# A split is a dataclass whose fields are its configuration, with split(dataset, seed) -> Split.
SPLITS: dict[str, type] = {
    "iid": Iid,
    "pathological": Pathological,
    "label_groups": LabelGroups,
    "label_swap": LabelSwap,
    "dirichlet": Dirichlet,
}
