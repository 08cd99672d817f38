"""What fills the cells of a table: the runs that match, selected and averaged over seeds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flray.published.tables import Column, Row, Table
from flray.report.matching import MATCHERS, Matcher, Metric, fits
from flray.report.ratios import Measured, mean_ratio
from flray.report.runs import NO_MATTER, RunRecord, look_up, without

VALIDATION = "validation_accuracy_mean"


@dataclass(frozen=True)
class Ours:
    """A number of ours, with the runs behind it: one a seed."""

    value: float  # mean over seeds, in the column's unit
    std: float | None  # over seeds, ddof 1; None for one seed
    seeds: tuple[int | None, ...]
    runs: tuple[Path, ...]  # in the order of `seeds`
    error: float | None = None  # binomial standard error, mean over seeds
    ratio: float | None = None  # to FedAvg, mean over seeds; None where that was 0 or is missing
    baselines: tuple[Path, ...] = ()  # FedAvg's runs
    uses_ground_truth: bool = False
    missing_seeds: int = 0  # of its configurations, that failed or did not finish


@dataclass(frozen=True)
class Filled:
    """A cell: nothing, one run a seed, or a choice of runs and what was chosen."""

    by_validation: Ours | None = None
    by_test: Ours | None = None  # the papers' way; only where there was a choice
    varied: tuple[str, ...] = ()  # the keys in which the runs to choose from differ
    left_out: tuple[Path, ...] = ()  # of the choice, since a seed of their configuration is missing


Cells = Mapping[tuple[int, str], Filled]  # by row number and column key


@dataclass(frozen=True)
class _Candidate:
    run: RunRecord
    value: float
    validation: float | None
    test: float  # what the papers' way of selecting maximises


def fill(table: Table, runs: Sequence[RunRecord]) -> Cells:
    """Every cell of the table, empty ones too."""
    matcher = MATCHERS[table.key]
    baselines = [run for run in runs if look_up(run.config, "algorithm.name") == "fedavg"]
    return {
        (r, column.key): _filled(matcher, (row, column), runs, baselines)
        for r, row in enumerate(table.rows)
        for column in table.columns
    }


def _filled(
    matcher: Matcher,
    place: tuple[Row, Column],
    runs: Sequence[RunRecord],
    baselines: Sequence[RunRecord],
) -> Filled:
    row, column = place
    metric = matcher.metric(row, column)
    if metric is None:
        return Filled()
    conditions, t = matcher.conditions(row, column), matcher.round(row)
    sign = -1.0 if column.lower_is_better and metric.select is None else 1.0
    by_seed: dict[int | None, list[_Candidate]] = defaultdict(list)
    for run in runs:
        if fits(run, conditions) and (candidate := _candidate(run, metric, t, sign)) is not None:
            by_seed[run.seed].append(candidate)
    if not by_seed:
        return Filled()
    every = [by_seed[seed] for seed in sorted(by_seed, key=str)]
    rivals = [_complete(each) or each for each in every]
    chosen = [best for each in rivals if (best := _best_by_validation(each)) is not None]
    return Filled(
        _ours(chosen, metric, t, baselines),
        _ours([max(each, key=lambda c: c.test) for each in rivals], metric, t, baselines)
        if any(len(each) > 1 for each in rivals)
        else None,
        _varied(rivals),
        tuple(c.run.path for each in every if _complete(each) for c in each if c.run.missing_seeds),
    )


def _candidate(run: RunRecord, metric: Metric, t: int | None, sign: float) -> _Candidate | None:
    measured = run.at(t)
    value, test = measured.get(metric.key), measured.get(metric.select or metric.key)
    if value is None or test is None:  # null: it diverged, or was never measured
        return None
    return _Candidate(run, value, measured.get(VALIDATION), sign * test)


def _complete(rivals: Sequence[_Candidate]) -> list[_Candidate]:
    """Those whose configuration has a finished run for every seed that was tried."""
    return [candidate for candidate in rivals if not candidate.run.missing_seeds]


def _best_by_validation(rivals: Sequence[_Candidate]) -> _Candidate | None:
    """None where there is a choice and no validation to make it by."""
    if len(rivals) == 1:
        return rivals[0]
    judged = [candidate for candidate in rivals if candidate.validation is not None]
    return max(judged, key=lambda c: c.validation or 0.0) if judged else None


def _ours(
    chosen: Sequence[_Candidate],
    metric: Metric,
    t: int | None,
    baselines: Sequence[RunRecord],
) -> Ours | None:
    if not chosen:
        return None
    values = np.array([candidate.value for candidate in chosen]) * metric.scale
    errors = [e for c in chosen if (e := c.run.at(t).get(metric.error or "")) is not None]
    measured = [Measured(c.run, _baseline_round(c.run, metric), c.value) for c in chosen]
    ratio = mean_ratio(measured, metric.baseline or "", baselines if metric.baseline else ())
    return Ours(
        value=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else None,
        seeds=tuple(candidate.run.seed for candidate in chosen),
        runs=tuple(candidate.run.path for candidate in chosen),
        error=float(np.mean(errors)) * metric.scale if errors else None,
        ratio=ratio.value,
        baselines=ratio.baselines,
        uses_ground_truth=any(candidate.run.uses_ground_truth for candidate in chosen),
        missing_seeds=max(candidate.run.missing_seeds for candidate in chosen),
    )


def _baseline_round(run: RunRecord, metric: Metric) -> int | None:
    if metric.baseline_round == "last":
        return None
    return int(look_up(run.config, "algorithm.rounds_before")) + 1


def _varied(rivals: Sequence[Sequence[_Candidate]]) -> tuple[str, ...]:
    keys: set[str] = set()
    for each in rivals:
        configs = [without(candidate.run.config, NO_MATTER) for candidate in each]
        union = {key for config in configs for key in config}
        keys |= {key for key in union if len({str(config.get(key)) for config in configs}) > 1}
    return tuple(sorted(keys))
