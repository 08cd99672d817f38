"""The spaces in tune_spaces/: what they vary, and that table spaces fill their tables."""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search.sample import Domain

from flray.algorithms import ALGORITHMS
from flray.cli.tables import tables_listing
from flray.clustering import STAGES
from flray.config.overrides import THRESHOLD, with_value
from flray.reports.configuration import value_at
from flray.reports.published import find_table, load_tables
from flray.reports.published.filling import fits
from flray.reports.runs import RunRecord
from flray.sweeps.folder import SPACE, open_folder
from flray.sweeps.forms import BetweenMerges, Grid
from flray.sweeps.keys import canonical
from flray.sweeps.rows import SweepRow, _baselines, _varied, known_and_examples
from flray.sweeps.space import OptunaSearch, RandomSearch, Space, read_space

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tune_spaces").rglob("*.yaml"))
OF_TABLES = [path for path in FILES if re.fullmatch(r"\w+_table\d+", path.stem)]
# On downloaded data, without a table of a paper to fill.
BESIDE = (
    "clustered_benchmark",
    "flhc_figure5",
    "flhc_figures",
    "flhc_iid",
    "flhc_iid_metrics",
    "flhc_pixels",
    "flhc_writers",
    "flhc_writers_metrics",
    "flis_baselines",
    "flis_beta",
    "flis_curves",
    "flis_dirichlet",
    "flis_svhn_recut",
    "flt_cifar10_signatures",
    "flt_mixed",
    "flt_samples",
    "flt_writers",
    "planted_mnist",
    "repa_correlation",
    "repa_mild_drift",
    "repa_mnist",
    "repa_pipelines",
    "repa_writers",
)
COMPARISONS = [path for path in FILES if path.stem in BESIDE]
OF_PARAMETERS = [path for path in FILES if path not in [*OF_TABLES, *COMPARISONS]]
EMBEDDED = {"digits", "synthetic"}

CLUSTERING = "algorithm.clustering"
PARAMETERS = [
    f"{CLUSTERING}.relate.gamma",
    f"{CLUSTERING}.distance",
    f"{CLUSTERING}.partition.linkage",
    THRESHOLD,
    f"{CLUSTERING}.partition.number",
    f"{CLUSTERING}.signature.k",
    f"{CLUSTERING}.signature.epochs",  # J
    f"{CLUSTERING}.embed.n_components",
    "algorithm.rounds_before",
    "participation",
    "train.epochs",
    "split.clients",  # M
]

by_name = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


# Thousands of rows of one kind: some stand for all.
PARTS = {
    "clustered_benchmark": ["splits=mnist_label_swap,mnist_dirichlet", "seeds=1"],
    "clustered_benchmark_digits": ["seeds=1"],
}


@functools.cache
def space_of(path: Path) -> Space:
    return read_space(path, PARTS.get(path.stem, []))


@functools.cache
def rows_of(path: Path) -> tuple[SweepRow, ...]:
    known, examples = known_and_examples(space_of(path))
    return known + examples


def test_there_are_spaces_of_all_kinds() -> None:
    assert len(OF_TABLES) > 0
    assert len(OF_PARAMETERS) > 0
    assert len(COMPARISONS) > 0


def test_a_space_is_listed_in_the_docs() -> None:
    text = (ROOT / "docs" / "spaces.md").read_text()
    for path in FILES:
        paper = path.stem.rpartition("_table")[0]
        is_listed = f"`{path.stem}`" in text
        assert is_listed or (path in OF_TABLES and f"{paper}_table1` … `{paper}_table" in text), (
            path
        )


def test_a_space_opens_with_its_command() -> None:
    """And says what it shows."""
    for path in FILES:
        command = rf"# flray sweep tune_spaces/{path.stem}\.yaml( .*)?\n# "
        assert re.match(command, path.read_text()), path


@by_name
def test_a_space_can_be_read_from_the_folder_of_its_sweep(path: Path, tmp_path) -> None:
    """Where experiments, anchors and what was typed are one mapping."""
    space = read_space(path, ["concurrency=3"])
    open_folder(tmp_path, space, {})
    assert read_space(tmp_path / SPACE).plain == space.plain


@by_name
def test_every_combination_and_every_baseline_adds_a_row(path: Path) -> None:
    """Rows that repeat are folded into one: a key without effect would make fewer of them."""
    space = space_of(path)
    alone = [_baselines(replace(space, baselines=(each,))) for each in space.baselines]
    is_adaptive = isinstance(space.options.search, OptunaSearch)
    assert len(rows_of(path)) >= 2
    if not alone:
        assert is_adaptive or len(rows_of(path)) == num_combinations(space)
        return
    parts = [
        {told(row) for row in rows} for rows in (() if is_adaptive else _varied(space), *alone)
    ]
    assert is_adaptive or len(parts[0]) == num_combinations(space)
    for place, own in enumerate(parts[1:], start=1):
        others = set().union(*(part for k, part in enumerate(parts) if k != place))
        assert own - others, place


def told(row: SweepRow) -> str:
    return canonical([row.plain, str(row.merge_point)])


