"""What the page shows of a sweep, where its template cannot compute it itself."""

from pathlib import Path

import pandas as pd

from flray.records.columns import ERROR, FOLDER, MERGE_PLACE, STATUS, USES_GROUND_TRUTH
from flray.report.columns import MISSING, column_of, number_text, value_text, with_unit
from flray.report.sheets import GROUND_TRUTH, INCOMPLETE
from flray.report.sweep_figures import marks_of
from flray.report.sweeps import MISSING_ROWS, NUM_SEEDS, SEED, SPREAD, Sweep

MAX_BASELINES = 2  # beside the best


def measured(configuration: pd.DataFrame, column: str) -> str:
    """A number of a configuration with its spread over seeds and its marks."""
    spread = configuration[column + SPREAD].iloc[0]
    text = with_unit(column, configuration[column].iloc[0], spread)
    return text + marks_of(configuration)[0]


def of_seeds(configuration: pd.DataFrame) -> str:
    number, missing = (int(configuration[name].iloc[0]) for name in (NUM_SEEDS, MISSING_ROWS))
    if missing:
        return f"mean over {number} of {number + missing} seeds"
    return f"mean ± sd over {number} seeds" if number > 1 else ""


def settings_of(sweep: Sweep, configuration: pd.DataFrame) -> dict[str, str]:
    """The settings that a configuration has, by key."""
    keys = [key for key in (*sweep.keys, MERGE_PLACE) if key in configuration]
    return {key: value_text(v) for key in keys if pd.notna(v := configuration[key].iloc[0])}


def best_folder(sweep: Sweep) -> Path | None:
    """Where the first row of the best configuration is kept."""
    folder = sweep.rows_of(sweep.best)[FOLDER].iloc[0]
    return None if pd.isna(folder) else sweep.path / str(folder)


def baseline_rows(sweep: Sweep) -> list[pd.DataFrame]:
    return [sweep.baselines.loc[[k]] for k in sweep.baselines.index[:MAX_BASELINES]]


def num_tried(sweep: Sweep) -> int:
    """How many configurations have a row."""
    return len(sweep.rows.drop_duplicates(sweep.telling)) if sweep.telling else 1


def row_texts(sweep: Sweep) -> pd.DataFrame:
    """Every row with its settings, what it measured, its status and its folder."""
    rows = sweep.rows
    used = rows[USES_GROUND_TRUTH] > 0
    shown = {"row": [f"{k}{f' {GROUND_TRUTH}' * u}" for k, u in enumerate(used)]}
    for key, name in _settings(sweep).items():
        shown[name] = [value_text(value) or MISSING for value in rows[key]]
    for key in sweep.measured:
        column = column_of(key)
        shown[f"{column.title} {column.unit}".strip()] = [number_text(key, v) for v in rows[key]]
    incomplete = (sweep.missing_rows > 0) & rows.index.isin(sweep.finished.index)
    statuses = zip(rows[STATUS].map(value_text), incomplete, strict=True)
    shown[STATUS] = [f"{s or MISSING}{f' {INCOMPLETE}' * missing}" for s, missing in statuses]
    shown[FOLDER] = [value_text(folder) or MISSING for folder in rows[FOLDER]]
    return pd.DataFrame(shown).set_index("row")


def failures(sweep: Sweep) -> pd.DataFrame:
    """The message of each failed row by its settings."""
    names, rows = _settings(sweep), sweep.failed
    told = [
        ", ".join(f"{names[k]}={value_text(row[k])}" for k in names if pd.notna(row[k]))
        for _, row in rows.iterrows()
    ]
    return pd.DataFrame({"message": rows[ERROR].fillna("no message").to_numpy()}, index=told)


def _settings(sweep: Sweep) -> dict[str, str]:
    """The columns that tell rows apart, by name."""
    return sweep.names | ({SEED: SEED} if sweep.rows[SEED].notna().any() else {})
