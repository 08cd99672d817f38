"""Dealing images: the pieces that several splits and test rules share."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.errors import ExperimentError
from flray.randomness import generator

if TYPE_CHECKING:
    from flray.data.splits.options import PartOptions, SplitOptions


def largest_remainder(total: int, weights: Ids) -> Ids:
    """Whole shares of `total` in proportion to `weights`; equal remainders go to the first.

    >>> largest_remainder(7, np.array([2, 1, 1])).tolist()  # 3.5, 1.75, 1.75
    [3, 2, 2]
    """
    scaled, whole = total * weights, weights.sum()
    shares: Ids = scaled // whole
    by_remainder = np.argsort(-(scaled % whole), kind="stable")
    shares[by_remainder[: total - shares.sum()]] += 1
    return shares


def whole_share(total: int, share: float) -> int:
    """The share of `total`, rounded down; an error of floating point does not cost a whole one.

    >>> int(0.29 * 100), whole_share(100, 0.29)
    (28, 29)
    """
    return math.floor(round(total * share, 9))


def server_images(dataset: Dataset, options: "PartOptions", seed: int) -> Ids:
    """(n,) rows of the images for the server, ascending, equally many of each class.

    Empty if the server makes its own images (`server_from: synthetic`).
    """
    if options.server_from == "synthetic":
        return np.empty(0, np.int64)
    sizes = largest_remainder(options.server, np.ones(dataset.num_classes, np.int64))
    is_train = options.server_from == "train"
    pool = dataset.train_ids if is_train else dataset.test_ids
    drawn = []
    for label, (num, images) in enumerate(zip(sizes, images_by_label(dataset, pool), strict=True)):
        if num > len(images):
            raise ExperimentError(
                f"server {options.server} needs {num} {options.server_from} images of class "
                f"{label}, {dataset.name} has {len(images)}; lower server"
            )
        if is_train:
            drawn.append(generator(seed, "split.server", label).permutation(images)[:num])
        else:
            drawn.append(images[len(images) - num :])
    return np.sort(np.concatenate(drawn))


def require_classes(dataset: Dataset) -> None:
    """Refuse data without classes, by which images are dealt and test parts are chosen."""
    if not dataset.has_classes:
        raise ExperimentError(
            f"this split deals examples by their classes, and the targets of {dataset.name} are "
            f"{'sequences' if dataset.num_classes else 'numbers'}: set split: natural"
        )


def images_of_clients(dataset: Dataset, options: "PartOptions", seed: int) -> Ids:
    """Rows of the training images that clients may hold: all but the server's."""
    server = server_images(dataset, options, seed)
    return np.setdiff1d(dataset.train_ids, server, assume_unique=True)  # both have no row twice


def images_to_deal(dataset: Dataset, options: "SplitOptions", seed: int) -> Ids:
    """As `images_of_clients`, for a known number of clients that must each get some.

    Raises:
        ExperimentError: There are fewer images than clients.
    """
    pool = images_of_clients(dataset, options, seed)
    if len(pool) < options.clients:
        raise ExperimentError(
            f"clients must not outnumber the images: got {options.clients} clients for {len(pool)} "
            f"training images of {dataset.name} (server keeps {options.server}); lower clients"
        )
    return pool


def known_source(dataset: Dataset, asker: str) -> Ids:
    """(N,) the source of each image; refuses a dataset that does not know it.

    Args:
        asker: What needs the sources, as the message names it.
    """
    if dataset.source is None:
        raise ExperimentError(
            f"{asker} needs a dataset that knows the source of each example, and {dataset.name} "
            "does not; table, series, arrays, text, femnist, mnist_writers and synthetic with "
            "num_groups > 1 do, and in Python dataset=(x, y) with clients="
        )
    return dataset.source


def deal_evenly(images: Ids, num_clients: int, rng: np.random.Generator) -> list[Ids]:
    """Shuffle and deal; sizes differ by at most one.

    >>> [len(part) for part in deal_evenly(np.arange(8), 3, np.random.default_rng(0))]
    [3, 3, 2]
    """
    return np.array_split(rng.permutation(images), num_clients)


