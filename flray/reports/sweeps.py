"""The folder of a sweep as tables, figures and pages read it: rows, varied keys, best rows.

Reads `rows.parquet` (a row for each trial), `sweep.json` (counts) and `space.yaml` (what was asked
for), which `flray.sweeps` writes. Works on a sweep in progress as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flray import columns as recorded
from flray.columns import (
    ACCURACY_COLUMNS,
    CLUSTERS,
    FOLDER,
    SEED,
    STATUS,
    USES_GROUND_TRUTH,
    ScoreColumns,
    score_column,
)
from flray.config.overrides import THRESHOLD
from flray.files import reading
from flray.records.run_directory import RunDirectory
from flray.reports.columns import CLUSTERING_ERROR, measured_columns
from flray.reports.labels import component_name, readable_settings, short_names
from flray.sweeps.importance import importances
from flray.sweeps.ranking import candidates, ranks, simplest
from flray.wording import counted

Plain = Mapping[str, Any]  # Any: YAML and JSON

SPACE = "space.yaml"
DRAWN = frozenset(("choice", "uniform", "loguniform", "randint"))  # forms of a sampled key
FAILED = "failed"
NOT_FINISHED = (FAILED, "unfinished", "stopped")  # stopped: by a scheduler such as ASHA
_ALWAYS = (SEED, STATUS, recorded.ERROR, recorded.RUN, FOLDER, USES_GROUND_TRUTH)
# Columns of `configurations`; missing rows failed or did not finish.
NUM_SEEDS, SPREAD, MISSING_ROWS = "seeds", "_sd", "missing_rows"


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder: a row for each configuration and seed, and what follows from the rows.

    A *configuration* is a setting of the varied `keys`; its numbers are means over its seeds.
    `read_sweep` makes one. Everything is computed when it is first asked for. The best
    configuration is chosen by `metric`, a validation number by default.

    >>> rows = pd.DataFrame({"train.lr": [0.1, 0.1, 0.5], "seed": [0, 1, 0], "status": "done",
    ...                      "uses_ground_truth": 0.0, "validation_accuracy_mean": [0.5, 1.0, 1.0]})
    >>> sweep = Sweep(Path("out"), rows, {}, {})
    >>> sweep.keys, sweep.names, sweep.metric
    (['train.lr'], {'train.lr': 'lr'}, 'validation_accuracy_mean')
    >>> sweep.ranked[["train.lr", sweep.metric, "seeds"]].to_dict("list")
    {'train.lr': [0.5, 0.1], 'validation_accuracy_mean': [1.0, 0.75], 'seeds': [1, 2]}
    """

    path: Path
    rows: pd.DataFrame  # rows.parquet; settings are numbers or texts
    counts: Plain  # content of sweep.json
    space: Plain  # content of space.yaml
    scores: tuple[ScoreColumns, ...] = (ACCURACY_COLUMNS,)  # of its runs

    @property
    def score(self) -> ScoreColumns:
        """The score that ranks."""
        return self.scores[0]

    @property
    def title(self) -> str:
        """The varied keys, in words: "Sweep over lr, linkage"; of named methods, their number."""
        if methods := self.space.get("methods"):
            splits = self.rows["experiment"].nunique() if "experiment" in self.rows else 1
            return f"Benchmark: {counted(len(methods), 'method')} on {counted(splits, 'split')}"
        varied_keys = self.space.get("space") or self.keys  # a baseline sets other keys too
        varied = [key for key in self.keys if key in varied_keys and len(self.values(key)) > 1]
        return f"Sweep over {', '.join(short_names(varied).values())}" if varied else "Sweep"

    @property
    def metric(self) -> str:
        """The column that ranks: the space's metric, else the score on validation or test parts."""
        validation, rows = self.score.validation, self.rows
        wanted = (str(self.space.get("metric", validation)), validation)
        present = [m for m in wanted if m in rows and rows[m].notna().any()]
        return score_column(next(iter(present), self.score.mean), self.scores)

    @property
    def is_maximised(self) -> bool:
        return bool(self.space.get("mode", self.score.mode) != "min")

    @cached_property
    def keys(self) -> list[str]:
        """The settings that differ between rows, seeds aside, by dotted key.

        They come in the order of the columns of rows.parquet. `experiment` is one of them if the
        space has several experiments, `method` if it names methods.
        """
        methods = (self.space.get("methods") or {}).values()
        listed = [*self.space.get("space", {}), *(k for b in self._baselines for k in b)]
        listed += ["experiment", "method", *(key for keys in methods for key in keys)]
        settings = [c for c in self.rows if c in listed or "." in str(c)]
        settings = [c for c in settings if c not in (SEED, USES_GROUND_TRUTH)]
        return [str(key) for key in settings if self.rows[key].nunique(dropna=False) > 1]

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of the keys on pages and in figures."""
        return short_names(self.keys)

    @cached_property
    def identifying(self) -> list[str]:
        """The columns that distinguish configurations; seeds of one share all of their values.

        Each seed has a tree and thresholds of its own, so that thresholds between its merges are
        identified by their position in the tree (`merge_place`).
        """
        if recorded.MERGE_PLACE not in self.rows:
            return self.keys
        return [recorded.MERGE_PLACE if key == THRESHOLD else key for key in self.keys]

    @cached_property
    def measured(self) -> list[str]:
        """The numbers that at least one row has."""
        wanted = dict.fromkeys((*measured_columns(self.scores), self.metric))
        return [c for c in wanted if c in self.rows and self.rows[c].notna().any()]

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The rows that ran to their end and have the metric.

        Rows that a scheduler stopped early are not among them: their numbers are of fewer rounds.
        """
        rows: pd.DataFrame = self.rows[~self.rows[STATUS].isin(NOT_FINISHED)]
        return rows.dropna(subset=[self.metric])

    @cached_property
    def missing_rows(self) -> "pd.Series[int]":
        """For each row, how many rows of its configuration failed or did not finish."""
        is_missing = pd.Series(~self.rows.index.isin(self.finished.index), self.rows.index)
        by = grouping(self.rows, self.identifying)
        return is_missing.groupby(by, dropna=False).transform("sum").astype(int)

    @property
    def missing_by_folder(self) -> dict[Path, int]:
        """`missing_rows` by the folder of a row's run."""
        counts = zip(self.rows[FOLDER], self.missing_rows, strict=True)
        return {self.path / str(folder): int(n) for folder, n in counts if pd.notna(folder)}

    @cached_property
    def configurations(self) -> pd.DataFrame:
        """A row for each setting of the keys: means over `seeds` seeds, deviations in `_sd`.

        Columns are `identifying`, the means of `measured`, their deviations (`accuracy_mean_sd`),
        `seeds`, `missing_rows`, and `uses_ground_truth` as a share. Only finished rows count; a
        configuration without one is not listed.
        """
        averages = [key for key in self.keys if key not in self.identifying]
        missing = self.missing_rows.loc[self.finished.index]
        rows = self.finished.assign(**{MISSING_ROWS: missing})
        numbers = [*self.measured, *averages, USES_GROUND_TRUTH, MISSING_ROWS]
        return averaged(rows, self.identifying, numbers)

    @property
    def num_tried(self) -> int:
        """How many configurations have a row."""
        return len(self.rows.drop_duplicates(self.identifying)) if self.identifying else 1

    @cached_property
    def has_seeds(self) -> bool:
        """True if settings were repeated with several seeds."""
        return bool((self.configurations[NUM_SEEDS] > 1).any())

    def ranks(self, configurations: pd.DataFrame) -> "pd.Series[int]":
        """Ranks by the metric, 1 is best; configurations with missing rows come last.

        Equal metrics share a rank unless validation loss and clusters tell them apart (see
        `flray.sweeps.ranking.ranks`).

        Args:
            configurations: Rows of `configurations`, or some of its columns.
        """
        missing = configurations[MISSING_ROWS]
        return ranks(configurations, self.metric, missing, self.is_maximised)

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The configurations, the best first; equal ones in the order of rows."""
        rows = self.configurations
        if rows.empty:  # nothing was measured, so there is no column of the metric
            return rows
        return rows.loc[self.ranks(rows).sort_values(kind="stable").index]

    @cached_property
    def best(self) -> pd.DataFrame:
        """The configuration with the best metric: one row, or none if nothing finished."""
        return self.ranked.head(1)

    @cached_property
    def best_error(self) -> float:
        """The standard error of the best metric over its seeds; of one seed, over its clients.

        NaN if the error over clients is not recorded.
        """
        rows = self.rows_of(self.best)
        if len(rows) > 1:
            return float(rows[self.metric].to_numpy(float).std(ddof=1) / len(rows) ** 0.5)
        column = self.metric.removesuffix("_mean") + recorded.SE_CLIENTS
        return float(rows[column].mean()) if column in rows else math.nan

    @cached_property
    def simplest(self) -> pd.DataFrame:
        """The configuration with the fewest clusters within one standard error of the best.

        One row, or none if the error or the number of clusters is not recorded.
        """
        rows = self.configurations
        if self.best.empty or CLUSTERS not in rows or math.isnan(self.best_error):
            return rows[:0]
        missing = rows[MISSING_ROWS]
        return rows.loc[[simplest(rows, self.metric, missing, self.is_maximised, self.best_error)]]

    @property
    def num_left_out(self) -> int:
        """How many configurations cannot be the best, because they miss rows and others do not."""
        return int((~candidates(self.configurations[MISSING_ROWS])).sum())

    @cached_property
    def num_tied(self) -> int:
        """How many configurations have the best metric, the best itself included."""
        if self.best.empty:
            return 0
        return int((self.ranks(self.ranked[[self.metric, MISSING_ROWS]]) == 1).sum())

    @cached_property
    def baselines(self) -> pd.DataFrame:
        """The configurations that the space lists as baselines, such as FedAvg."""
        is_baseline = pd.Series(False, self.configurations.index)
        for sets in self._baselines:
            varied = {key: value for key, value in sets.items() if key in self.keys}
            if varied:
                texts = self.configurations[list(varied)].map(component_name)
                wanted = pd.Series({key: component_name(value) for key, value in varied.items()})
                is_baseline |= texts.eq(wanted).all(axis=1)
        return self.configurations[is_baseline]

    def rows_of(self, configuration: pd.DataFrame) -> pd.DataFrame:
        """The finished rows of a configuration, one per seed.

        Args:
            configuration: One row of `configurations`, such as `best`, as a frame.
        """
        if not self.identifying:
            return self.finished
        return self.finished.merge(configuration[self.identifying], on=self.identifying)

    @cached_property
    def sampled(self) -> list[str]:
        """The keys whose values were drawn or suggested, not listed.

        Figures show them as points instead of lines, and their importance can be estimated.
        """
        space = self.space.get("space") or {}
        if component_name(self.space.get("search")) == "optuna":
            return [key for key in self.keys if key in space]
        forms = {key: space[key] for key in self.keys if isinstance(space.get(key), dict)}
        return [key for key, form in forms.items() if set(form) <= DRAWN]

    @cached_property
    def importances(self) -> "pd.Series[float]":
        """The share of the metric's variance that each key explains, by name; empty for grids.

        Shares sum to 1 and descend; baselines do not count (see `flray.sweeps.importance`).
        """
        if not self.sampled:
            return pd.Series(dtype=float)
        tried = self.configurations.drop(self.baselines.index)
        keys = dict(zip(self.identifying, self.names.values(), strict=True))
        return importances(tried[list(keys)], tried[self.metric]).rename(keys)

    def is_number(self, key: str) -> bool:
        """True if all values of a setting are numbers."""
        return pd.api.types.is_numeric_dtype(self.rows[key])

    def values(self, key: str) -> list[Any]:  # Any: numbers or text
        """The distinct values of a setting: numbers ascending, text in the order of rows."""
        values = self.rows[key].dropna().unique().tolist()
        return sorted(values) if self.is_number(key) else values

    @property
    def _baselines(self) -> list[Plain]:
        baselines = self.space.get("baseline") or []
        return [baselines] if isinstance(baselines, dict) else list(baselines)


def holds_sweep(path: Path) -> bool:
    """True for the folder of a sweep that has a table, finished or in progress."""
    files = ("sweep.json", SPACE)
    return (path / "rows.parquet").is_file() and any((path / file).is_file() for file in files)


def enclosing_sweep(run: Path) -> Path | None:
    """The folder of the sweep that a run is part of, which may have no table yet; None: no sweep.

    A space.yaml alone, which a user may keep beside runs, is not a sweep.
    """
    spaces = (path for path in run.parents if (path / SPACE).is_file())
    records = ("sweep.json", "rows.parquet")
    return next((p for p in spaces if any((p / file).is_file() for file in records)), None)


def read_sweep(path: Path) -> Sweep:
    """The sweep in a folder; columns of rows.parquet that it lacks are added as missing.

    Args:
        path: A folder with rows.parquet (see `holds_sweep`).

    Raises:
        ExperimentError: rows.parquet, sweep.json or space.yaml is damaged.
    """
    with reading(path / "rows.parquet"):
        rows = pd.read_parquet(path / "rows.parquet").apply(readable_settings)
    rows = rows.reindex(columns=list(dict.fromkeys((*rows, *_ALWAYS))))
    rows[FOLDER] = rows[FOLDER].where(rows[FOLDER].notna(), rows[recorded.RUN])
    folders = (RunDirectory(path / str(folder)) for folder in rows[FOLDER].dropna())
    scores = next((run.scores() for run in folders if run.holds_run()), (ACCURACY_COLUMNS,))
    always = [str(column) for column in measured_columns(scores)]
    rows = rows.reindex(columns=list(dict.fromkeys((*rows, *always))))
    rows[USES_GROUND_TRUTH] = (rows[USES_GROUND_TRUTH] == "true").astype(float)  # mean: a share
    overlap = rows[[recorded.OVERLAP_FP, recorded.OVERLAP_FN]]
    rows[CLUSTERING_ERROR] = overlap.sum(axis=1, skipna=False)  # FLIS, Fig. 3
    counts, space = (_read_mapping(path / file) for file in ("sweep.json", SPACE))
    return Sweep(path, rows, counts, space, scores)


def averaged(rows: pd.DataFrame, keys: Sequence[str], measured: Sequence[str]) -> pd.DataFrame:
    """A row for each combination of the keys: means, deviations (ddof 1) and numbers of seeds.

    Combinations come in the order of their first row; a missing setting is a value like any other.
    Without keys, all rows are one combination.

    >>> rows = pd.DataFrame({"lr": [0.1, 0.1, 0.5], "accuracy_mean": [0.25, 0.75, 0.5]})
    >>> averaged(rows, ["lr"], ["accuracy_mean"])[["accuracy_mean", "seeds"]].to_dict("list")
    {'accuracy_mean': [0.5, 0.5], 'seeds': [2, 1]}
    """
    grouped = rows.groupby(grouping(rows, keys), dropna=False, sort=False)
    values = grouped[list(measured)]
    parts = [values.mean(), values.std().add_suffix(SPREAD), grouped.size().rename(NUM_SEEDS)]
    return pd.concat(parts, axis=1).reset_index(drop=not keys)


def grouping(rows: pd.DataFrame, keys: Sequence[str]) -> "list[pd.Series[Any]]":
    """The columns to group rows by; one group if there are no keys."""
    return [rows[key] for key in keys] or [pd.Series(0, index=rows.index, name="all")]


def left_out_note(number: int) -> str:
    """The reason why configurations cannot be the best, as a phrase without a full stop."""
    subject = "1 configuration is" if number == 1 else f"{number} configurations are"
    return f"{subject} left out of this choice: some of their rows failed or did not finish"


def _read_mapping(path: Path) -> Plain:
    if not path.is_file():
        return {}
    with reading(path):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    return content if isinstance(content, dict) else {}
