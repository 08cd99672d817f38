"""What fills the cells of a published table: matching runs, selected and averaged over seeds."""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from flray.reports.columns import VALIDATION
from flray.reports.configuration import setting_text
from flray.reports.published.matching import Conditions, Matcher, Metric, condition_text, holds
from flray.reports.published.tables import Column, Row, Table
from flray.reports.ratios import Measured, mean_ratio
from flray.reports.runs import NO_MATTER, RunRecord, without
from flray.reports.sheets import Fields, numbers, seed_mean
from flray.sweeps.ranking import TIE_BREAKERS, candidates, ranks

MAX_UNMET = 4  # conditions that are shown
SHOWN_FIRST = ("dataset.name", "split.name", "model.name", "algorithm.name")
VARIED, LEFT_OUT = "varied", "left_out"  # columns beside those of every sheet


def fill(table: Table, runs: Sequence[RunRecord]) -> pd.DataFrame:
    """The numbers of a table: `ours`, selected by validation; `test`, selected by its own test
    number as the papers do, where there was a choice; `paper`; and the `difference` to it.

    Beside the columns of every sheet are `varied`, the keys in which the runs to choose from
    differ, and `left_out`, runs that were no candidates since their configuration lacks a seed.
    """
    cells: dict[tuple[int, str, str], Fields] = {}
    has_ratios = table.has_ratios
    for r, row in enumerate(table.rows):
        for column in table.columns:
            found, paper = _filled(table.match, row, column, runs), row.cells[column.key]
            if "ours" in found and paper.value is not None:
                found["difference"] = {"value": found["ours"]["value"] - paper.value}
            found["paper"] = {
                "value": paper.value,
                "error": paper.spread,
                "ratio": paper.ratio,
                "has_ratio": has_ratios and paper.value is not None,
                "text": paper.text or "",
            }
            cells |= {(r, column.key, source): fields for source, fields in found.items()}
    frame = numbers(cells)
    for name in (VARIED, LEFT_OUT):
        frame[name] = [fields.get(name, ()) for fields in cells.values()]
    return frame


def fits(run: RunRecord, conditions: Conditions) -> bool:
    return all(holds(run.value(key), wanted) for key, wanted in conditions.items())


def is_filled(table: Table, runs: Sequence[RunRecord]) -> bool:
    """True if a run fills a cell of the table."""
    places = itertools.product(table.rows, table.columns)
    return any(not _unmet(table.match, *place, run) for place in places for run in runs)


def nearest_miss(table: Table, runs: Sequence[RunRecord]) -> str:
    """What keeps the run of a cell's method that meets most of its conditions from filling it, in
    words; "" without runs."""
    misses = [
        (unmet, run, f"{row.title}, {column.title}")
        for row, column in itertools.product(table.rows, table.columns)
        for run in runs
        if (unmet := _unmet(table.match, row, column, run))
    ]
    if not misses:
        return ""
    unmet, run, cell = min(misses, key=lambda miss: _distance(miss[0]))
    shown = unmet[:MAX_UNMET] + [f"and {len(unmet) - MAX_UNMET} more"] * (len(unmet) > MAX_UNMET)
    return f"nearest is {run.path} for {cell}: {'; '.join(shown)}"


def _distance(unmet: Sequence[str]) -> tuple[bool, int]:
    """How far a run is from a cell; one of another method is far, however little else it lacks."""
    return any(text.startswith("algorithm.name ") for text in unmet), len(unmet)


def _unmet(matcher: Matcher, row: Row, column: Column, run: RunRecord) -> list[str]:
    """The conditions of a cell that a run does not meet, in words."""
    conditions, metric = matcher.conditions(row, column), matcher.metric(row, column)
    texts = [
        f"{key} is {setting_text(run.value(key))}, expected {condition_text(wanted)}"
        for key, wanted in sorted(conditions.items(), key=lambda each: each[0] not in SHOWN_FIRST)
        if not holds(run.value(key), wanted)
    ]
    if metric is None or run.at(matcher.round_of(row)).get(metric.key) is None:
        texts.append(f"{metric.key if metric else column.statistic} is not recorded")
    return texts