def images_by_label(dataset: Dataset, pool: Ids) -> list[Ids]:
    """The images of the pool, an array for each label of the dataset, in the order of the pool.

    Labels without images have empty arrays.
    """
    return [pool[dataset.labels[pool] == label] for label in range(dataset.num_classes)]


def require_bytes(dataset: Dataset, what: str) -> None:
    """Refuse a dataset of other pixels than bytes for `what`, which makes images from 0 to 255."""
    if dataset.images.dtype != np.uint8:
        raise ExperimentError(
            f"{what} needs images of bytes, 0 to 255, and those of {dataset.name} are "
            f"{dataset.images.dtype}; give them as uint8"
        )


def deal_label(images: Ids, num_clients: int, label: int, rng: np.random.Generator) -> list[Ids]:
    """As `deal_evenly`, for clients that must each get some of the label.

    Raises:
        ExperimentError: There are fewer images than clients; the message names the label.
    """
    if not len(images):
        raise ExperimentError(
            f"label {label} has no training images, and some clients should hold it; number the "
            "labels of the dataset without gaps, or choose split iid or dirichlet"
        )
    if len(images) < num_clients:
        raise ExperimentError(
            f"label {label} has {len(images)} training images for the {num_clients} clients that "
            f"should hold it; lower clients"
        )
    return deal_evenly(images, num_clients, rng)


def deal_labels(
    by_label: list[Ids], num_clients: int, holders: Iterable[tuple[Ids, np.random.Generator]]
) -> list[Ids]:
    """Deal the images of each label evenly to the clients that hold it.

    Args:
        holders: per label, its clients in the order in which they are dealt to, and the generator
            of the shuffle. Labels are dealt one after another, so labels may share a generator.

    >>> rng = np.random.default_rng(0)
    >>> hands = deal_labels([np.arange(4)], 3, [(np.array([0, 2]), rng)])
    >>> [len(hand) for hand in hands]
    [2, 0, 2]
    """
    pieces: list[tuple[int, Ids]] = []
    for label, (images, (clients, rng)) in enumerate(zip(by_label, holders, strict=True)):
        if len(clients):
            slices = deal_label(images, len(clients), label, rng)
            pieces += zip(clients.tolist(), slices, strict=True)
    return gather_pieces(num_clients, pieces)


def gather_pieces(num_clients: int, pieces: Iterable[tuple[int, Ids]]) -> list[Ids]:
    """All images of each client from (client, images), in the order of the pieces.

    >>> gather_pieces(2, [(1, np.array([7])), (1, np.array([3]))])[1].tolist()
    [7, 3]
    """
    clients, images = zip(*pieces, strict=True)
    holders = np.repeat(np.array(clients, np.int64), [len(ids) for ids in images])
    return hands_of(num_clients, holders, np.concatenate(images))


def hands_of(num_clients: int, holders: Ids, images: Ids) -> list[Ids]:
    """The images of each client in the order given; holders[n] is the client that gets images[n].

    >>> [hand.tolist() for hand in hands_of(3, np.array([2, 0, 2]), np.array([7, 8, 3]))]
    [[8], [], [7, 3]]
    """
    order = np.argsort(holders, kind="stable")
    return consecutive(images[order], np.bincount(holders, minlength=num_clients))


def consecutive(values: Ids, sizes: Ids) -> list[Ids]:
    """The values cut into pieces of these sizes, one after another.

    >>> [piece.tolist() for piece in consecutive(np.arange(3), np.array([1, 0, 2]))]
    [[0], [], [1, 2]]
    """
    ends = np.cumsum(sizes)
    bounds = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    return [values[start:end] for start, end in bounds]


def consecutive_groups(num_clients: int, num_groups: int) -> Ids:
    """The group of each client: the first clients are group 0, sizes differ by at most one.

    >>> consecutive_groups(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    if not 1 <= num_groups <= num_clients:
        raise ExperimentError(
            f"groups must be between 1 and clients ({num_clients}), got {num_groups}"
        )
    sizes = largest_remainder(num_clients, np.ones(num_groups, np.int64))
    return np.repeat(np.arange(num_groups), sizes)
