"""FEMNIST: handwritten characters by writer, from the JSON files of LEAF (Caldas et al., "LEAF: A
Benchmark for Federated Settings", 2018, arXiv 1812.01097)."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Dataset, Ids
from flray.data.datasets.folder import LabelledImages, data_folder, join_rows, not_found, reading
from flray.data.options import PixelOptions, measured
from flray.errors import ExperimentError
from flray.values import require_at_least

_CLASSES, _SIZE = 62, 28


@dataclass(frozen=True)
class Femnist(PixelOptions):
    """Handwritten digits and letters of 62 classes; the source of an image is its writer.

    Reads femnist/train/*.json and femnist/test/*.json below FLRAY_DATA. Writers are numbered in the
    order of the files. Pixels are kept as LEAF has them: paper is 1 and ink 0, where MNIST and
    EMNIST have ink 1.
    """

    # Read only this many files of train and of test, the first ones. None: all; FLT: 2
    shards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, shards=1)

    def load(self) -> Dataset:
        train, test = self._writers("train"), self._writers("test")
        numbers = {name: i for i, name in enumerate(dict.fromkeys(w.name for w in train + test))}
        rows = [
            LabelledImages(
                np.concatenate([writer.images for writer in part]),
                np.concatenate([writer.labels for writer in part]),
            )
            for part in (train, test)
        ]
        source = [np.full(len(writer.labels), numbers[writer.name]) for writer in train + test]
        dataset = join_rows("femnist", rows, _CLASSES, self, measured(rows[0].images))
        return replace(dataset, source=np.concatenate(source))

    def _writers(self, part: str) -> list["_Writer"]:
        """The writers of all files of a part, train or test."""
        files = sorted((data_folder() / "femnist" / part).glob("*.json"), key=_natural)
        if not files:
            raise not_found(
                "femnist",
                "femnist/train/*.json and femnist/test/*.json",
                ", which LEAF's `preprocess.sh -s niid -t sample` writes",
            )
        return [writer for file in files[: self.shards] for writer in _read(file)]


@dataclass(frozen=True)
class _Writer:
    """The images of one person in one part."""

    name: str
    images: NDArray[np.uint8]  # (n, 28, 28)
    labels: Ids  # (n,)


def _natural(file: Path) -> list[tuple[str, int]]:
    """A key to sort by in which `all_data_2` comes before `all_data_10`.

    >>> _natural(Path("all_data_10.json"))[:1]
    [('all_data_', 10)]
    """
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", file.name)]


def _read(file: Path) -> list[_Writer]:
    with reading("femnist", file):
        content = json.loads(file.read_text())
        return [_writer(name, content["user_data"][name], file) for name in content["users"]]


def _writer(name: str, data: dict[str, list[Any]], file: Path) -> _Writer:  # Any: JSON
    pixels = np.array(data["x"], dtype=np.float64).reshape(-1, _SIZE, _SIZE)
    labels = np.array(data["y"], dtype=np.int64)
    if len(pixels) != len(labels):
        raise ExperimentError(
            f"dataset femnist: writer {name} has {len(pixels)} images and {len(labels)} labels "
            f"in {file}; preprocess LEAF's data again"
        )
    return _Writer(name, np.rint(pixels * 255).astype(np.uint8), labels)
