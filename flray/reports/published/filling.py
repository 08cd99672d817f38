"""The numbers of a published table: matching runs, selected and averaged over seeds.

A cell may be filled by several runs per seed that differ in what the paper leaves open. Validation
accuracy selects one of them per seed; the choice that the papers made, by test accuracy, is shown
beside it under its own name.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from flray.columns import PARAMS_SHA256, VALIDATION_ACCURACY_MEAN
from flray.reports.configuration import setting_text
from flray.reports.published.layout import TableColumn, TableRow
from flray.reports.published.matching import Conditions, Metric, condition_text, holds
from flray.reports.published.tables import Table
from flray.reports.ratios import Measured, mean_ratio
from flray.reports.runs import RunRecord
from flray.reports.settings import NO_MATTER, settings_text, without
from flray.reports.sheets import Fields, mark_fields, numbers, seed_mean
from flray.sweeps.ranking import TIE_BREAKERS, candidates, ranks

MAX_UNMET = 4  # unmet conditions shown for the nearest run
SHOWN_FIRST = ("dataset.name", "split.name", "model.name", "algorithm.name")
VARIED, LEFT_OUT = "varied", "left_out"  # columns in addition to those of every sheet


def fill(table: Table, runs: Sequence[RunRecord]) -> pd.DataFrame:
    """The numbers of a table, by row number, column key and source, with the fields of a sheet.

    Sources are `ours`, selected by validation; `test`, selected by the test number as the papers
    do, if there was a choice; `paper`; and the `difference` of ours to it. Two more columns are
    `varied`, the keys in which the runs to choose from differ, and `left_out`, the runs that were
    no candidates because another seed of their configuration is missing.

    Args:
        table: The published table; its section `match` decides which run belongs in which cell.
        runs: Finished runs, as `collect_runs` returns them.
    """
    cells: dict[tuple[int, str, str], Fields] = {}
    has_ratios = table.has_ratios
    for r, row in enumerate(table.rows):
        for column in table.columns:
            sources, paper = _filled(table, row, column, runs), row.cells[column.key]
            if "ours" in sources and paper.value is not None:
                sources["difference"] = {"value": sources["ours"]["value"] - paper.value}
            sources["paper"] = {
                "value": paper.value,
                "error": paper.spread,
                "ratio": paper.ratio,
                "has_ratio": has_ratios and paper.value is not None,
                "text": paper.text or "",
            }
            cells |= {(r, column.key, source): fields for source, fields in sources.items()}
    frame = numbers(cells)
    for name in (VARIED, LEFT_OUT):
        frame[name] = [fields.get(name, ()) for fields in cells.values()]
    return frame


def is_filled(cells: pd.DataFrame) -> bool:
    """True if a run fills at least one of the cells that `fill` returned.

    Printed numbers and formulas of the paper alone do not count.
    """
    return bool(cells.index.isin(["ours", "test"], level="source").any())


def fits(run: RunRecord, conditions: Conditions) -> bool:
    """True if a run meets every condition.

    Args:
        run: A run, finished or not.
        conditions: Wanted values by dotted key of its configuration, or by summary.KEY, as
            `Matcher.conditions` returns them; see `flray.reports.published.matching.holds`.
    """
    return all(holds(run.value(key), wanted) for key, wanted in conditions.items())


def nearest_miss(table: Table, runs: Sequence[RunRecord]) -> str:
    """A message with the run that is nearest to filling a cell and the conditions it does not meet.

    Runs of the cell's method are preferred; "" if no run misses a cell.
    """
    misses = [
        (unmet, run, f"{row.title}, {column.title}")
        for row, column in itertools.product(table.rows, table.columns)
        for run in runs
        if (unmet := _unmet(table, row, column, run))
    ]
    if not misses:
        return ""
    unmet, run, cell = min(misses, key=lambda miss: _distance(miss[0]))
    shown = unmet[:MAX_UNMET] + [f"and {len(unmet) - MAX_UNMET} more"] * (len(unmet) > MAX_UNMET)
    return f"nearest is {run.path} for {cell}: {'; '.join(shown)}"


def _distance(unmet: Sequence[str]) -> tuple[bool, int]:
    """Sorts runs of another method behind all runs of the cell's own."""
    return any(text.startswith("algorithm.name ") for text in unmet), len(unmet)


def _unmet(table: Table, row: TableRow, column: TableColumn, run: RunRecord) -> list[str]:
    """The conditions of a cell that a run does not meet, in words."""
    conditions, metric = table.match.conditions(row, column), table.match.metric(row, column)
    texts = [
        f"{key} is {setting_text(run.value(key))}, expected {condition_text(wanted)}"
        for key, wanted in sorted(conditions.items(), key=lambda item: item[0] not in SHOWN_FIRST)
        if not holds(run.value(key), wanted)
    ]
    if metric is None or _value(run, metric, table.match.round_of(row)) is None:
        texts.append(f"{metric.key if metric else column.statistic} is not recorded")
    return texts


