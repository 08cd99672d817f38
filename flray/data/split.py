"""A split: which client holds which examples, for training, validation and test."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from flray.data.dataset import Ids


@dataclass(frozen=True)
class Split:
    """Examples and their owners.

    An example is an image of the dataset together with the label its owner sees, so that two
    clients may disagree about one image (`label_swap`). Clients are numbered 0..M-1.
    """

    image_ids: Ids  # (R,) example -> row of dataset.images
    labels: Ids  # (R,) example -> label
    train: tuple[Ids, ...]  # a client's examples, ascending
    validation: tuple[Ids, ...]
    test: tuple[Ids, ...]
    groups: Ids | None = None  # (M,) planted ground truth, read by data/ and scores only
    server: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # examples no client holds
    holdout: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # clients that never train

    @property
    def num_clients(self) -> int:
        return len(self.train)

    @property
    def clients(self) -> Ids:
        """The clients that may train: all but the holdout clients."""
        return np.setdiff1d(np.arange(self.num_clients), self.holdout)

    @property
    def num_train_examples(self) -> Ids:
        return np.array([len(ids) for ids in self.train], dtype=np.int64)  # (M,)

    def digest(self) -> str:
        """A hash of everything above: equal splits have equal digests on every machine."""
        parts = [self.image_ids, self.labels, self.server, self.holdout]
        parts += [np.empty(0, np.int64) if self.groups is None else self.groups]
        for part in (self.train, self.validation, self.test):
            parts += [np.array([len(ids) for ids in part]), *part]
        sha = hashlib.sha256()
        for array in parts:
            sha.update(np.int64(array.size).tobytes())
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.hexdigest()
