"""Clients that see their images through pipelines of their own, with or without label skew (REPA's
CIFAR-10). Its lists and sizes are in an appendix we do not have: those here are ours."""

from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import (
    images_by_label,
    images_to_deal,
    largest_remainder,
    require_bytes,
)
from flray.data.parts import Deal, Render
from flray.data.pipelines import NEED_COLOUR, PIPELINES, Pipeline, apply_pipeline
from flray.data.splits.options import SplitOptions
from flray.data.splits.pathological import balanced_label_sets
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_above_zero, require_at_least, require_share

Form = Literal["shared", "own"]
Labels = Literal["iid", "skew", "dirichlet"]
_COLOURS = 3
_SHARES = 1_000_000  # what a share of 1 is in whole numbers


@dataclass(frozen=True)
class ImageShift(SplitOptions):
    """Clients see their images, test images too, through pipelines such as blur or invert.

    `form: shared` gives client i pipeline i mod their number, which is its planted group. `own`
    gives each client an ordered pair of different pipelines, drawn without repetition while they
    last (90 of the ten), and has no planted groups.

    `labels: skew` gives each client `major_classes` that make up `major_share` of its images, every
    class to as many clients; `dirichlet` draws a client's shares from Dir(alpha). Skew alone is
    `form: shared, pipelines: [identity]`.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> shift = ImageShift(clients=4, form="shared", pipelines=("identity", "invert"),
    ...                    samples_per_client=20)
    >>> split = shift.split(dataset, seed=0)
    >>> split.groups, split.num_train_examples  # 20 each, 5 for validation
    (array([0, 1, 0, 1]), array([15, 15, 15, 15]))
    """

    validation: float = 0.25
    # Pipelines of a client. shared: one per planted group; own: an ordered pair of two
    form: Form = "own"
    # Image pipelines to choose from; grayscale and hue need coloured images
    pipelines: tuple[Pipeline, ...] = PIPELINES
    # Labels per client. iid: as in the dataset; skew: `major_classes` dominate; dirichlet:
    # Dir(`alpha`)
    labels: Labels = "skew"
    samples_per_client: int = 400  # Images per client, 100 of 400 for validation by default
    major_classes: int = 3  # Number of dominant classes per client, with labels: skew
    # Share of a client's images that are of its dominant classes, with labels: skew
    major_share: float = 0.8
    alpha: float = 0.3  # Concentration α of a client's label shares, with labels: dirichlet
    # Number of draws, if one needs more images of a class than there are, before the split is
    # refused
    max_tries: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, samples_per_client=1, major_classes=1, max_tries=1)
        require_share(self, "major_share")
        require_above_zero(self, "alpha")
        least = {"shared": 1, "own": 2}[self.form]
        if len(set(self.pipelines)) < max(least, len(self.pipelines)):
            raise ValueError(
                f"form {self.form} needs at least {least} pipelines, all different; "
                f"got {list(self.pipelines)}"
            )

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """The images of each client, and the view in which it sees them."""
        _check_colours(self.pipelines, dataset)
        require_bytes(dataset, "split image_shift")
        owned = self._deal(images_to_deal(dataset, self, seed), dataset, seed)
        is_planted = self.form == "shared" and len(self.pipelines) > 1
        return Deal(
            owned,
            groups=np.arange(self.clients) % len(self.pipelines) if is_planted else None,
            views=self._views(seed),
            render=_renderer(dataset, seed),
        )

    def _views(self, seed: int) -> Ids:
        """A view is (second pipeline) * 10 + (first pipeline), pipeline 0 being the identity."""
        numbers = [PIPELINES.index(name) for name in self.pipelines]
        if self.form == "shared":
            choices = np.array(numbers)
        else:
            pairs = [second * len(PIPELINES) + first for first, second in permutations(numbers, 2)]
            choices = generator(seed, "split.pipelines").permutation(pairs)
        return np.resize(choices, self.clients)

    def _deal(self, pool: Ids, dataset: Dataset, seed: int) -> list[Ids]:
        """The images of each client by the rule `labels`, drawn again where a class runs out."""
        num, classes = self.samples_per_client, dataset.num_classes
        if num * self.clients > len(pool):
            raise ExperimentError(
                f"samples_per_client {num} needs {num * self.clients} images for {self.clients} "
                f"clients, there are {len(pool)}; lower samples_per_client or clients"
            )
        if self.labels == "iid":
            shuffled = generator(seed, "split.deal").permutation(pool)
            return list(shuffled[: num * self.clients].reshape(self.clients, num))
        by_label = images_by_label(dataset, pool)
        available = np.array([len(images) for images in by_label])
        for attempt in range(self.max_tries):
            rng = generator(seed, "split.deal", attempt)
            counts = self._draw_counts(classes, rng)
            if (counts.sum(axis=0) <= available).all():
                return deal_counts(by_label, counts, rng)
        raise ExperimentError(
            f"each of {self.max_tries} draws (max_tries) with labels: {self.labels} needs more "
            f"images of a class than the {available.min()} to {available.max()} there are; "
            f"lower samples_per_client ({num}) or clients ({self.clients})"
        )

    def _draw_counts(self, num_classes: int, rng: np.random.Generator) -> Ids:
        """(clients, classes) how many images of each class each client is dealt."""
        num = self.samples_per_client
        if self.labels == "dirichlet":
            p = rng.dirichlet(np.full(num_classes, self.alpha), self.clients)
            shares = np.rint(p * _SHARES).astype(np.int64)
            return np.stack([largest_remainder(num, row) for row in shares])
        if self.major_classes > num_classes:
            raise ExperimentError(
                f"major_classes must be at most the {num_classes} classes, got {self.major_classes}"
            )
        major = balanced_label_sets(self.clients, self.major_classes, num_classes, rng)
        return np.stack([skewed_counts(num, row, self.major_share, rng) for row in major])


