"""Everybody alike: shuffle and deal evenly (McMahan et al. 2017, "IID")."""

from dataclasses import dataclass

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import deal_evenly, gather_pieces, images_to_deal, known_source
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least


@dataclass(frozen=True)
class Iid(SplitOptions):
    """All images are shuffled and dealt evenly; sizes differ by at most one.

    With `by_source` client i holds images of source i mod G only, where G is the number of sources
    in the dataset; the sources are then the planted groups.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> Iid(clients=4).split(dataset, seed=0).num_train_examples  # 50 each, 5 for validation
    array([45, 45, 45, 45])
    """

    samples_per_client: int | None = None  # Images per client. None: all images are dealt
    by_source: bool = False  # Make the sources (groups of synthetic, writers) the planted groups

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, samples_per_client=1)

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Equal hands of all images or, with `by_source`, of the images of one source each."""
        pool = images_to_deal(dataset, self, seed)
        if self.by_source:
            return self._deal_by_source(pool, dataset, seed)
        return Deal(self._deal(pool, self.clients, generator(seed, "split.deal")))

    def _deal_by_source(self, pool: Ids, dataset: Dataset, seed: int) -> Deal:
        """Deal each source to its clients; test images are of the same source and label."""
        source = known_source(dataset, "by_source")
        sources = np.unique(source[pool])
        groups = np.arange(self.clients) % len(sources)
        pieces: list[tuple[int, Ids]] = []
        for group in np.unique(groups).tolist():
            members = np.flatnonzero(groups == group).tolist()
            images = pool[source[pool] == sources[group]]
            hands = self._deal(images, len(members), generator(seed, "split.deal", group))
            pieces += zip(members, hands, strict=True)
        kinds = source * dataset.num_classes + dataset.labels
        return Deal(gather_pieces(self.clients, pieces), groups=groups, kinds=kinds)

    def _deal(self, images: Ids, num_clients: int, rng: np.random.Generator) -> list[Ids]:
        """Deal evenly, then keep `samples_per_client` of each hand."""
        hands = deal_evenly(images, num_clients, rng)
        if self.samples_per_client is None:
            return hands
        if len(hands[-1]) < self.samples_per_client:  # the last hand is the smallest
            raise ExperimentError(
                f"samples_per_client {self.samples_per_client} needs "
                f"{self.samples_per_client * num_clients} images for {num_clients} clients, "
                f"there are {len(images)}; lower samples_per_client or clients"
            )
        return [hand[: self.samples_per_client] for hand in hands]
