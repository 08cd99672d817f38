"""Keys of what a sweep computes: equal keys, equal bits.

A key is a short hash of everything that decides the bits of an entry: configuration, versions of
code and libraries, kind of device, and the key of what the entry was computed from.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flray import __version__
from flray.algorithms.algorithm import Branching
from flray.config.deciding import deciding
from flray.config.experiment import Experiment
from flray.config.reading import Plain
from flray.imports import digests_of_own_modules
from flray.records.encoding import encode
from flray.runs.assemble import digests_of_files

SHORT = 12  # characters of a key: 2^48 different ones
LIBRARIES = ("numpy", "scipy", "scikit-learn")  # libraries that a clustering depends on
SHOWING = ("cli", "reports", "tracking")  # packages that change no number

_PACKAGE = Path(__file__).parents[1]


def canonical(value: object) -> str:
    """The same text for equal configurations.

    >>> canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1})
    True
    """
    return json.dumps(value, sort_keys=True)


def digest(value: object) -> str:
    """A key of plain values, equal for equal ones; 12 hexadecimal digits.

    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1}), len(digest("x"))
    (True, 12)
    """
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:SHORT]


@cache
def code_version() -> Mapping[str, str]:
    """Versions of sources and libraries: results of two versions do not belong in one sweep.

    `sources` is a hash of the package's files, without those that only show results. Read once per
    process.
    """
    sources = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE)
        if name.parts[0] not in SHOWING:
            sources.update(name.as_posix().encode())
            sources.update(path.read_bytes())
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    versions = {"flray": __version__, "sources": sources.hexdigest()[:SHORT]}
    return versions | {"torch": str(torch.__version__)} | libraries


def version_of(experiments: Sequence[Experiment]) -> dict[str, str]:
    """`code_version`, and a hash of each file of one's own that the experiments name, by module."""
    digests = digests_of_own_modules([experiment.plain for experiment in experiments])
    return {**code_version(), **{module: digest[:SHORT] for module, digest in digests.items()}}


def device_of(experiment: Experiment, has_gpu: bool) -> str:
    """The kind of device the clients of a trial train on: "cpu" or "cuda".

    Bits depend on it, so it is part of keys. `has_gpu` is that of the cluster, because the driver
    that computes keys may run on a machine without a GPU.
    """
    execution = experiment.settings.execution
    if execution.executor == "inline" and execution.device == "auto":
        return "cuda" if has_gpu else "cpu"
    if execution.executor == "inline":
        return execution.device.split(":")[0]
    return execution.resolve_device()


def state_digest(state: object) -> str:
    """SHA-256 of an algorithm's state, by its bits: values, dtypes and shapes of all arrays.

    States of two types with equal fields differ. Any state that can be checkpointed has one.
    """
    tree, arrays = encode(state)
    sha = hashlib.sha256(canonical(tree).encode())
    for path, array in arrays.items():
        sha.update(f"{path} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def prefix_key(experiment: Experiment, code: Mapping[str, str], has_gpu: bool) -> str:
    """The key of FedAvg's rounds, equal if experiments differ in algorithm and rounds alone.

    The content of files that an experiment names belongs to it.

    Args:
        code: versions of code and libraries, see `code_version`.
        has_gpu: True if the cluster has a GPU, which `execution.device: auto` then means.
    """
    different = ("algorithm", "rounds")
    shared = {key: v for key, v in deciding(experiment.plain).items() if key not in different}
    decided = [shared, dict(code), device_of(experiment, has_gpu)]
    files = digests_of_files(experiment)
    return digest([*decided, files] if files else decided)


def signature_key(prefix: str, plain: Mapping[str, Any], rounds_before: int) -> str:
    """The key of the signatures that a row clusters by; rows with equal keys may share them.

    Args:
        prefix: The `prefix_key` of its experiment.
        plain: The resolved configuration.
        rounds_before: The round after which it clusters.
    """
    return digest([prefix, plain["algorithm"]["clustering"]["signature"], rounds_before])


def run_key(prefix: str, plain: Mapping[str, Any]) -> str:
    """The key of a run that starts with round 1.

    Args:
        prefix: The `prefix_key` of its experiment, which covers everything but these two keys.
        plain: The resolved configuration.
    """
    return digest([prefix, plain["algorithm"], plain["rounds"]])


def branch_key(
    prefix: str, plain: Mapping[str, Any], algorithm: Branching[Any], start: object
) -> str:
    """The key of what follows a clustering: rows with equal keys have equal records.

    Fields of the algorithm that only the clustering reads are left out, unless clients may join, so
    that two thresholds that give one partition share a run.

    Args:
        prefix: The `prefix_key` of the experiment.
        plain: The resolved configuration.
        algorithm: The algorithm; `spent_fields` names what only its clustering reads.
        start: Digests of the state after the clustering, and of what else the records depend on,
            such as the stages that place clients without a cluster.
    """
    fields: Plain = plain["algorithm"]
    if algorithm.spent_fields is not None and not plain["events"]:
        spent = ("rounds_before", "clustering", *algorithm.spent_fields)
        fields = {name: value for name, value in fields.items() if name not in spent}
    return digest([prefix, algorithm.rounds_before, fields, plain["rounds"], start])
