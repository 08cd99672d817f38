"""A few labels per client (McMahan et al. 2017, "pathological non-IID"; Briggs et al. 2020)."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import (
    deal_label,
    deal_labels,
    gather_pieces,
    images_by_label,
    images_to_deal,
    largest_remainder,
)
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least

Variant = Literal["exact", "shards", "uneven"]


@dataclass(frozen=True)
class Pathological(SplitOptions):
    """Each client holds images of `labels_per_client` labels.

    `exact` gives clients distinct labels, used equally often; `shards` sorts all images by label
    and deals contiguous shards, as McMahan et al. do, which may straddle two labels; `uneven` gives
    neighbouring clients the same labels and parts of random sizes, as PFLlib does.
    Deviates: Briggs et al. cut shards but demand exactly 2 labels of 300 images each; `exact`
    keeps the 2 labels and splits each label evenly among its clients (5,421 fives are not 6,000).

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> split = Pathological(clients=4).split(dataset, seed=0)
    >>> (split.label_counts(split.clients) > 0).sum(axis=1)  # labels of each client
    array([2, 2, 2, 2])
    """

    labels_per_client: int = 2  # Number of labels per client
    # How labels are dealt. exact: distinct labels, used equally often; shards: as McMahan, which
    # may straddle two labels; uneven: as PFLlib, the same labels for neighbours, in random sizes
    variant: Variant = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, labels_per_client=1)

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Whole labels or shards for each client, by `variant`."""
        if self.labels_per_client > dataset.num_classes:
            raise ExperimentError(
                f"labels_per_client must be at most the {dataset.num_classes} classes of "
                f"{dataset.name}, got {self.labels_per_client}"
            )
        pool = images_to_deal(dataset, self, seed)
        rng = generator(seed, "split.deal")
        deals = {
            "exact": self._deal_labels,
            "shards": self._deal_shards,
            "uneven": self._deal_unevenly,
        }
        return Deal(deals[self.variant](pool, dataset, rng))

    def _deal_labels(self, pool: Ids, dataset: Dataset, rng: np.random.Generator) -> list[Ids]:
        """Give each client its labels, and split the images of a label among its clients."""
        chosen = balanced_label_sets(self.clients, self.labels_per_client, dataset.num_classes, rng)
        holders = ((rng.permutation(np.flatnonzero(column)), rng) for column in chosen.T)
        return deal_labels(images_by_label(dataset, pool), self.clients, holders)

    def _deal_shards(self, pool: Ids, dataset: Dataset, rng: np.random.Generator) -> list[Ids]:
        """Sort the images by label, cut them into equal shards and deal these at random."""
        shuffled = rng.permutation(pool)
        by_label = shuffled[np.argsort(dataset.labels[shuffled], kind="stable")]
        num_shards = self.clients * self.labels_per_client
        shards = np.array_split(by_label, num_shards)
        order = rng.permutation(num_shards).reshape(self.clients, self.labels_per_client)
        return [np.concatenate([shards[shard] for shard in hand]) for hand in order]

    def _deal_unevenly(self, pool: Ids, dataset: Dataset, rng: np.random.Generator) -> list[Ids]:
        """Give each label to the first ⌈M c / C⌉ clients that still lack one, by id.

        All but the last of them get between a tenth of the mean and the mean, the last one the
        rest.
        """
        num_holders = math.ceil(self.clients * self.labels_per_client / dataset.num_classes)
        num_labels = np.zeros(self.clients, np.int64)
        pieces: list[tuple[int, Ids]] = []
        for label, images in enumerate(images_by_label(dataset, pool)):
            holders = np.flatnonzero(num_labels < self.labels_per_client)[:num_holders]
            if not len(holders):
                break
            num_labels[holders] += 1
            shuffled = np.concatenate(deal_label(images, len(holders), label, rng))
            mean = len(images) / len(holders)
            least = max(int(mean / 10), 1)
            sizes = rng.integers(least, max(int(mean), least + 1), len(holders) - 1)
            slices = np.split(shuffled, np.cumsum(sizes))
            pieces += zip(holders.tolist(), slices, strict=True)
        return gather_pieces(self.clients, pieces)


def balanced_label_sets(
    num_clients: int, labels_each: int, num_classes: int, rng: np.random.Generator
) -> Ids:
    """0/1 matrix (clients, classes): `labels_each` ones a row, columns equal to within one.

    One client after the other draws labels by the uses they have left. A label that all clients
    still to come must take is taken, so the draw cannot get stuck.

    >>> balanced_label_sets(4, 2, 8, np.random.default_rng(0)).sum(0).tolist()
    [1, 1, 1, 1, 1, 1, 1, 1]
    """
    order = rng.permutation(num_classes)  # the first in this order get the odd uses
    left = np.empty(num_classes, np.int64)
    left[order] = largest_remainder(num_clients * labels_each, np.ones(num_classes, np.int64))
    chosen = np.zeros((num_clients, num_classes), np.int64)
    for client in range(num_clients):
        forced = np.flatnonzero(left == num_clients - client)
        free = np.where(left == num_clients - client, 0, left)
        chosen[client, forced] = 1
        if num_drawn := labels_each - len(forced):
            drawn = rng.choice(num_classes, num_drawn, replace=False, p=free / free.sum())
            chosen[client, drawn] = 1
        left = left - chosen[client]
    return chosen
