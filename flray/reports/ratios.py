"""The ratio of a number to that of a baseline such as FedAvg: paired by run, then averaged.

Ratios are computed run by run and then averaged, never as a ratio of two means, because seeds
differ in difficulty.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flray.columns import PARAMS_SHA256, SPLIT_SHA256
from flray.reports.columns import finite
from flray.reports.runs import RunRecord
from flray.reports.settings import settings_text

# Keys in which a run and its baseline may differ, each with all keys below it.
_FREE = ("algorithm", "uses_ground_truth", "evaluate.every", "evaluate.also", "evaluate.on")


@dataclass(frozen=True)
class Measured:
    """A number of a run that a ratio is taken of.

    `value` is in the recorded unit, as the baseline's number is; NaN is left out of the mean.
    """

    run: RunRecord
    round: int | None  # round of the baseline's number; None: the last
    value: float


def mean_ratio(
    ours: Sequence[Measured], key: str, baselines: Sequence[RunRecord]
) -> tuple[float, tuple[Path, ...]]:
    """The mean of ours / baseline over the runs with a baseline, and the paths of these baselines.

    A run is paired with a baseline of the same seed, split and settings, except for the algorithm,
    that measured `key` in the round. Several such baselines differ at most in their bits; the one
    with the lowest `params_sha256` is taken, so that folders do not decide. The mean is NaN without
    a pair, or if a baseline is 0.

    Args:
        ours: The numbers, at most one per run; runs without a baseline are left out.
        key: The recorded column of the baselines.
        baselines: Finished runs to pair with, of any settings.
    """
    by_problem: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for run in baselines:
        by_problem[_problem(run, key)].append(run)
    ratios, paths = [], []
    for number in ours:
        fitting = [
            (str(run.numbers.get(PARAMS_SHA256)), run.path, value)
            for run in by_problem[_problem(number.run, key)]
            if not math.isnan(value := finite(run.at(number.round).get(key)))
        ]
        if fitting and math.isfinite(number.value):
            _, path, base = min(fitting)
            ratios.append(number.value / base if base else math.nan)
            paths.append(path)
    return sum(ratios) / len(ratios) if ratios else math.nan, tuple(paths)


def _problem(run: RunRecord, key: str) -> str:
    """Everything that must be equal to compare `key` of two algorithms, with seed and split."""
    # Only numbers measured after fine-tuning depend on it.
    fine_tuning = () if key.startswith("tuned_") else ("evaluate.fine_tune",)
    return f"{settings_text(run.config, *_FREE, *fine_tuning)} {run.numbers.get(SPLIT_SHA256)}"
