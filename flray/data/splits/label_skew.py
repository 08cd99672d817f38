"""A share of the labels per client (Li et al., "Federated Learning on Non-IID Data Silos", ICDE
2022, arXiv 2102.02079, "#C = k"), by the rule of its code, NIID-Bench; FLIS's "label skew"."""

from dataclasses import dataclass

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import deal_labels, images_by_label, images_to_deal
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions, TestRule
from flray.randomness import generator


@dataclass(frozen=True)
class LabelSkew(SplitOptions):
    """Client i holds label i mod K and others at random; a label is split among its clients.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> split = LabelSkew(clients=4, share=0.2).split(dataset, seed=0)
    >>> (split.label_counts(split.clients) > 0).sum(axis=1)  # 20 % of 10 labels
    array([2, 2, 2, 2])
    """

    test: TestRule = "all_of_labels"
    share: float = 0.2  # Share of the K labels that a client holds, rounded to a whole number

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Draw a set of labels for each client and divide each label among those that have it."""
        pool = images_to_deal(dataset, self, seed)
        labels_each = max(round(self.share * dataset.num_classes), 1)
        rng = generator(seed, "split.labels")
        sets = skewed_label_sets(self.clients, labels_each, dataset.num_classes, rng)
        holders = (
            (np.flatnonzero((sets == label).any(axis=1)), generator(seed, "split.deal", label))
            for label in range(dataset.num_classes)
        )
        owned = deal_labels(images_by_label(dataset, pool), self.clients, holders)
        return Deal(owned)


def skewed_label_sets(
    num_clients: int, labels_each: int, num_classes: int, rng: np.random.Generator
) -> Ids:
    """(clients, labels_each): label i mod num_classes for client i, then different ones drawn.

    >>> skewed_label_sets(3, 2, 2, np.random.default_rng(0)).tolist()
    [[0, 1], [1, 0], [0, 1]]
    """
    first = np.arange(num_clients) % num_classes
    # Distances from the first label, so that it is not drawn again.
    steps = [1 + rng.permutation(num_classes - 1)[: labels_each - 1] for _ in first]
    others = (first[:, None] + np.stack(steps)) % num_classes
    return np.concatenate([first[:, None], others], axis=1)
