"""A sweep's folder as figures and pages read it: rows, what was varied, what was best."""

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flray import columns as recorded
from flray.columns import CLUSTERS, FOLDER, SEED, STATUS, USES_GROUND_TRUTH
from flray.config.deciding import leaves
from flray.config.overrides import THRESHOLD
from flray.files import reading
from flray.reports.columns import CLUSTERING_ERROR, MEASURED, TEST, VALIDATION
from flray.sweeps.importance import importances
from flray.sweeps.ranking import candidates, ranks, simplest

Plain = Mapping[str, Any]  # Any: YAML and JSON

SPACE = "space.yaml"
DRAWN = frozenset(("choice", "uniform", "loguniform", "randint"))  # forms of a sampled key
FAILED = "failed"
NOT_FINISHED = (FAILED, "unfinished", "stopped")  # stopped: by the scheduler, as ASHA does
_ALWAYS = (SEED, STATUS, recorded.ERROR, recorded.RUN, FOLDER, USES_GROUND_TRUTH, *MEASURED)
# Columns of `configurations`; missing are rows that failed or did not finish.
NUM_SEEDS, SPREAD, MISSING_ROWS = "seeds", "_sd", "missing_rows"


@dataclass(frozen=True)
class Sweep:
    path: Path
    rows: pd.DataFrame  # settings are numbers or text
    counts: Plain  # sweep.json
    space: Plain  # space.yaml

    @property
    def title(self) -> str:
        """What was varied, in words."""
        given = self.space.get("space") or self.keys  # a baseline sets other keys too
        varied = [key for key in self.keys if key in given and len(self.values(key)) > 1]
        return f"Sweep over {', '.join(short_names(varied).values())}" if varied else "Sweep"

    @property
    def metric(self) -> str:
        """What ranks configurations: the space's metric, else validation, else test accuracy."""
        wanted = (self.space.get("metric", VALIDATION), VALIDATION)
        return next((str(m) for m in wanted if m in self.rows and self.rows[m].notna().any()), TEST)

    @property
    def is_maximised(self) -> bool:
        return bool(self.space.get("mode", "max") != "min")

    @cached_property
    def keys(self) -> list[str]:
        """The settings that differ between rows, seeds aside."""
        given = [*self.space.get("space", {}), *(k for b in self._baselines for k in b)]
        named = [c for c in self.rows if c in given or c == "experiment" or "." in str(c)]
        named = [c for c in named if c not in (SEED, USES_GROUND_TRUTH)]
        return [str(column) for column in named if self.rows[column].nunique(dropna=False) > 1]

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of the keys on pages and in figures."""
        return short_names(self.keys)

    @cached_property
    def telling(self) -> list[str]:
        """The keys whose values tell configurations apart; seeds share all of them.

        Thresholds between the merges of a seed's own tree are alike where their places are.
        """
        if recorded.MERGE_PLACE not in self.rows:
            return self.keys
        return [recorded.MERGE_PLACE if key == THRESHOLD else key for key in self.keys]

    @cached_property
    def measured(self) -> list[str]:
        """The numbers that at least one row has."""
        wanted = dict.fromkeys((*MEASURED, self.metric))
        return [c for c in wanted if c in self.rows and self.rows[c].notna().any()]

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The rows that ran to their end and have the metric."""
        rows: pd.DataFrame = self.rows[~self.rows[STATUS].isin(NOT_FINISHED)]
        return rows.dropna(subset=[self.metric])

    @cached_property
    def missing_rows(self) -> "pd.Series[int]":
        """For each row, how many rows of its configuration failed or did not finish."""
        is_missing = pd.Series(~self.rows.index.isin(self.finished.index), self.rows.index)
        by = _by(self.rows, self.telling)
        counts: pd.Series[int] = is_missing.groupby(by, dropna=False).transform("sum").astype(int)
        return counts

    @property
    def missing_by_folder(self) -> dict[Path, int]:
        """`missing_rows` by the folder of a row's run."""
        named = zip(self.rows[FOLDER], self.missing_rows, strict=True)
        return {self.path / str(folder): int(n) for folder, n in named if pd.notna(folder)}

    @cached_property
    def configurations(self) -> pd.DataFrame:
        """A row for each setting of the keys: means over `seeds` seeds, spreads in `_sd`."""
        own = [key for key in self.keys if key not in self.telling]
        missing = self.missing_rows.loc[self.finished.index]
        rows = self.finished.assign(**{MISSING_ROWS: missing})
        return averaged(rows, self.telling, [*self.measured, *own, USES_GROUND_TRUTH, MISSING_ROWS])

    @property
    def num_tried(self) -> int:
        """How many configurations have a row."""
        return len(self.rows.drop_duplicates(self.telling)) if self.telling else 1

    @cached_property
    def has_seeds(self) -> bool:
        """True if settings were repeated with several seeds."""
        return bool((self.configurations[NUM_SEEDS] > 1).any())

    def ranks(self, configurations: pd.DataFrame) -> "pd.Series[int]":
        """Their ranks by the metric; those with missing rows come after complete ones."""
        missing = configurations[MISSING_ROWS]
        return ranks(configurations, self.metric, missing, self.is_maximised)

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The configurations, the best first."""
        rows = self.configurations
        if rows.empty:  # of nothing measured there is no column of the metric
            return rows
        return rows.loc[self.ranks(rows).sort_values(kind="stable").index]

    @cached_property
    def best(self) -> pd.DataFrame:
        """The configuration with the best metric, a row; none where nothing finished."""
        return self.ranked.head(1)

    @cached_property
    def best_error(self) -> float:
        """The standard error of the best metric: over its seeds, of one seed over its clients; NaN
        where the clients' is not recorded."""
        rows = self.rows_of(self.best)
        if len(rows) > 1:
            return float(rows[self.metric].to_numpy(float).std(ddof=1) / len(rows) ** 0.5)
        column = self.metric.removesuffix("_mean") + recorded.SE_CLIENTS
        return float(rows[column].mean()) if column in rows else math.nan

    @cached_property
    def simplest(self) -> pd.DataFrame:
        """The configuration with the fewest clusters within one standard error of the best, a row;
        none where the error or the number of clusters is not known."""
        rows = self.configurations
        if self.best.empty or CLUSTERS not in rows or math.isnan(self.best_error):
            return rows[:0]
        missing = rows[MISSING_ROWS]
        return rows.loc[[simplest(rows, self.metric, missing, self.is_maximised, self.best_error)]]

    @property
    def num_left_out(self) -> int:
        """Configurations that are no candidates for the best, since others are complete."""
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
            own = {key: value for key, value in sets.items() if key in self.keys}
            if own:
                texts = self.configurations[list(own)].map(_name_of)
                wanted = pd.Series({key: _name_of(value) for key, value in own.items()})
                is_baseline |= texts.eq(wanted).all(axis=1)
        return self.configurations[is_baseline]

    def rows_of(self, configuration: pd.DataFrame) -> pd.DataFrame:
        """The rows, a seed each, that a configuration is the mean of."""
        if not self.telling:
            return self.finished
        return self.finished.merge(configuration[self.telling], on=self.telling)

    @cached_property
    def sampled(self) -> list[str]:
        """The keys whose values were drawn or suggested, not listed."""
        given = self.space.get("space") or {}
        if _name_of(self.space.get("search")) == "optuna":
            return [key for key in self.keys if key in given]
        forms = {key: given[key] for key in self.keys if isinstance(given.get(key), dict)}
        return [key for key, form in forms.items() if set(form) <= DRAWN]

    @cached_property
    def importances(self) -> "pd.Series[float]":
        """By name, how much of the metric's variance each key explains in a sampled sweep."""
        if not self.sampled:
            return pd.Series(dtype=float)
        tried = self.configurations.drop(self.baselines.index)
        keys = dict(zip(self.telling, self.names.values(), strict=True))
        return importances(tried[list(keys)], tried[self.metric]).rename(keys)

    def is_number(self, key: str) -> bool:
        return pd.api.types.is_numeric_dtype(self.rows[key])

    def values(self, key: str) -> list[Any]:  # Any: numbers or text
        """The distinct values of a setting: numbers ascending, text in the order of rows."""
        found = self.rows[key].dropna().unique().tolist()
        return sorted(found) if self.is_number(key) else found

    @property
    def _baselines(self) -> list[Plain]:
        given = self.space.get("baseline") or []
        return [given] if isinstance(given, dict) else list(given)


