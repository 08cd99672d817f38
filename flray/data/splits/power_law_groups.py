"""Groups of classes with clients of very different sizes (Jamali-Rad et al., "Federated Learning
with Taskonomy for Non-IID Data", scenario 4: structured non-IID FEMNIST)."""

import math
from dataclasses import dataclass

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import consecutive_groups, images_to_deal
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions, TestRule
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least

_HALVINGS = 100  # halvings of an interval: more than a double has bits


@dataclass(frozen=True)
class PowerLawGroups(SplitOptions):
    """Each group has the next classes in order; its images are dealt in sizes of a power law.

    The groups are planted. See `power_law_sizes` for the sizes.
    `all_of_labels` are all test images of the group's classes, as the authors have it.
    Deviates: their code adds class 0 to the test of the last group, which has fewer classes.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> PowerLawGroups(clients=4, groups=2).split(dataset, seed=0).num_train_examples
    array([26, 65, 26, 65])
    """

    test: TestRule = "all_of_labels"
    groups: int = 10  # Number of planted groups, each with consecutive classes

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, groups=1)

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Hands of each group's images, whose sizes follow the power law; groups are planted."""
        groups = consecutive_groups(self.clients, self.groups)
        group_of_image = classes_in_order(dataset.num_classes, self.groups)[dataset.labels]
        pool = images_to_deal(dataset, self, seed)
        owned: list[Ids] = []
        for group, num_clients in enumerate(np.bincount(groups).tolist()):
            images = pool[group_of_image[pool] == group]
            if len(images) < 2 * num_clients:
                raise ExperimentError(
                    f"group {group} has {len(images)} images for {num_clients} clients, the power "
                    f"law needs at least 2 a client; lower clients"
                )
            shuffled = generator(seed, "split.deal", group).permutation(images)
            sizes = power_law_sizes(len(images), num_clients)
            owned += np.split(shuffled, np.cumsum(sizes)[:-1])
        kinds = group_of_image if self.test == "all_of_labels" else None
        return Deal(owned, groups=groups, kinds=kinds)


def classes_in_order(num_classes: int, num_groups: int) -> Ids:
    """The group of each class: as many consecutive classes each, the last group takes the rest.

    >>> classes_in_order(7, 3).tolist()
    [0, 0, 0, 1, 1, 1, 2]
    """
    size = math.ceil(num_classes / num_groups)
    if (num_groups - 1) * size >= num_classes:
        raise ExperimentError(
            f"groups of {size} consecutive classes use up the {num_classes} classes before the "
            f"last of {num_groups} groups; choose another number of groups"
        )
    return np.arange(num_classes) // size


def power_law_sizes(num_images: int, num_clients: int) -> Ids:
    """Sizes F + exp(x y^2) of clients y = 1, 2, ..., rounded down; the first takes the rest.

    F is half an even share and x makes the sizes sum to `num_images`, at least 2 a client.

    >>> power_law_sizes(8, 4).tolist()  # F = 1, x = 0
    [2, 2, 2, 2]
    >>> power_law_sizes(60, 3).tolist()  # F = 10, x = 0.353: 11, 14 and 34, one is left
    [12, 14, 34]
    """
    F = num_images // (2 * num_clients)
    y = np.arange(1, num_clients + 1)
    x = power_law_exponent(num_images - num_clients * F, num_clients)
    sizes: Ids = (F + np.exp(x * y**2)).astype(np.int64)
    sizes[0] += num_images - sizes.sum()
    return sizes


def power_law_exponent(total: int, num_clients: int) -> float:
    """The x >= 0 for which exp(x y^2) over y = 1..num_clients sums to `total`, from below.

    `total` must be at least `num_clients`, where x is 0.

    >>> round(power_law_exponent(4, 4), 9), round(power_law_exponent(50, 3), 3)
    (0.0, 0.418)
    """
    y = np.arange(1, num_clients + 1)
    low, high = 0.0, math.log(total) / num_clients**2
    for _ in range(_HALVINGS):
        x = (low + high) / 2
        low, high = (low, x) if np.exp(x * y**2).sum() > total else (x, high)
    return low
