"""Finished runs as a table reads them: configuration, summary, and rounds when asked for."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory, leaves
from flray.report.sweep_record import SPACE, holds_sweep, read_sweep

Plain = Mapping[str, Any]  # Any: YAML and JSON

GROUND_TRUTH = "†"
GROUND_TRUTH_NOTE = (
    f"{GROUND_TRUTH} uses ground truth: labels or groups that a real server does not know."
)
INCOMPLETE = "‡"
INCOMPLETE_NOTE = (
    f"{INCOMPLETE} a seed of this configuration failed or did not finish: the number is of others."
)
# Keys that tell no experiment from another; a key stands for those below it.
NO_MATTER = ("execution", "tracking", "dataset.download", "on_client_failure")


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: Plain  # resolved: nested mappings
    summary: Plain
    missing_seeds: int = 0  # runs that differ in their seed alone and failed or did not finish

    @cached_property
    def rounds(self) -> Mapping[int, Plain]:
        """The rows of rounds.parquet by round, each without its empty columns."""
        return {row["round"]: row for row in RunDirectory(self.path).rows()}

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config.get("seed")
        return seed

    @property
    def uses_ground_truth(self) -> bool:
        return used_ground_truth(self.config, self.summary)

    def at(self, t: int | None) -> Plain:
        """What was measured in round t, {} where nothing was; None is the end of the run."""
        if t is None or t == self.summary.get("rounds"):
            return self.summary
        return self.rounds.get(t, {})


def used_ground_truth(config: Plain, numbers: Plain) -> bool:
    """True if the run read ground truth; of an old run, which did not note it, if it could have."""
    allowed = config.get("uses_ground_truth") is True
    return bool(numbers.get("uses_ground_truth", allowed))


def collect_runs(folder: Path) -> list[RunRecord]:
    """The finished runs below a folder, in the order of their paths."""
    finished: list[RunRecord] = []
    unfinished: list[Plain] = []  # configurations; what a sweep left unfinished its table says
    for file in sorted(folder.rglob("config.yaml")):
        directory = RunDirectory(file.parent)
        summary = _summary(directory)
        if summary is not None:
            finished.append(RunRecord(directory.path, directory.config(), summary))
        elif _sweep_folder(directory.path) is None:
            unfinished.append(directory.config())
    return _with_missing_seeds(finished, unfinished)


def without(config: Plain, keys: Sequence[str]) -> dict[str, Any]:  # Any: YAML
    """The values of a configuration by dotted key, less those keys and what is below them."""
    return {
        key: value
        for key, value in leaves(config).items()
        if not any(key == left_out or key.startswith(f"{left_out}.") for left_out in keys)
    }


def _summary(directory: RunDirectory) -> Plain | None:
    try:
        held = directory.summary()
    except json.JSONDecodeError as error:
        raise ExperimentError(
            f"{directory.path / 'summary.json'} is not valid JSON ({error}): remove it and resume "
            "the run"
        ) from error
    return held if isinstance(held, dict) else None


def _with_missing_seeds(runs: Sequence[RunRecord], unfinished: Sequence[Plain]) -> list[RunRecord]:
    """The runs, each with the number of seeds of its configuration that have no finished run."""
    sweeps = {run.path: _sweep_folder(run.path) for run in runs}
    of_sweeps: dict[Path, int] = {}
    for sweep in {path for path in sweeps.values() if path is not None and holds_sweep(path)}:
        of_sweeps |= {sweep / name: n for name, n in read_sweep(sweep).missing_by_folder.items()}
    lacking, there = _seeds(unfinished), _seeds(run.config for run in runs)
    missing = {key: len(seeds - there[key]) for key, seeds in lacking.items()}
    return [
        replace(
            run,
            missing_seeds=missing.get(_but_for_the_seed(run.config), 0)
            if sweeps[run.path] is None
            else of_sweeps.get(run.path, 0),
        )
        for run in runs
    ]


def _seeds(configs: Iterable[Plain]) -> defaultdict[str, set[int | None]]:
    """The seeds of each configuration."""
    seeds: defaultdict[str, set[int | None]] = defaultdict(set)
    for config in configs:
        seeds[_but_for_the_seed(config)].add(config.get("seed"))
    return seeds


def _but_for_the_seed(config: Plain) -> str:
    return json.dumps(without(config, (*NO_MATTER, "seed")), sort_keys=True, default=str)


def _sweep_folder(run: Path) -> Path | None:
    """The folder of the sweep that a run is part of; it may have no table yet."""
    return next((path for path in run.parents if (path / SPACE).is_file()), None)


def look_up(config: Plain, key: str) -> Any:  # Any: whatever stands there
    """The value of a dotted key, None where there is none; a bare name is a component's `name`.

    >>> look_up({"split": {"name": "iid"}, "model": "mlp200"}, "model.name")
    'mlp200'
    """
    node: Any = config
    for part in key.split("."):
        if part == "name" and isinstance(node, str):
            return node
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node
