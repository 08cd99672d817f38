"""A split: which client holds which examples, for training, validation and test."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.errors import ExperimentError

Part = Literal["test", "validation", "global"]  # what a client's model is judged on


@dataclass(frozen=True)
class Split:
    """R examples and the clients that hold them, for training, validation and test.

    Splits of the registry return one from `split(dataset, seed)`. An example is an image together
    with the label its owner sees, so that two clients may disagree about one image (`label_swap`).
    Clients are numbered 0..M-1. A client's parts are ascending ids of examples and do not overlap.
    Images are those of the dataset, followed by those the split made out of them (`rotation`,
    `image_shift`) and those that the server made from random numbers (`server_from: synthetic`).

    >>> nothing = np.empty(0, np.int64)
    >>> split = Split(
    ...     image_ids=np.array([7, 8, 9, 7]),
    ...     labels=np.array([0, 1, 0, 1]),  # client 1 sees image 7 with another label
    ...     train=(np.array([0, 1]), np.array([3])),
    ...     validation=(nothing, nothing),
    ...     test=(np.array([2]), np.array([2])),
    ... )
    >>> split.clients, split.num_train_examples
    (array([0, 1]), array([2, 1]))
    >>> split.label_counts(np.array([0, 1])).tolist()
    [[1, 1], [0, 1]]
    """

    image_ids: Ids  # (R,) example -> row of dataset.images, then of new_images
    labels: Ids  # (R,) example -> label
    train: tuple[Ids, ...]  # by client: its examples, ascending
    validation: tuple[Ids, ...]  # by client
    test: tuple[Ids, ...]  # by client; clients may share test examples
    groups: Ids | None = None  # (M,) planted ground truth, read by data/ and scores only
    knows_groups: bool = False  # groups are attributes that a server knows, such as a device
    client_names: tuple[str, ...] = ()  # (M,) as the data name the owners; (): they have no names
    # The server's public examples; no client trains on one.
    server: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    holdout: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # clients that never train
    new_images: NDArray[np.uint8] | None = None  # (K, channels, height, width)
    # (K,) the row of dataset.images each new image was made from; -1: it was made from none.
    origin: Ids | None = None
    # Clients that are not there: they keep their data, and neither train nor are evaluated.
    absent: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    # All test images of the dataset, as they are and with its own labels; `with_global_test`.
    global_test: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    num_global_only: int = 0  # examples at the end of the table that are in global_test alone
    # Training examples of clients made up to resemble others, with ids from M on
    similar: tuple[Ids, ...] = ()

    @property
    def has_classes(self) -> bool:
        """True if an example has one label; False for numbers and sequences."""
        return self.labels.ndim == 1 and self.labels.dtype.kind == "i"

    @property
    def num_clients(self) -> int:
        """M, holdout and absent clients included."""
        return len(self.train)

    @cached_property
    def clients(self) -> Ids:
        """The clients that may train: all but the holdout and the absent clients."""
        away = np.concatenate([self.holdout, self.absent])
        return np.setdiff1d(np.arange(self.num_clients), away)

    @cached_property
    def num_train_examples(self) -> Ids:
        """(M,) n_k, the number of training examples of each client."""
        return np.array([len(ids) for ids in self.train], dtype=np.int64)

    @property
    def trained_rows(self) -> Ids:
        """Rows of images that clients train on, ascending; holdout clients never train."""
        return np.unique(self.image_ids[np.concatenate([self.train[i] for i in self.clients])])

    def trained_on(self, client: int) -> Ids:
        """The training examples of a client, or of one that was made up to resemble a client.

        Made-up clients have ids from M on; measures of robustness ask for them.
        """
        if client < self.num_clients:
            return self.train[client]
        return self.similar[client - self.num_clients]

    @property
    def num_dealt(self) -> int:
        """The examples that clients or the server hold; those of the global test set come last."""
        return len(self.image_ids) - self.num_global_only

    def label_counts(self, clients: Ids) -> Ids:
        """(K, labels) how many training examples of each label each of the clients holds.

        Labels are those that clients see, 0 to the largest that anybody holds. Refuses data without
        classes.
        """
        self.require_classes("this method", "choose an option that does without")
        num_labels = int(self.labels[: self.num_dealt].max()) + 1
        labels = (self.labels[self.train[i]] for i in clients)
        return np.stack([np.bincount(row, minlength=num_labels) for row in labels])

    def require_classes(self, reader: str, remedy: str) -> None:
        """Refuse data without classes, whose labels `reader` counts."""
        if not self.has_classes:
            raise ExperimentError(
                f"{reader} counts the labels of clients, and the targets are numbers or "
                f"sequences; {remedy}"
            )

    @cached_property
    def has_label_groups(self) -> bool:
        """True if the sets of labels that clients hold tell them apart.

        That is so where a client that may train holds less than half of the labels of another
        (FLIS, Fig. 3), and not where all hold the same set, or lack a label by chance.
        """
        if not self.has_classes:
            return False
        sets = np.unique(self.label_counts(self.clients) > 0, axis=0)  # (sets, labels)
        sets = sets[sets.any(1)]
        return any(bool((2 * (sets & one).sum(1) < one.sum()).any()) for one in sets)

    def part_of(self, client: int, part: Part) -> Ids:
        """The examples that a client's model is judged on: its own, or the global test set."""
        if part == "global":
            return self.global_test
        return self.test[client] if part == "test" else self.validation[client]

    def original_rows(self, num_images: int) -> Ids:
        """(R,) the row of dataset.images that each example was made from; -1: from none.

        Args:
            num_images: number of images in the dataset.
        """
        if self.origin is None:
            return self.image_ids
        return np.concatenate([np.arange(num_images), self.origin])[self.image_ids]

    def digest(self) -> str:
        """A hash of who holds what: equal splits have equal digests on every machine.

        The global test set follows from the dataset and is left out, as are similar clients.
        """
        num = self.num_dealt
        parts = [self.image_ids[:num], self.labels[:num], self.server, self.holdout]
        parts += [np.empty(0, np.int64) if self.groups is None else self.groups]
        sha = hashlib.sha256()
        for array in parts:
            _add_to_hash(sha, array)
        for part in (self.train, self.validation, self.test):
            sizes = np.array([len(ids) for ids in part])
            _add_to_hash(sha, sizes)
            # Each client's number of examples, then the examples.
            values = np.insert(np.concatenate(part), np.cumsum(sizes) - sizes, sizes)
            sha.update(values.astype("<i8").tobytes())
        for name, optional in (("absent", self.absent), ("origin", self.origin)):
            if optional is not None and len(optional):
                sha.update(name.encode())
                _add_to_hash(sha, optional)
        if self.new_images is not None:
            sha.update(b"new_images" + np.array(self.new_images.shape, dtype="<i8").tobytes())
            sha.update(np.ascontiguousarray(self.new_images).tobytes())
        return sha.hexdigest()


def _add_to_hash(sha: "hashlib._Hash", array: Ids) -> None:
    """Add the length and the values, in the same bytes on every machine."""
    sha.update(np.int64(array.size).tobytes())
    kind = "<f4" if array.dtype.kind == "f" else "<i8"
    sha.update(np.ascontiguousarray(array, dtype=kind).tobytes())