def holds_sweep(path: Path) -> bool:
    files = ("sweep.json", SPACE)
    return (path / "rows.parquet").is_file() and any((path / file).is_file() for file in files)


def enclosing_sweep(run: Path) -> Path | None:
    """The folder of the sweep that a run is part of; it may have no table yet.

    A user's own space.yaml beside runs makes no sweep.
    """
    spaces = (path for path in run.parents if (path / SPACE).is_file())
    records = ("sweep.json", "rows.parquet")
    return next((p for p in spaces if any((p / file).is_file() for file in records)), None)


def read_sweep(path: Path) -> Sweep:
    with reading(path / "rows.parquet"):
        rows = pd.read_parquet(path / "rows.parquet").apply(_settings_column)
    rows = rows.reindex(columns=list(dict.fromkeys((*rows, *_ALWAYS))))
    rows[FOLDER] = rows[FOLDER].where(rows[FOLDER].notna(), rows[recorded.RUN])
    rows[USES_GROUND_TRUTH] = (rows[USES_GROUND_TRUTH] == "true").astype(float)  # mean: a share
    overlap = rows[[recorded.OVERLAP_FP, recorded.OVERLAP_FN]]
    rows[CLUSTERING_ERROR] = overlap.sum(axis=1, skipna=False)  # FLIS, Fig. 3
    return Sweep(path, rows, _read_mapping(path / "sweep.json"), _read_mapping(path / SPACE))