def num_combinations(space: Space) -> int:
    """What the lists of all experiments and methods multiply to, less what `except` leaves out."""
    number = 0
    for name, (method, own) in itertools.product(space.experiments, space.methods.items()):
        lists: dict[str, list[Any]] = {"experiment": [name], "method": [method]}
        for key, values in (own | space.varied).items():
            if isinstance(values, Grid):
                lists[key] = list(values.values)
            elif isinstance(values, BetweenMerges):
                lists[key] = list(range(values.number))
        for values in itertools.product(*lists.values()):
            row = dict(zip(lists, values, strict=True))
            number += not any(all(row[k] in v for k, v in out.items()) for out in space.excluded)
    search = space.options.search
    drawn = any(isinstance(values, Domain) for values in space.varied.values())
    draws = search.samples if drawn and isinstance(search, RandomSearch) else 1
    return number * draws


# --- parameters


@pytest.mark.parametrize("key", PARAMETERS)
def test_a_parameter_is_varied_while_everything_else_stays(key: str) -> None:
    assert any(len({value_of(row, key) for row in rows}) > 1 for rows in differing_in(key))


@pytest.mark.parametrize("stage", list(STAGES))
def test_every_registered_stage_is_compared_while_the_others_stay(stage: str) -> None:
    key = f"{CLUSTERING}.{stage}"
    names = [{value_at(row.plain, f"{key}.name") for row in rows} for rows in differing_in(key)]
    assert set().union(*(found for found in names if len(found) > 1)) == set(STAGES[stage])


def test_spaces_that_say_so_need_no_download() -> None:
    embedded = [path for path in FILES if "(embedded data, no download)" in path.read_text()]
    assert len(embedded) > len(OF_PARAMETERS) / 2
    for row in itertools.chain(*map(rows_of, embedded)):
        keys = ("dataset.name", f"{CLUSTERING}.signature.encoder.dataset.name")
        assert {value_at(row.plain, key) for key in keys} <= EMBEDDED | {None}


def differing_in(key: str) -> list[list[SweepRow]]:
    """Rows of a parameter space that agree in everything but this key and what is below it."""
    groups = defaultdict(list)
    for path in OF_PARAMETERS:
        for row in rows_of(path):
            point = None if key == THRESHOLD else str(row.merge_point)
            rest = canonical([with_value(row.plain, key, None), point])
            groups[path, rest].append(row)
    return list(groups.values())


def value_of(row: SweepRow, key: str) -> str:
    """What the row says; for a threshold between merges something stands in for what is found."""
    if key == THRESHOLD and row.merge_point is not None:
        return str(row.merge_point)
    return canonical(value_at(row.plain, key))


# --- tables


def cells(key: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Every cell of a table that a run could fill, with what a run must be for that."""
    table = find_table(key)
    for row, column in itertools.product(table.rows, table.columns):
        if table.match.metric(row, column) is not None:
            place = (key, row.method, column.entry, row.title, column.key)
            yield place, table.match.conditions(row, column)


def would_fit(row: SweepRow, conditions: dict[str, Any]) -> bool:
    """As far as can be said before it is run: of a summary only the number of clients is known."""
    clients = value_at(row.plain, "split.clients")
    summary = {} if clients is None else {"clients": clients}
    known = {
        key: wanted
        for key, wanted in conditions.items()
        if not key.startswith("summary.") or key.removeprefix("summary.") in summary
    }
    return fits(RunRecord(Path(), row.plain, summary), known)


def is_divisor(row: SweepRow, fitting: list[SweepRow]) -> bool:
    """Is it the FedAvg run of the same problem, to which the table gives ratios?"""
    problems = [{**each.plain, "algorithm": None} for each in fitting]
    is_fedavg = value_at(row.plain, "algorithm.name") == "fedavg"
    return is_fedavg and {**row.plain, "algorithm": None} in problems


def key_of(path: Path) -> str:
    paper, _, number = path.stem.rpartition("_table")
    return f"{paper}.{number}"


@pytest.mark.parametrize("path", OF_TABLES, ids=lambda path: path.stem)
def test_every_row_of_a_table_space_belongs_in_its_table(path: Path) -> None:
    wanted = [conditions for _, conditions in cells(key_of(path))]
    rows = rows_of(path)
    fitting = [row for row in rows if any(would_fit(row, each) for each in wanted)]
    others = [row for row in rows if row not in fitting]
    if find_table(key_of(path)).has_ratios:
        assert others, "FedAvg, for the ratios"
        others = [row for row in others if not is_divisor(row, fitting)]
    assert [row.overrides for row in others] == []


SPACES = {key: f"tune_spaces/{t.space}" for key, t in load_tables().items() if t.space}


@pytest.mark.parametrize("key", list(SPACES))
def test_a_table_space_fills_every_cell_whose_method_is_there(key: str) -> None:
    rows = rows_of(ROOT / SPACES[key])
    places = {
        place: any(would_fit(row, conditions) for row in rows)
        for place, conditions in cells(key)
        if conditions["algorithm.name"] in ALGORITHMS
    }
    assert any(places.values())
    empty = {place for place, is_filled in places.items() if not is_filled}
    assert empty == set()


def test_the_listing_names_the_space_of_every_table_that_has_one() -> None:
    assert {ROOT / path for path in SPACES.values()} == set(OF_TABLES)
    assert {key_of(path) for path in OF_TABLES} <= set(SPACES) <= set(load_tables())
    names, _, _, states = (column.cells for column in tables_listing().columns)
    for key, state in zip(names, states, strict=True):
        named = re.findall(r"flray sweep (\S+)", str(state))
        assert named == ([SPACES[str(key)]] if key in SPACES else [])
