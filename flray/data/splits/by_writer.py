"""Each client is one writer (Caldas et al. 2018, "LEAF", arXiv 1812.01097): the natural split."""

from dataclasses import dataclass, replace

import numpy as np

from flray.data.checks import check_at_least
from flray.data.dataset import Dataset, Ids
from flray.data.dealing import images_of_clients, known_source
from flray.data.options import PartOptions, TestRule
from flray.data.parts import Deal, cut_parts
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.randomness import generator


@dataclass(frozen=True)
class ByWriter(PartOptions):
    """Clients in the order of their writers' numbers.

    `own_split` takes a writer's own images of the dataset's test part (FEMNIST), and where that was
    written by other people (MNIST) cuts a share `test_fraction` off the writer's training images.
    The other rules test on other people's images of the labels a client trains on.
    """

    test: TestRule = "own_split"
    clients: int | None = None  # Number of writers, drawn at random. None: all of them
    min_samples: int = 1  # Fewest training images of a writer; writers with fewer are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "min_samples", "clients")
        if self.clients is not None:
            self.check_somebody_trains(self.clients)

    def split(self, dataset: Dataset, seed: int) -> Split:
        source = known_source(dataset, "split by_writer")
        pool = images_of_clients(dataset, self, seed)
        writers = self._writers(source[pool], dataset.name, seed)
        self.check_somebody_trains(len(writers))
        owned = [pool[source[pool] == writer] for writer in writers]
        if self.test != "own_split" or not tested_themselves(writers, source[dataset.test_ids]):
            return cut_parts(Deal(owned), dataset, self, seed)
        rule = replace(self, test="all_of_labels")
        return cut_parts(Deal(owned, kinds=source), dataset, rule, seed)

    def _writers(self, source: Ids, name: str, seed: int) -> Ids:
        writers, num_images = np.unique(source, return_counts=True)
        eligible = writers[num_images >= self.min_samples]
        wanted = 1 if self.clients is None else self.clients
        if len(eligible) < wanted:
            raise ExperimentError(
                f"{name} has {len(eligible)} writers with at least {self.min_samples} training "
                f"images (min_samples), {wanted} are needed; lower min_samples or clients"
            )
        drawn = generator(seed, "split.writers").permutation(eligible)[: self.clients]
        return np.sort(drawn)


def tested_themselves(writers: Ids, test_source: Ids) -> bool:
    """Whether the test part was written by the same people; it must be all of them or nobody."""
    there = np.isin(writers, test_source)
    if there.any() and not there.all():
        raise ExperimentError(
            f"writer {writers[~there][0]} has no images in the test part, {there.sum()} other "
            f"writers have; use test: proportional, or prepare the dataset with a test part for all"
        )
    return bool(there.any())
