"""Tables and texts of a sweep: its best configurations, all of its rows, the failed rows.

A configuration is a row of `Sweep.configurations`. Templates reach these functions as
`of_sweep.<name>`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from flray import columns as recorded
from flray.columns import USES_GROUND_TRUTH as USES
from flray.columns import ScoreColumn
from flray.reports import columns
from flray.reports.columns import MISSING, column_of, value_text
from flray.reports.sheets import GROUND_TRUTH, INCOMPLETE, Sheet, marks, sheet_of
from flray.reports.sweeps import FAILED, MISSING_ROWS, NUM_SEEDS, SPREAD, Sweep

TOP = 5  # configurations in the table of the best


def top_sheet(sweep: Sweep) -> Sheet:
    """The best configurations by the metric, the simplest one, and the baselines.

    Columns are the varied keys, the metric, validation and test score, clusters and ARI. Notes
    name the metric, ties, the rule of the simplest and, for samples, the importance of keys.
    """
    ranked, score = sweep.ranked.drop(sweep.baselines.index), sweep.score
    listed = pd.concat([ranked.head(TOP), sweep.simplest, sweep.baselines])
    listed = listed[~listed.index.duplicated()]
    labels = pd.DataFrame({"rank": _rank_names(sweep, ranked, listed)}, listed.index)
    for key, name in sweep.names.items():
        labels[name] = [value_text(value) for value in listed[key]]
    by_loss = (recorded.VALIDATION_LOSS_MEAN,) * (sweep.num_tied > 1)
    wanted = dict.fromkeys(
        (sweep.metric, score.validation, *by_loss, score.mean, recorded.CLUSTERS, recorded.ARI)
    )
    keys = [column for column in wanted if column in listed and listed[column].notna().any()]
    marked = [key for key in keys if key == sweep.metric or isinstance(key, ScoreColumn)]
    cells = {
        (k, column, "ours"): {
            "value": columns.scaled(column, row[column]),
            "error": columns.scaled(column, row[column + SPREAD]),
            "seeds": tuple(range(int(row[NUM_SEEDS]))),
            "uses_ground_truth": column in marked and row[USES] > 0,
            "missing_seeds": row[MISSING_ROWS] if column in marked else 0,
        }
        for k, row in listed.iterrows()
        for column in keys
    }
    title = f"the best {min(TOP, len(ranked))} of {len(ranked)} configurations"
    return sheet_of(title, labels, keys, cells, _top_notes(sweep))


def _rank_names(sweep: Sweep, ranked: pd.DataFrame, listed: pd.DataFrame) -> list[str]:
    """The rank of each listed configuration; equal configurations share one."""
    ranks = sweep.ranks(ranked)
    ties = zip(ranks.items(), ranks.duplicated(keep=False), strict=True)
    names = {k: f"{rank}{' (tie)' * is_tie}" for (k, rank), is_tie in ties}
    simplest = sweep.simplest.index.difference(sweep.best.index)
    names |= {k: f"{ranks.get(k, 'baseline')}, simplest" for k in simplest}
    return [names.get(k, "baseline") for k in listed.index]


def _top_notes(sweep: Sweep) -> Iterator[str]:
    """How the configurations were ranked, what ties and marks mean, which keys matter."""
    over = ", a mean ± standard deviation over seeds" if sweep.has_seeds else ""
    yield f"Ranked by {sweep.metric}{over}."
    if sweep.num_left_out:
        yield f"Configurations with {INCOMPLETE} rank after complete ones."
    if sweep.num_tied > 1:
        yield (
            f"{sweep.num_tied} configurations tie for the best {sweep.metric}; the lowest "
            "validation loss decides, then the fewest clusters, then the order of rows."
        )
    if len(sweep.simplest):
        error = columns.with_unit(sweep.metric, sweep.best_error)
        over = "seeds" if sweep.best[NUM_SEEDS].iloc[0] > 1 else "clients"
        is_best = sweep.simplest.index.equals(sweep.best.index)
        yield (
            f"{'The best is also the simplest' if is_best else 'simplest'}: the fewest clusters "
            f"within one standard error over {over} ({error}) of the best."
        )
    if len(sweep.importances):
        shares = ", ".join(f"{name} {100 * x:.0f} %" for name, x in sweep.importances.items())
        yield f"Share of the variance of {sweep.metric} that each key explains (fANOVA): {shares}."


def mark_of(configuration: "pd.Series[Any]") -> str:
    """The marks behind a number of a configuration, after a space; "" if it has none.

    >>> mark_of(pd.Series({USES: 1.0, MISSING_ROWS: 0}))
    ' †'
    """
    text = marks(configuration[USES] > 0, configuration[MISSING_ROWS])
    return f" {text}" if text else ""


def measured(configuration: "pd.Series[Any]", column: str) -> str:
    """A number of a configuration with its unit, its deviation over seeds and its marks."""
    text = columns.with_unit(column, configuration[column], configuration[column + SPREAD])
    return text + mark_of(configuration)


def settings_of(sweep: Sweep, configuration: "pd.Series[Any]") -> dict[str, str]:
    """The settings that a configuration has, by key, as texts; missing ones are left out."""
    settings = configuration.reindex([*sweep.keys, recorded.MERGE_PLACE]).dropna()
    return {str(key): value_text(value) for key, value in settings.items()}


def best_folder(sweep: Sweep) -> Path | None:
    """The folder of the first row of the best configuration; None if its run was not kept."""
    folder = sweep.rows_of(sweep.best)[recorded.FOLDER].iloc[0]
    return None if pd.isna(folder) else sweep.path / str(folder)


def row_texts(sweep: Sweep) -> pd.DataFrame:
    """Every row with its settings, what it measured, its status and its folder.

    All values are texts, MISSING for what a row does not have; the index counts rows from 0. Rows
    that read ground truth, and finished rows whose configuration misses others, are marked.
    """
    rows = sweep.rows
    texts = {"row": [f"{k}{f' {GROUND_TRUTH}' * used}" for k, used in enumerate(rows[USES] > 0)]}
    for key, name in _settings(sweep).items():
        texts[name] = [value_text(value) or MISSING for value in rows[key]]
    for key in sweep.measured:
        column = column_of(key)
        heading = f"{column.title} {column.unit}".strip()
        texts[heading] = [columns.number_text(key, value) for value in rows[key]]
    incomplete = (sweep.missing_rows > 0) & rows.index.isin(sweep.finished.index)
    statuses = zip(rows[recorded.STATUS].map(value_text), incomplete, strict=True)
    texts[recorded.STATUS] = [
        f"{s or MISSING}{f' {INCOMPLETE}' * missing}" for s, missing in statuses
    ]
    texts[recorded.FOLDER] = [value_text(folder) or MISSING for folder in rows[recorded.FOLDER]]
    return pd.DataFrame(texts).set_index("row")


def failures(sweep: Sweep) -> pd.DataFrame:
    """The message of each failed row by its settings: a column `message`, and labels as index."""
    names, rows = _settings(sweep), sweep.rows[sweep.rows[recorded.STATUS] == FAILED]
    labels = [
        ", ".join(f"{names[k]}={value_text(row[k])}" for k in names if pd.notna(row[k]))
        for _, row in rows.iterrows()
    ]
    messages = rows[recorded.ERROR].fillna("no message").to_numpy()
    return pd.DataFrame({"message": messages}, index=labels)


def _settings(sweep: Sweep) -> dict[str, str]:
    """The names of the columns that distinguish rows: varied keys and the seed."""
    has_seed = sweep.rows[recorded.SEED].notna().any()
    return sweep.names | ({recorded.SEED: recorded.SEED} if has_seed else {})
