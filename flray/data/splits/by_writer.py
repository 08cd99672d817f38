"""Each client is one writer (Caldas et al. 2018, "LEAF", arXiv 1812.01097): the natural split."""

from dataclasses import dataclass, replace

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import images_of_clients, known_source, require_classes
from flray.data.parts import Deal, cut_parts
from flray.data.split import Split
from flray.data.splits.options import PartOptions, TestRule
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_at_least


@dataclass(frozen=True)
class ByWriter(PartOptions):
    """A client holds all images of one writer; clients are in the order of the writers' numbers.

    Needs a dataset that knows the source of its images: `femnist`, `mnist_writers`, or `synthetic`
    with groups.
    `own_split` takes a writer's own images of the dataset's test part (FEMNIST), and where that was
    written by other people (MNIST) cuts a share `test_fraction` off the writer's training images.
    The other rules test on other people's images of the labels a client trains on.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4, num_groups=4).load()
    >>> ByWriter().split(dataset, seed=0).num_train_examples  # 50 images each, 5 for validation
    array([45, 45, 45, 45])
    """

    test: TestRule = "own_split"
    clients: int | None = None  # Number of writers, drawn at random. None: all of them
    min_samples: int = 1  # Fewest training images of a writer; writers with fewer are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, min_samples=1, clients=1)
        if self.clients is not None:
            self.check_somebody_trains(self.clients)

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """All training images of each chosen writer; their own test images if there are any."""
        source = known_source(dataset, "split by_writer")
        pool = images_of_clients(dataset, self, seed)
        writers = self._writers(source[pool], dataset.name, seed)
        self.check_somebody_trains(len(writers))
        owned = [pool[source[pool] == writer] for writer in writers]
        is_own = self.test == "own_split" and has_own_tests(writers, source[dataset.test_ids])
        return Deal(owned, kinds=source if is_own else None)

    def split(self, dataset: Dataset, seed: int) -> Split:
        """The split, with a writer's own test images where the dataset has them."""
        if self.pool == "all":  # no test part is left
            return super().split(dataset, seed)
        require_classes(dataset)
        deal = self.deal(dataset, seed)
        options = self if deal.kinds is None else replace(self, test="all_of_labels")
        return cut_parts(deal, dataset, options, seed)

    def _writers(self, source: Ids, name: str, seed: int) -> Ids:
        """The writers that become clients, ascending; drawn if `clients` is given."""
        writers, num_images = np.unique(source, return_counts=True)
        eligible = writers[num_images >= self.min_samples]
        num_needed = 1 if self.clients is None else self.clients
        if len(eligible) < num_needed:
            raise ExperimentError(
                f"{name} has {len(eligible)} writers with at least {self.min_samples} training "
                f"images (min_samples), {num_needed} are needed; lower min_samples or clients"
            )
        drawn = generator(seed, "split.writers").permutation(eligible)[: self.clients]
        return np.sort(drawn)


def has_own_tests(writers: Ids, test_source: Ids) -> bool:
    """True if the test part was written by the same people; it must be all of them or nobody.

    Args:
        writers: The writers that are clients.
        test_source: The writer of each test image.

    Raises:
        ExperimentError: Some of the writers have test images and others do not.
    """
    is_tested = np.isin(writers, test_source)
    if is_tested.any() and not is_tested.all():
        raise ExperimentError(
            f"writer {writers[~is_tested][0]} has no images in the test part, {is_tested.sum()} "
            "other writers have; use test: proportional, or prepare the dataset with a test part "
            "for all"
        )
    return bool(is_tested.any())
