"""What fills the cells of a published table: matching runs, selected and averaged over seeds."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flray.published.tables import Column, Row, Table
from flray.report.configuration import look_up
from flray.report.matching import Matcher, Metric, fits, matcher_of
from flray.report.ratios import Measured, mean_ratio
from flray.report.runs import NO_MATTER, RunRecord, without
from flray.report.sheets import numbers

VALIDATION = "validation_accuracy_mean"
VARIED, LEFT_OUT = "varied", "left_out"  # columns beside those of every sheet

Fields = dict[str, Any]  # Any: fields of a cell


@dataclass(frozen=True)
class _Candidate:
    run: RunRecord
    value: float
    validation: float | None
    test: float  # what the papers' way of selecting maximises


def fill(table: Table, runs: Sequence[RunRecord]) -> pd.DataFrame:
    """The numbers of a table: `ours`, selected by validation; `test`, selected by its own test
    number as the papers do, where there was a choice; `paper`; and the `difference` to it.

    Beside the columns of every sheet are `varied`, the keys in which the runs to choose from
    differ, and `left_out`, the runs that were no candidates since a seed of theirs is missing.
    """
    matcher = matcher_of(table)
    baselines = [run for run in runs if look_up(run.config, "algorithm.name") == "fedavg"]
    cells: dict[tuple[Any, str, str], Fields] = {}
    for r, row in enumerate(table.rows):
        for column in table.columns:
            found = _filled(matcher, (row, column), runs, baselines)
            paper = row.cells[column.key]
            for source, fields in found.items():
                cells[r, column.key, source] = fields
            if "ours" in found and paper.value is not None:
                apart = found["ours"]["value"] - paper.value
                cells[r, column.key, "difference"] = {"value": apart}
            cells[r, column.key, "paper"] = {
                "value": paper.value,
                "error": paper.spread,
                "ratio": paper.ratio,
                "has_ratio": table.has_ratios and paper.value is not None,
                "text": paper.text or "",
            }
    frame = numbers(cells)
    for name in (VARIED, LEFT_OUT):
        frame[name] = [fields.get(name, ()) for fields in cells.values()]
    return frame


def _filled(
    matcher: Matcher,
    place: tuple[Row, Column],
    runs: Sequence[RunRecord],
    baselines: Sequence[RunRecord],
) -> dict[str, Fields]:
    """The fields of a cell by source."""
    row, column = place
    metric = matcher.metric(row, column)
    if metric is None:
        return {}
    conditions, t = matcher.conditions(row, column), matcher.round_of(row)
    sign = -1.0 if column.lower_is_better and metric.select is None else 1.0
    by_seed: dict[int | None, list[_Candidate]] = defaultdict(list)
    for run in runs:
        if fits(run, conditions) and (candidate := _candidate(run, metric, t, sign)) is not None:
            by_seed[run.seed].append(candidate)
    every = [by_seed[seed] for seed in sorted(by_seed, key=str)]
    rivals = [_complete(each) or each for each in every]
    chosen = [best for each in rivals if (best := _best_by_validation(each)) is not None]
    found = {}
    left_out = [
        c.run.path for each in every if _complete(each) for c in each if c.run.missing_seeds
    ]
    choice = {VARIED: _varied(rivals), LEFT_OUT: tuple(left_out)}
    if chosen:
        found["ours"] = _number(chosen, metric, t, baselines) | choice
    if any(len(each) > 1 for each in rivals):
        by_test = [max(each, key=lambda c: c.test) for each in rivals]
        found["test"] = _number(by_test, metric, t, baselines) | choice
    return found


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


def _number(
    chosen: Sequence[_Candidate], metric: Metric, t: int | None, baselines: Sequence[RunRecord]
) -> Fields:
    """A mean over the chosen runs, one for each seed."""
    values = np.array([candidate.value for candidate in chosen]) * metric.scale
    errors = [e for c in chosen if (e := c.run.at(t).get(metric.se or "")) is not None]
    measured = [Measured(c.run, _baseline_round(c.run, metric), c.value) for c in chosen]
    ratio = mean_ratio(measured, metric.baseline or "", baselines if metric.baseline else ())
    return {
        "value": float(values.mean()),
        "error": float(values.std(ddof=1)) if len(values) > 1 else None,
        "seeds": tuple(candidate.run.seed for candidate in chosen),
        "runs": tuple(candidate.run.path for candidate in chosen),
        "se": float(np.mean(errors)) * metric.scale if errors else None,
        "ratio": ratio.value,
        "has_ratio": bool(ratio.baselines),
        "baselines": ratio.baselines,
        "uses_ground_truth": any(candidate.run.uses_ground_truth for candidate in chosen),
        "missing_seeds": max(candidate.run.missing_seeds for candidate in chosen),
    }


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