def _filled(
    matcher: Matcher, row: Row, column: Column, runs: Sequence[RunRecord]
) -> dict[str, Fields]:
    """The fields of a cell by source."""
    metric = matcher.metric(row, column)
    conditions, t = matcher.conditions(row, column), matcher.round_of(row)
    fitting = [run for run in runs if fits(run, conditions)]
    if metric is None or not fitting:
        return {}
    every = _candidates(fitting, metric, t)
    if every.empty:
        return {}
    rivals = every[every.groupby("seed")["missing_seeds"].transform(candidates)]
    left_out = every.drop(rivals.index)["run"]
    choice = {VARIED: _varied(rivals), LEFT_OUT: tuple(run.path for run in left_out)}
    has_choice = rivals.groupby("seed")["run"].transform("size") > 1
    judged = rivals.assign(validation=rivals["validation"].where(has_choice, 0.0))
    judged = judged.dropna(subset=["validation"])
    found = {}
    if len(judged):  # else there is a choice and no validation to make it by
        by_seed = [own for _, own in judged.groupby("seed")]
        best = rivals.loc[
            [ranks(own, "validation", own["missing_seeds"], True).idxmin() for own in by_seed]
        ]
        found["ours"] = _number(best, metric, t, runs) | choice
    if has_choice.any():
        sign = -1.0 if column.lower_is_better and metric.select is None else 1.0
        best = rivals.loc[(sign * rivals["test"]).groupby(rivals["seed"]).idxmax()]
        found["test"] = _number(best, metric, t, runs) | choice
    return found


def _candidates(runs: Sequence[RunRecord], metric: Metric, t: int | None) -> pd.DataFrame:
    """Runs with the number of a cell; those that diverged or never measured it are left out."""
    keys = {"value": metric.key, "validation": VALIDATION, "test": metric.select or metric.key}
    keys |= {key: key for key in TIE_BREAKERS}
    measured = [run.at(t) for run in runs]
    frame = pd.DataFrame({name: [held.get(key) for held in measured] for name, key in keys.items()})
    frame = frame.astype(float).assign(
        run=pd.Series(list(runs), dtype=object),
        seed=[-1 if run.seed is None else run.seed for run in runs],
        missing_seeds=[run.missing_seeds for run in runs],
    )
    return frame.dropna(subset=["value", "test"])


def _number(
    chosen: pd.DataFrame, metric: Metric, t: int | None, every: Sequence[RunRecord]
) -> Fields:
    """A mean over the chosen runs, one for each seed, with the ratio to FedAvg's among all runs."""
    runs: list[RunRecord] = chosen["run"].tolist()
    errors = [e for run in runs if (e := run.at(t).get(metric.se or "")) is not None]
    pairs = zip(runs, chosen["value"], strict=True)
    measured = [Measured(run, _baseline_round(run, metric), value) for run, value in pairs]
    fedavg = [run for run in every if fits(run, {"algorithm.name": "fedavg"})]
    ratio, behind = mean_ratio(measured, metric.baseline or "", fedavg if metric.baseline else ())
    return {
        **seed_mean((chosen["value"] * metric.scale).tolist()),
        "seeds": tuple(run.seed for run in runs),
        "runs": tuple(run.path for run in runs),
        "se": float(np.mean(errors)) * metric.scale if errors else None,
        "ratio": ratio,
        "has_ratio": bool(behind),
        "baselines": behind,
        "uses_ground_truth": any(run.uses_ground_truth for run in runs),
        "missing_seeds": max(run.missing_seeds for run in runs),
    }


def _baseline_round(run: RunRecord, metric: Metric) -> int | None:
    if metric.baseline_round == "last":
        return None
    return int(run.value("algorithm.rounds_before")) + 1


def _varied(rivals: pd.DataFrame) -> tuple[str, ...]:
    """The keys in which runs of one seed differ."""
    keys: set[str] = set()
    for _, runs in rivals.groupby("seed")["run"]:
        texts = pd.DataFrame([without(run.config, NO_MATTER) for run in runs]).map(str)
        # A key that is missing is as good as null.
        keys |= set(texts.columns[texts.replace("nan", "None").nunique() > 1])
    return tuple(sorted(keys))