def _filled(
    table: Table, row: TableRow, column: TableColumn, runs: Sequence[RunRecord]
) -> dict[str, Fields]:
    """The fields of a cell by source, `ours` and `test`; {} if no run fits."""
    metric, t = table.match.metric(row, column), table.match.round_of(row)
    conditions = table.match.conditions(row, column)
    fitting = [run for run in runs if fits(run, conditions)] if metric else []
    if metric is None or not fitting or (measured := _measured(fitting, metric, t)).empty:
        return {}
    rivals = measured[measured.groupby("seed")["missing_seeds"].transform(candidates)]
    left_out = measured.drop(rivals.index)["run"]
    choice = {VARIED: _varied(rivals), LEFT_OUT: tuple(run.path for run in left_out)}
    has_choice = rivals.groupby("seed")["run"].transform("size") > 1
    judged = rivals.assign(validation=rivals["validation"].where(has_choice, 0.0))
    judged = judged.dropna(subset=["validation"])
    sources = {}
    if len(judged):  # else there is a choice and no validation to make it by
        by_seed = [candidate for _, candidate in judged.groupby("seed")]
        best = [ranks(c, "validation", c["missing_seeds"], True).idxmin() for c in by_seed]
        sources["ours"] = _number(rivals.loc[best], metric, t, runs) | choice
    if has_choice.any():
        sign = -1.0 if column.lower_is_better and metric.select is None else 1.0
        tested = (sign * rivals["test"]).groupby(rivals["seed"]).idxmax()
        sources["test"] = _number(rivals.loc[tested], metric, t, runs) | choice
    return sources


def _measured(runs: Sequence[RunRecord], metric: Metric, t: int | None) -> pd.DataFrame:
    """A row for each run with the number of a cell; those without it, or diverged, are left out.

    Runs of equal settings are one, and so are runs of one seed with the same models and numbers:
    that with the lowest digest, so that folders do not decide.
    """
    keys = {"validation": VALIDATION_ACCURACY_MEAN, "test": metric.select or metric.key}
    keys |= {key: key for key in TIE_BREAKERS}
    settings = [settings_text(run.config) for run in runs]
    numbers_of = [run.at(t) for run in runs]
    frame = pd.DataFrame({name: [n.get(key) for n in numbers_of] for name, key in keys.items()})
    frame["value"] = pd.Series([_value(run, metric, t) for run in runs], dtype=float)
    frame = frame.astype(float).assign(
        run=pd.Series(list(runs), dtype=object),
        seed=[-1 if run.seed is None else run.seed for run in runs],
        missing_seeds=[run.missing_seeds for run in runs],
        settings=settings,
        digest=[
            run.numbers.get(PARAMS_SHA256) or text for run, text in zip(runs, settings, strict=True)
        ],
    )
    measured = frame.dropna(subset=["value", "test"]).sort_values("digest", kind="stable")
    one_of_each = measured.drop_duplicates("settings")
    return one_of_each.drop_duplicates(["seed", "digest", *keys, "value"]).sort_index()


def _value(run: RunRecord, metric: Metric, t: int | None) -> float | None:
    """The number that a cell shows of a run; None if it was not measured."""
    if not metric.best_round:
        return run.at(t).get(metric.key)
    values = run.rounds.get(metric.key, pd.Series(dtype=float)).dropna()
    return float(values.max()) if len(values) else None


def _number(
    chosen: pd.DataFrame, metric: Metric, t: int | None, all_runs: Sequence[RunRecord]
) -> Fields:
    """The mean over the chosen runs, one per seed, and its ratio to FedAvg among all runs."""
    runs: list[RunRecord] = chosen["run"].tolist()
    errors = [e for run in runs if (e := run.at(t).get(metric.se or "")) is not None]
    pairs = zip(runs, chosen["value"], strict=True)
    measured = [Measured(run, _baseline_round(run, metric), value) for run, value in pairs]
    fedavg = [run for run in all_runs if run.value("algorithm.name") == "fedavg"]
    ratio, behind = mean_ratio(measured, metric.baseline or "", fedavg if metric.baseline else ())
    return {
        **seed_mean((chosen["value"] * metric.scale).tolist()),
        "seeds": tuple(run.seed for run in runs),
        "runs": tuple(run.path for run in runs),
        "se": float(np.mean(errors)) * metric.scale if errors else None,
        "ratio": ratio,
        "has_ratio": bool(behind),
        "baselines": behind,
        **mark_fields(runs),
    }


def _baseline_round(run: RunRecord, metric: Metric) -> int | None:
    if metric.baseline_round == "last":
        return None
    return int(run.value("algorithm.rounds_before")) + 1


def _varied(rivals: pd.DataFrame) -> tuple[str, ...]:
    """The keys in which runs of one seed differ; a missing key is as good as null."""
    varied: set[str] = set()
    for _, runs in rivals.groupby("seed")["run"]:
        configs = [without(run.config, NO_MATTER) for run in runs]
        keys = {key for config in configs for key in config}
        varied |= {key for key in keys if len({str(config.get(key)) for config in configs}) > 1}
    return tuple(sorted(varied))
