"""The ratio to a baseline such as FedAvg: run by run, then the mean over the runs."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flray.report.columns import known
from flray.report.runs import NO_MATTER, RunRecord, without

# What else may differ between a run and the baseline that its ratio is taken to.
_NOT_THE_PROBLEM = (
    "algorithm",
    "uses_ground_truth",
    "evaluate.every",
    "evaluate.also",
    "evaluate.on",
)


@dataclass(frozen=True)
class Measured:
    """A number of a run, and the round in which the baseline is read (None: the last)."""

    run: RunRecord
    round: int | None
    value: float


@dataclass(frozen=True)
class Ratio:
    value: float | None  # mean over the pairs; None: there is no pair, or a baseline is 0
    baselines: tuple[Path, ...]  # the baseline's run of each pair


def mean_ratio(ours: Sequence[Measured], key: str, baselines: Sequence[RunRecord]) -> Ratio:
    """Mean of ours / baseline over the runs that have a baseline.

    A run is paired with the baseline that has the same seed, the same split and equal settings but
    for the algorithm, and that measured `key` in the wanted round. Of several such baselines, which
    differ in their bits at most, the choice does not depend on their folders.
    """
    by_problem: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in baselines:
        by_problem[_problem(run, key)].append(run)
    ratios, paths = [], []
    for each in ours:
        fitting = [
            (str(run.numbers.get("params_sha256")), run.path, value)
            for run in by_problem[_problem(each.run, key)]
            if (value := known(run.at(each.round).get(key))) is not None
        ]
        if fitting and math.isfinite(each.value):
            _, path, base = min(fitting)
            ratios.append(each.value / base if base else math.nan)
            paths.append(path)
    mean = sum(ratios) / len(ratios) if ratios else math.nan
    return Ratio(known(mean), tuple(paths))


def _problem(run: RunRecord, key: str) -> str:
    """Everything that must be equal to compare `key` of two algorithms, seed and split too."""
    # Only numbers after fine-tuning depend on it.
    fine_tuning = () if key.startswith("tuned_") else ("evaluate.fine_tune",)
    kept = without(run.config, (*NO_MATTER, *_NOT_THE_PROBLEM, *fine_tuning))
    return json.dumps([kept, run.numbers.get("split_sha256")], sort_keys=True, default=str)