def skewed_counts(num: int, is_major: Ids, major_share: float, rng: np.random.Generator) -> Ids:
    """Counts that sum to `num`: the major classes share `major_share` of it, the others the rest.

    >>> skewed_counts(20, np.array([1, 0, 0]), 0.8, np.random.default_rng(0)).tolist()
    [16, 2, 2]
    """
    order = rng.permutation(len(is_major))  # otherwise the first classes would win every rounding
    first = is_major[order]
    num_major = num if first.all() else round(num * major_share)
    counts = np.empty_like(is_major)
    counts[order[first == 1]] = largest_remainder(num_major, first[first == 1])
    counts[order[first == 0]] = largest_remainder(num - num_major, 1 - first[first == 0])
    return counts


def deal_counts(by_label: list[Ids], counts: Ids, rng: np.random.Generator) -> list[Ids]:
    """Deal every client its count of each label; images that are left over go to nobody.

    Args:
        by_label: The images of each label.
        counts: (clients, labels), whose columns sum to at most the images of the label.
        rng: Shuffles the images of one label after the other.

    >>> rng = np.random.default_rng(0)
    >>> hands = deal_counts([np.arange(5), np.arange(5, 9)], np.array([[2, 1], [3, 0]]), rng)
    >>> [len(hand) for hand in hands]
    [3, 3]
    """
    slices = [
        np.split(rng.permutation(images), np.cumsum(column))[: len(counts)]
        for images, column in zip(by_label, counts.T, strict=True)
    ]
    return [np.concatenate(hand) for hand in zip(*slices, strict=True)]


def _renderer(dataset: Dataset, seed: int) -> Render:
    """The function that applies the first and then the second pipeline of a view."""

    def render(view: int, rows: Ids) -> NDArray[np.uint8]:
        second, first = divmod(view, len(PIPELINES))
        images = apply_pipeline(PIPELINES[first], dataset.images[rows], rows, seed)
        return apply_pipeline(PIPELINES[second], images, rows, seed)

    return render


def _check_colours(pipelines: tuple[Pipeline, ...], dataset: Dataset) -> None:
    """Refuse pipelines that need colours for images without."""
    colourful = [name for name in pipelines if name in NEED_COLOUR]
    channels = dataset.image_shape[0]
    if colourful and channels != _COLOURS:
        rest = [name for name in pipelines if name not in NEED_COLOUR]
        raise ExperimentError(
            f"pipelines {', '.join(colourful)} need images with {_COLOURS} channels, those of "
            f"{dataset.name} have {channels}; say split.pipelines=[{', '.join(rest)}]"
        )
