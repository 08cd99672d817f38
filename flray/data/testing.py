"""Which images of the dataset's test part each client is tested on.

A client is tested on images of the kinds it trains on. The kind of an image is its label unless the
split says otherwise (`iid` by source: label and source; `by_writer`: the writer). `trained[client,
kind]` counts a client's training images; `images[kind]` are the test images of that kind.
"""

from typing import TYPE_CHECKING

import numpy as np

from flray.data.dataset import Ids
from flray.data.dealing import hands_of, largest_remainder
from flray.errors import ExperimentError
from flray.randomness import generator

if TYPE_CHECKING:
    from flray.data.splits.options import PartOptions


def tested_images(options: "PartOptions", trained: Ids, images: list[Ids], seed: int) -> list[Ids]:
    """The test images of each client, by the rule `options.test` names.

    Args:
        options: The rule, and the size of samples.
        trained: (M, kinds) training images of each client and kind.
        images: The test images of each kind.
        seed: Seed of the split.

    Raises:
        ExperimentError: A client would have none.
    """
    available = np.array([len(ids) for ids in images])
    for client, row in enumerate(trained):
        if not available[row > 0].any():
            raise ExperimentError(
                f"client {client} would have no test data: the dataset has no test examples of the "
                "labels it trains on; set split.test=own_split, which takes split.test_fraction of "
                "each client's own data, or give the dataset a test part"
            )
    if options.test == "all_of_labels":
        return [np.concatenate([images[kind] for kind in np.flatnonzero(row)]) for row in trained]
    if options.test_size is None:
        return proportional_slices(trained, images, seed)
    return [
        proportional_sample(options.test_size, row, images, generator(seed, "split.test", client))
        for client, row in enumerate(trained)
    ]


def proportional_slices(trained: Ids, images: list[Ids], seed: int) -> list[Ids]:
    """Divide the images of each kind among the clients that train on it, by training counts.

    Slices are disjoint, and every image of a kind somebody trains on is given out. A client that
    rounding leaves with nothing shares one image of the kind it trains on most.

    >>> trained = np.array([[10, 0], [30, 5]])  # client 0 trains on kind 0 only
    >>> slices = proportional_slices(trained, [np.arange(8), np.arange(8, 12)], seed=0)
    >>> [len(ids) for ids in slices]
    [2, 10]
    """
    holders, given = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for kind, ids in enumerate(images):
        if not trained[:, kind].any():
            continue
        rng = generator(seed, "split.test", kind)
        order = rng.permutation(len(trained))  # else the first clients would win every rounding
        sizes = largest_remainder(len(ids), trained[order, kind])
        holders.append(np.repeat(order, sizes))
        given.append(rng.permutation(ids))
    tested = hands_of(len(trained), np.concatenate(holders), np.concatenate(given))
    for client, ids in enumerate(tested):
        if len(ids) == 0:
            rng = generator(seed, "split.test.one", client)
            tested[client] = _one_image(trained[client], images, rng)
    return tested


def proportional_sample(
    size: int, trained: Ids, images: list[Ids], rng: np.random.Generator
) -> Ids:
    """`size` different images in the proportions of one client's training counts.

    Args:
        trained: (kinds,) the client's training images of each kind.
        images: The test images of each kind.
        rng: Shuffles one kind after the other.

    Raises:
        ExperimentError: A kind has too few test images.

    >>> images = [np.array([10, 11]), np.array([20, 21, 22])]
    >>> sample = proportional_sample(4, np.array([30, 90]), images, np.random.default_rng(0))
    >>> sorted(int(i) // 10 for i in sample)
    [1, 2, 2, 2]
    """
    sizes = largest_remainder(size, trained)
    for kind, num in enumerate(sizes):
        if num > len(images[kind]):
            raise ExperimentError(
                f"test_size {size} needs {num} test images of one label, "
                f"there are {len(images[kind])}; lower test_size"
            )
    drawn = [rng.permutation(ids)[:num] for ids, num in zip(images, sizes, strict=True)]
    return np.concatenate(drawn)


def _one_image(trained: Ids, images: list[Ids], rng: np.random.Generator) -> Ids:
    """An image of the kind that the client trains on most, of those with test images."""
    is_available = np.array([len(ids) > 0 for ids in images])
    most = int(np.argmax(np.where(is_available, trained, 0)))
    return rng.choice(images[most], 1)
