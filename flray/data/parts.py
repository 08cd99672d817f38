"""From a deal to a split: the parts of each client are cut and their examples are numbered."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flray.cores import usable_cores
from flray.data.dataset import Dataset, Ids
from flray.data.datasets.synthetic import smooth_images
from flray.data.dealing import consecutive, require_bytes, server_images, whole_share
from flray.data.split import Split
from flray.data.testing import tested_images
from flray.errors import ExperimentError
from flray.randomness import generator

if TYPE_CHECKING:
    from flray.data.splits.options import PartOptions

# (view, rows of dataset.images) -> these images in that view
Render = Callable[[int, Ids], NDArray[np.uint8]]


@dataclass(frozen=True)
class Deal:
    """The images of each of M clients, before they are cut into parts: what a split decides.

    A client may see its images with other labels (`label_maps`), and in other ways than the dataset
    has them (`views`). An image may belong to several clients; it is in the same part for all.

    >>> deal = Deal(owned=[np.array([0, 1]), np.array([2])], groups=np.array([0, 1]))
    >>> [len(images) for images in deal.owned]
    [2, 1]
    """

    owned: list[Ids]  # per client, rows of dataset.images
    groups: Ids | None = None  # (M,) planted ground truth
    label_maps: Ids | None = None  # (M, classes) the dataset's label -> the label the client sees
    kinds: Ids | None = None  # (N,) clients are tested on kinds they train on; None: the labels
    views: Ids | None = None  # (M,) how a client sees its images; 0: as they are in the dataset
    render: Render | None = None  # makes the images of the other views


@dataclass(frozen=True)
class Parts:
    """The parts of each client, as rows of dataset.images: an array per client in each list."""

    train: list[Ids]
    validation: list[Ids]
    test: list[Ids]


def cut_parts(deal: Deal, dataset: Dataset, options: "PartOptions", seed: int) -> Split:
    """The split of a deal.

    Shares of each client's images become its validation and, with `test: own_split`, its test part;
    otherwise test images are found in the dataset's test part. Distinct (view, image, label) are
    the examples of the split.

    Args:
        deal: Who holds which images.
        dataset: The dataset that was dealt.
        options: How parts are cut.
        seed: Seed of the cuts; each cut has a random stream of its own, so that changing one share
            does not move the others.

    Raises:
        ExperimentError: The deal is not one of this dataset's training part; or a client is left
            without training data, or finds no test images in the test part of the dataset. With
            `own_split` a client of one image has no test images.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> from flray.data.splits.options import PartOptions
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()
    >>> deal = Deal([np.arange(50), np.arange(50, 200)])
    >>> split = cut_parts(deal, dataset, PartOptions(test="own_split"), seed=0)
    >>> [[len(part[i]) for part in (split.train, split.validation, split.test)] for i in (0, 1)]
    [[35, 5, 10], [105, 15, 30]]
    """
    _check_deal(deal, dataset)
    _check_nobody_empty(deal.owned, "was dealt no data")
    parts = _cut_owned(deal.owned, len(dataset.labels), options, seed)
    _check_nobody_empty(parts.train, "has no training data left after the cut")
    if options.test != "own_split":
        kinds = dataset.labels if deal.kinds is None else deal.kinds
        trained, images = _count_kinds(parts.train, kinds, dataset.num_train)
        tested = tested_images(options, trained, images, seed)
        parts = Parts(parts.train, parts.validation, tested)
    holdout = generator(seed, "split.holdout").permutation(len(deal.owned))[: options.holdout]
    server = server_images(dataset, options, seed)
    split = _number_examples(deal, dataset, parts, server, np.sort(holdout))
    if options.server and options.server_from == "synthetic":
        return _with_made_server_images(split, dataset, options.server, seed)
    return split


def num_cut(num_images: int, share: float, num_left: int) -> int:
    """How many of `num_images` are cut off, when `num_left` of them are still free to take.

    Rounded down, but at least one where a share is asked for, and never the last free one.

    >>> [num_cut(n, 0.1, n) for n in (1, 2, 19, 20)]
    [0, 1, 1, 2]
    """
    if share == 0:
        return 0
    return min(max(whole_share(num_images, share), 1), max(num_left - 1, 0))


def _cut_owned(owned: list[Ids], num_images: int, options: "PartOptions", seed: int) -> Parts:
    """Cut validation and, with `test: own_split`, test images off what clients were dealt."""
    # Each image is in one part for all its owners, so that where clients share images
    # (label_groups with overlap) nobody trains on what another one validates on.
    tested = np.zeros(num_images, bool)
    if options.test == "own_split":
        order = generator(seed, "split.own_test").permutation(num_images)
        for ids in owned:
            num = num_cut(len(ids), options.test_fraction, len(ids))
            tested[_first(ids, num, order)] = True
    validated = np.zeros(num_images, bool)
    order = generator(seed, "split.validation").permutation(num_images)
    for ids in owned:
        free = ids[~tested[ids]]
        num = num_cut(len(ids), options.validation, len(free))
        validated[_first(free, num, order)] = True
    return Parts(
        train=[ids[~tested[ids] & ~validated[ids]] for ids in owned],
        validation=[ids[validated[ids]] for ids in owned],
        test=[ids[tested[ids]] for ids in owned],
    )


def _first(images: Ids, num: int, order: Ids) -> Ids:
    """The `num` images that come first in a random order of all images."""
    return images[np.argsort(order[images])[:num]]


def _count_kinds(train: list[Ids], kinds: Ids, num_train: int) -> tuple[Ids, list[Ids]]:
    """How often each client trains on each kind, and the test images of each kind."""
    names, kind = np.unique(kinds, return_inverse=True)
    trained = np.stack([np.bincount(kind[ids], minlength=len(names)) for ids in train])  # (M, K)
    images = [num_train + np.flatnonzero(kind[num_train:] == k) for k in range(len(names))]
    return trained, images


def _number_examples(
    deal: Deal, dataset: Dataset, parts: Parts, server: Ids, holdout: Ids
) -> Split:
    """Number the distinct (view, image, label) in order and write every part in these numbers."""
    classes, num_images = dataset.num_classes, len(dataset.labels)
    views = np.zeros(len(deal.owned), np.int64) if deal.views is None else deal.views

    def keys(part: list[Ids]) -> list[Ids]:
        seen = [dataset.labels[ids] for ids in part]
        if deal.label_maps is not None:
            seen = [by_label[s] for by_label, s in zip(deal.label_maps, seen, strict=True)]
        viewed = [view * num_images + ids for view, ids in zip(views, part, strict=True)]
        return [np.sort(v * classes + s) for v, s in zip(viewed, seen, strict=True)]

    train, validation, test = keys(parts.train), keys(parts.validation), keys(parts.test)
    public = server * classes + dataset.labels[server]
    # Sorting, which counts bring, is several times faster than the hashing of np.unique alone.
    table, _ = np.unique(np.concatenate([*train, *validation, *test, public]), return_counts=True)

    def numbered(part: list[Ids]) -> tuple[Ids, ...]:
        examples = np.searchsorted(table, np.concatenate(part))
        return tuple(consecutive(examples, np.array([len(key) for key in part])))

    split = Split(
        image_ids=table // classes,
        labels=table % classes,
        train=numbered(train),
        validation=numbered(validation),
        test=numbered(test),
        groups=deal.groups,
        server=np.searchsorted(table, public),
        holdout=holdout,
    )
    return split if deal.render is None else _with_new_images(split, num_images, deal.render)


def _with_new_images(split: Split, num_images: int, render: Render) -> Split:
    """Make the images of all views but 0, whose ids come in as view * num_images + row."""
    viewed = np.unique(split.image_ids[split.image_ids >= num_images])
    if len(viewed) == 0:
        return split
    view, row = np.divmod(viewed, num_images)
    with ThreadPoolExecutor(usable_cores()) as pool:
        images = list(pool.map(lambda v: render(int(v), row[view == v]), np.unique(view)))
    new_ids = num_images + np.searchsorted(viewed, split.image_ids)
    return replace(
        split,
        image_ids=np.where(split.image_ids < num_images, split.image_ids, new_ids),
        new_images=np.concatenate(images),
        origin=row,
    )


def _with_made_server_images(split: Split, dataset: Dataset, num: int, seed: int) -> Split:
    """Give the server images it makes itself, at the end of all images and examples.

    Their label is 0 and means nothing, and their origin is -1: no image of the dataset.
    """
    require_bytes(dataset, "split.server_from=synthetic")
    made = smooth_images(num, dataset.image_shape, generator(seed, "split.server"))
    images, origin = made, np.full(num, -1)
    if split.new_images is not None and split.origin is not None:
        images = np.concatenate([split.new_images, made])
        origin = np.concatenate([split.origin, origin])
    first = len(dataset.labels) + len(images) - num
    return replace(
        split,
        image_ids=np.concatenate([split.image_ids, first + np.arange(num)]),
        labels=np.concatenate([split.labels, np.zeros(num, np.int64)]),
        server=len(split.labels) + np.arange(num),
        new_images=images,
        origin=origin,
    )


def _check_deal(deal: object, dataset: Dataset) -> None:
    """Refuse a deal, perhaps of a user's own split, that is no deal of the training part."""
    if not isinstance(deal, Deal):
        raise ExperimentError(f"deal must return a Deal(owned), got {type(deal).__name__}")
    for client, ids in enumerate(deal.owned):
        is_whole = isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.ndim == 1
        if not is_whole and len(ids):
            raise ExperimentError(
                f"client {client} was dealt {type(ids).__name__} {np.shape(ids)}; expected a NumPy "
                "array of whole numbers, the rows of its images"
            )
    rows = np.concatenate([*deal.owned, np.empty(0, np.int64)])
    if len(rows) and (rows.min() < 0 or rows.max() >= dataset.num_train):
        raise ExperimentError(
            f"clients were dealt the rows {int(rows.min())} to {int(rows.max())}; expected rows of "
            f"the training part, 0 to {dataset.num_train - 1} (dataset.train_ids)"
        )
    for name in ("groups", "label_maps", "views"):
        values = getattr(deal, name)
        if values is not None and len(values) != len(deal.owned):
            raise ExperimentError(
                f"{name} of a deal must have a row for each of {len(deal.owned)} clients, got "
                f"{len(values)}"
            )


def _check_nobody_empty(images: list[Ids], complaint: str) -> None:
    """Refuse a deal in which a client has no images."""
    empty = [client for client, ids in enumerate(images) if len(ids) == 0]
    if empty:
        raise ExperimentError(
            f"client {empty[0]} {complaint} ({len(empty)} of {len(images)} clients); "
            f"lower clients, or deal more samples to each"
        )
