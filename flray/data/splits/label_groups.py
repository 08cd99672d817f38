"""Groups of clients with their own label sets (Jamali-Rad et al., "Federated Learning with
Taskonomy for Non-IID Data", scenarios 1 and 2)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import (
    consecutive_groups,
    deal_label,
    gather_pieces,
    images_by_label,
    images_to_deal,
)
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions, TestRule
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least

Scenario = Literal["disjoint", "ring"]
_SMALLEST_RING = 3  # with two groups both neighbours are the same group


@dataclass(frozen=True)
class LabelGroups(SplitOptions):
    """Clients of a group hold images of the group's labels; groups are planted.

    `disjoint` (scenario 1) cuts the labels into equal sets; with `ring` (scenario 2) each group has
    also the first label of the next one.
    Deviates: a label that runs out is split evenly (the authors' code repeats the last training
    image), and neighbouring groups hold different images of the label they share; `overlap` gives
    client j of both groups the same ones, as the authors do, and `drawn` lets any two clients hold
    the same image, as their code did until January 2021.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> split = LabelGroups(clients=5, scenario="ring").split(dataset, seed=0)
    >>> (split.label_counts(split.clients) > 0).sum(axis=1), split.groups
    (array([3, 3, 3, 3, 3]), array([0, 1, 2, 3, 4]))
    """

    test: TestRule = "all_of_labels"
    # Label sets of the groups. disjoint: FLT's scenario 1; ring: scenario 2, neighbours share a
    # label
    scenario: Scenario = "disjoint"
    groups: int = 5  # Number of planted groups
    # Most images per client, equally many of each label. None: all images are dealt
    samples_per_client: int | None = None
    # Give client j of two neighbouring groups the same images of the label that they share
    overlap: bool = False
    # Draw each client's images of a label from all of them, so that clients may hold the same ones;
    # needs samples_per_client
    drawn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, groups=_SMALLEST_RING if self.scenario == "ring" else 1)
        if self.overlap and self.scenario != "ring":
            raise ValueError("overlap needs scenario: ring; disjoint groups share no label")
        if self.drawn and (self.samples_per_client is None or self.overlap):
            raise ValueError(
                "drawn needs samples_per_client, and no overlap, since any two clients may hold "
                f"the same images; got {self.samples_per_client} and overlap "
                f"{str(self.overlap).lower()}"
            )

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Slices of each label for the clients of the groups that have it; groups are planted."""
        groups = consecutive_groups(self.clients, self.groups)
        order = generator(seed, "split.labels").permutation(dataset.num_classes)
        sets = label_sets(order, self.groups, int(self.scenario == "ring"))
        most = self._most_per_label(sets.shape[1])
        pool = images_to_deal(dataset, self, seed)
        pieces: list[tuple[int, Ids]] = []
        for label, images in enumerate(images_by_label(dataset, pool)):
            holders = np.flatnonzero((sets == label).any(axis=1)[groups])
            rng = generator(seed, "split.deal", label)
            if self.drawn:
                pieces += [(i, rng.permutation(images)[:most]) for i in holders.tolist()]
                continue
            slots = self._slots(holders, groups)
            slices = deal_label(images, int(slots.max()) + 1, label, rng)
            slots_of_holders = zip(holders.tolist(), slots.tolist(), strict=True)
            pieces += [(i, slices[slot][:most]) for i, slot in slots_of_holders]
        owned = gather_pieces(self.clients, pieces)
        return Deal(owned, groups=groups)

    def _slots(self, holders: Ids, groups: Ids) -> Ids:
        """The number of the slice of a label that each of its clients gets."""
        if not self.overlap:
            return np.arange(len(holders))
        first_of_group = np.searchsorted(groups, groups[holders])
        return holders - first_of_group

    def _most_per_label(self, num_labels: int) -> int | None:
        """Most images of one label that a client holds; None: no limit."""
        if self.samples_per_client is None:
            return None
        require_at_least(self, samples_per_client=num_labels)
        return self.samples_per_client // num_labels


def label_sets(order: Ids, num_groups: int, num_shared: int) -> Ids:
    """(groups, labels): equal cuts of `order`, each with the first labels of the next cut added.

    >>> label_sets(np.arange(6), 3, 0).tolist()
    [[0, 1], [2, 3], [4, 5]]
    >>> label_sets(np.arange(6), 3, 1).tolist()
    [[0, 1, 2], [2, 3, 4], [4, 5, 0]]
    """
    num_classes = len(order)
    if num_classes % num_groups:
        divisors = [g for g in range(1, num_classes + 1) if num_classes % g == 0]
        raise ExperimentError(
            f"groups must divide the {num_classes} classes, got {num_groups}; "
            f"possible: {', '.join(map(str, divisors))}"
        )
    width = num_classes // num_groups
    start = width * np.arange(num_groups)[:, None]
    sets: Ids = order[(start + np.arange(width + num_shared)) % num_classes]
    return sets