def averaged(rows: pd.DataFrame, keys: Sequence[str], measured: Sequence[str]) -> pd.DataFrame:
    """A row for each combination of the keys: means, spreads (ddof 1) and numbers of seeds."""
    grouped = rows.groupby(_by(rows, keys), dropna=False, sort=False)
    values = grouped[list(measured)]
    parts = [values.mean(), values.std().add_suffix(SPREAD), grouped.size().rename(NUM_SEEDS)]
    return pd.concat(parts, axis=1).reset_index(drop=not keys)


def left_out_note(number: int) -> str:
    """Why configurations are no candidates for the best."""
    counted = "1 configuration is" if number == 1 else f"{number} configurations are"
    return f"{counted} left out of this choice: some of their rows failed or did not finish"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The end of each dotted key, as long as it takes to tell them apart.

    >>> short_names(["algorithm.clustering.distance.name", "train.lr", "pretrain.lr"]).values()
    dict_values(['distance', 'train.lr', 'pretrain.lr'])
    """
    parts = {key: key.removesuffix(".name").split(".") for key in keys}
    ends = [each[-1] for each in parts.values()]
    return {
        key: each[-1] if ends.count(each[-1]) == 1 else ".".join(each[-2:])
        for key, each in parts.items()
    }


def _by(rows: pd.DataFrame, keys: Sequence[str]) -> "list[pd.Series[Any]]":
    """The columns to group rows by; one group if there are no keys."""
    return [rows[key] for key in keys] or [pd.Series(0, index=rows.index, name="all")]


def _settings_column(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Numbers as they are; other columns as numbers if all values are, else as text. Mappings are
    labelled by the component they name and by what tells it from the others."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        return column
    text = column.map(_text, na_action="ignore").astype(object)
    given = text.dropna().unique().tolist()
    if any(each.startswith("{") for each in given):
        text = text.map(dict(zip(given, component_labels(given), strict=True)), na_action="ignore")
    numbers = pd.to_numeric(text, errors="coerce")
    whole = numbers.notna().sum() == text.notna().sum() > 0
    return numbers if whole else text.where(text.notna(), None)


def component_labels(texts: Sequence[str]) -> list[str]:
    """Labels of components, which are given by name or as mappings in JSON: the name, and in
    brackets the keys that others of the same name do not have or have with another value.

    >>> component_labels(['{"name": "fedprox", "mu": 1}', '{"name": "fedprox", "mu": 2}', "cfl"])
    ['fedprox (mu 1)', 'fedprox (mu 2)', 'cfl']
    """
    fields = [_fields(text) for text in texts]
    names = short_names(list(dict.fromkeys(key for each in fields for key in each)))
    labels = []
    for text, own in zip(texts, fields, strict=True):
        alike = [each for each in fields if each.get("name") == own.get("name")]
        telling = [k for k in own if any(k not in e or e[k] != own[k] for e in alike)]
        told = ", ".join(f"{names[key]} {own[key]}" for key in telling)
        parts = [str(own["name"])] * ("name" in own) + [f"({told})"] * bool(told)
        labels.append(" ".join(parts) or text)
    return labels


def _fields(text: str) -> Plain:
    """The keys and values of a component; any other text is its name."""
    try:
        held = json.loads(text)
    except ValueError:  # a name, or a message that begins with a bracket
        held = text
    return leaves(held) if isinstance(held, dict) else {"name": text}


def _text(value: Hashable) -> str:
    if isinstance(value, str) and value.startswith('"') and value.endswith('"'):
        return str(json.loads(value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _name_of(value: Any) -> str:  # Any: YAML
    """The name of a component that is given by its name or as a mapping."""
    return str(value.get("name")) if isinstance(value, dict) else str(value)


def _read_mapping(path: Path) -> Plain:
    if not path.is_file():
        return {}
    with reading(path):
        held = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    return held if isinstance(held, dict) else {}
