"""Finished runs as a table reads them: configuration, summary, and rounds when asked for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory

Plain = Mapping[str, Any]  # Any: YAML and JSON

GROUND_TRUTH = "†"
GROUND_TRUTH_NOTE = (
    f"{GROUND_TRUTH} uses ground truth: labels or groups that a real server does not know."
)


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: Plain  # resolved: nested mappings
    summary: Plain

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
    found = []
    for summary in sorted(folder.rglob("summary.json")):
        directory = RunDirectory(summary.parent)
        if not directory.holds_run():
            continue
        try:
            held = directory.summary()
        except json.JSONDecodeError as error:
            raise ExperimentError(
                f"{summary} is not valid JSON ({error}): remove it and resume the run"
            ) from error
        if isinstance(held, dict):
            found.append(RunRecord(summary.parent, directory.config(), held))
    return found


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
