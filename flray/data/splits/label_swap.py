"""Groups that disagree about two labels (Briggs et al. 2020, "label-swapped non-IID")."""

from dataclasses import dataclass

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import consecutive_groups, deal_evenly, images_to_deal
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least


@dataclass(frozen=True)
class LabelSwap(SplitOptions):
    """An iid deal; group g sees labels 2g and 2g+1 swapped, in training and test alike.

    The paper does not name its pairs; its 80 % ceiling for one global model implies disjoint ones.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> split = LabelSwap(clients=4, groups=2).split(dataset, seed=0)
    >>> examples = split.train[3]  # client 3 is in group 1, which swaps labels 2 and 3
    >>> is_two = dataset.labels[split.image_ids[examples]] == 2
    >>> np.unique(split.labels[examples[is_two]])
    array([3])
    """

    groups: int = 4  # Number of planted groups; group g sees one pair of labels swapped
    # Draw the disjoint pairs of labels from the seed. false: labels 2g and 2g + 1
    seeded_pairs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, groups=1)

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Equal hands, and for each group the labels that its clients see."""
        groups = consecutive_groups(self.clients, self.groups)
        if 2 * self.groups > dataset.num_classes:
            raise ExperimentError(
                f"groups must be at most {dataset.num_classes // 2}, a pair of the "
                f"{dataset.num_classes} classes of {dataset.name} each; got {self.groups}"
            )
        labels = np.arange(dataset.num_classes)
        if self.seeded_pairs:
            labels = generator(seed, "split.pairs").permutation(labels)
        maps = swap_maps(labels[: 2 * self.groups].reshape(-1, 2), dataset.num_classes)
        pool = images_to_deal(dataset, self, seed)
        owned = deal_evenly(pool, self.clients, generator(seed, "split.deal"))
        return Deal(owned, groups=groups, label_maps=maps[groups])


def swap_maps(pairs: Ids, num_classes: int) -> Ids:
    """(pairs, classes): row g maps every label to itself but swaps pair g.

    >>> swap_maps(np.array([[0, 1], [2, 3]]), 4).tolist()
    [[1, 0, 2, 3], [0, 1, 3, 2]]
    """
    maps = np.tile(np.arange(num_classes), (len(pairs), 1))
    np.put_along_axis(maps, pairs, pairs[:, ::-1], axis=1)
    return maps
