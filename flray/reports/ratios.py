"""The ratio to a baseline such as FedAvg: run by run, then the mean over the runs."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flray.columns import PARAMS_SHA256, SPLIT_SHA256
from flray.reports.columns import known
from flray.reports.runs import RunRecord, settings_text

# What may differ between a run and the baseline that its ratio is taken to.
_FREE = ("algorithm", "uses_ground_truth", "evaluate.every", "evaluate.also", "evaluate.on")


@dataclass(frozen=True)
class Measured:
    """A number of a run, and the round in which the baseline is read (None: the last)."""

    run: RunRecord
    round: int | None
    value: float


def mean_ratio(
    ours: Sequence[Measured], key: str, baselines: Sequence[RunRecord]
) -> tuple[float, tuple[Path, ...]]:
    """Mean of ours / baseline over the runs that have a baseline, and the baselines' runs.

    A run is paired with the baseline that has the same seed, the same split and equal settings but
    for the algorithm, and that measured `key` in the wanted round. Of several such baselines, which
    differ in their bits at most, the choice does not depend on their folders. The mean is NaN where
    there is no pair or a baseline is 0.
    """
    by_problem: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in baselines:
        by_problem[_problem(run, key)].append(run)
    ratios, paths = [], []
    for each in ours:
        fitting = [
            (str(run.numbers.get(PARAMS_SHA256)), run.path, value)
            for run in by_problem[_problem(each.run, key)]
            if not math.isnan(value := known(run.at(each.round).get(key)))
        ]
        if fitting and math.isfinite(each.value):
            _, path, base = min(fitting)
            ratios.append(each.value / base if base else math.nan)
            paths.append(path)
    return sum(ratios) / len(ratios) if ratios else math.nan, tuple(paths)


def _problem(run: RunRecord, key: str) -> str:
    """Everything that must be equal to compare `key` of two algorithms, seed and split too."""
    # Only numbers after fine-tuning depend on it.
    fine_tuning = () if key.startswith("tuned_") else ("evaluate.fine_tune",)
    return f"{settings_text(run.config, *_FREE, *fine_tuning)} {run.numbers.get(SPLIT_SHA256)}"
