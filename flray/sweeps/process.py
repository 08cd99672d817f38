"""What rows that run in the same process share: datasets, splits and the host that trains."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from flray.config.experiment import parse_experiment
from flray.data.dataset import Dataset
from flray.data.split import Split
from flray.execution.executor import Inline
from flray.runs.assemble import start_executor
from flray.runs.preparing import Prepared, deal, load_dataset, prepare
from flray.sweeps.keys import canonical

MOST_KEPT = 3  # datasets, and splits: one for each seed of most spaces

Kept = TypeVar("Kept")

_DATASETS: dict[str, Dataset] = {}
_SPLITS: dict[str, Split] = {}  # images that a split has made take up to 600 MB
_LAST_HOST: dict[str, Inline] = {}  # at most one, by the text of its experiment


@lru_cache(maxsize=2)
def prepared(text: str) -> Prepared:
    """Data and module of an experiment, which the next rows of the process mostly have too.

    Rows with another model or other training share its data, those with another seed its dataset.

    Args:
        text: The experiment as `canonical` writes it.
    """
    plain = json.loads(text)
    experiment = parse_experiment(plain)
    dataset = _kept(_DATASETS, canonical(plain["dataset"]), lambda: load_dataset(experiment))
    key = canonical([plain[part] for part in ("dataset", "split", "seed")])
    split = _kept(_SPLITS, key, lambda: deal(experiment, dataset))
    return prepare(experiment, dealt=(dataset, split))


def _kept(values: dict[str, Kept], key: str, make: Callable[[], Kept]) -> Kept:
    """The value with this key, made if it is not among the last few."""
    if key not in values:
        while len(values) >= MOST_KEPT:
            del values[next(iter(values))]  # first, because there may be no room for more
        values[key] = make()
    return values[key]


def host_of(text: str) -> Inline:
    """The host of an experiment in this process: data on its device, layers traced, steps recorded.

    Kept for the next rows, which mostly ask for it again. It trains a copy of the module.

    Args:
        text: The experiment as `canonical` writes it.
    """
    if text not in _LAST_HOST:
        _LAST_HOST.clear()  # first, because the memory of a GPU may not have room for two
        parts = prepared(text)
        module = copy.deepcopy(parts.payload.module)
        executor = start_executor(replace(parts, payload=replace(parts.payload, module=module)))
        assert isinstance(executor, Inline)  # rows with actors have a pool of their own
        _LAST_HOST[text] = executor
    return _LAST_HOST[text]
