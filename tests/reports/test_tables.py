"""Published tables filled from run directories: matching, selection, seeds, ranks, formats."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from recorded import fitting
from rich.console import Console

from flray.algorithms import ALGORITHMS
from flray.cli.tables import show_table, tables_listing
from flray.config.experiment import parse_experiment, read_yaml
from flray.config.overrides import override
from flray.models.lenet5 import LeNet5
from flray.reports.published import find_table, load_tables
from flray.reports.published.filling import fill
from flray.reports.published.matching import holds
from flray.reports.published.sheet import rank, render
from flray.reports.published.tables import Cost, parse_table
from flray.reports.runs import collect_runs, find_runs
from flray.reports.sheets import numbers
from flray.reports.writers import Format

pytestmark = pytest.mark.slow

Write = Callable[..., Path]

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

THRESHOLD = "algorithm.clustering.partition.threshold"
FLHC: dict[str, Any] = {
    "dataset": {"name": "mnist"},
    "split": {"name": "pathological", "clients": 100, "holdout": 0},
    "model": {"name": "flhc_cnn", "padding": "same"},
    "algorithm": {
        "name": "flhc",
        "cohort_size": "of_all",
        "keep_pass": False,
        "rounds_before": 10,
        "clustering": {
            "signature": {"name": "update"},
            "embed": {"name": "none"},
            "distance": {"name": "l1"},
            "relate": {"name": "none"},
            "partition": {
                "name": "hierarchical",
                "linkage": "complete",
                "threshold": 3.0,
                "number": None,
                "on": "distance",
            },
        },
    },
    "train": {"optimizer": "sgd", "lr": 0.1, "epochs": 3, "batch_size": 10, "momentum": 0.0},
    "participation": 0.2,
    "rounds": 50,
    "seed": 0,
    "events": [],
    "evaluate": {"every": 1, "target": 0.99},
    "execution": {"executor": "inline"},
    "uses_ground_truth": False,
}
FEDAVG = {**FLHC, "algorithm": {"name": "fedavg"}}
FLT: dict[str, Any] = {
    **FLHC,
    "split": {"name": "label_groups", "scenario": "disjoint", "groups": 5, "clients": 100},
    "model": {"name": "mlp200"},
    "train": {"optimizer": "sgd", "lr": 0.01, "epochs": 1, "batch_size": 10},
    "rounds": 100,
    "evaluate": {"every": 1, "target": None},
}
ENCODED = {
    "name": "flt",
    "case": "rows",
    "stages": 1,
    "clustering": {
        "signature": {
            "name": "encoder_centres",
            "encoder": "encoders/conv_ae_emnist.yaml",
            "fine_tune": "none",
            "epochs": 5,
        },
        "embed": {"name": "umap"},
        "distance": {"name": "matching"},
        "relate": {"name": "threshold", "gamma": 1.0},
    },
}
DONE = {
    "clients": 100,
    "rounds": 50,
    "accuracy_mean": 0.993,
    "validation_accuracy_mean": 0.9,
    "accuracy_variance": 0.0002,
    "accuracy_se_binomial": 0.0014,
    "clients_reaching_target": 0.92,
    "accuracy_mean_after_clustering": 0.992,
    "clients_reaching_target_after_clustering": 0.91,
}
L1_COMPLETE = 8  # the row of flhc.4
ACC_AFTER, ACC_50 = "acc_post_cluster", "acc_round50"
CLIENTS_AFTER, CLIENTS_50 = "pct_clients_target_post_cluster", "pct_clients_target_round50"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A finished run below tmp_path/runs; summary and rounds are what a test says of them."""

    def write_run(
        name: str,
        config: Mapping[str, Any],
        overrides: list[str],
        rounds: list[dict[str, Any]] | None = None,
        **summary: Any,
    ) -> Path:
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        resolved = override(dict(config), overrides)
        (path / "config.yaml").write_text(yaml.safe_dump(resolved))
        held = {**DONE, "rounds": resolved["rounds"], **summary}
        (path / "summary.json").write_text(json.dumps(held))
        rows = fitting(rounds or [], held)
        pd.DataFrame(rows).to_parquet(path / "rounds.parquet")
        return path

    (tmp_path / "runs").mkdir()
    return write_run


def filled(key: str, tmp_path: Path) -> pd.DataFrame:
    return fill(find_table(key), collect_runs(tmp_path / "runs"))


def places(cells: pd.DataFrame, source: str = "ours") -> set[tuple[int, str]]:
    return {(row, column) for row, column, of in cells.index if of == source}


def ours(cells: pd.DataFrame, row: int, column: str, source: str = "ours") -> dict[str, Any]:
    return cells.loc[(row, column, source)].to_dict()


def best(tmp_path: Path, column: str) -> dict[str, Any]:
    """Ours in the row of L1 and complete linkage of flhc.4."""
    return ours(filled("flhc.4", tmp_path), L1_COMPLETE, column)


def row_of(key: str, *labels: str) -> int:
    return [row.labels for row in find_table(key).rows].index(labels)


# --- runs


def test_finished_runs_are_found_below_sweeps_and_unfinished_ones_are_not(
    write: Write, tmp_path: Path
) -> None:
    deep = write("sweep/trial_7/seed_0", FLHC, [])
    unfinished = write("unfinished", FLHC, [])
    (unfinished / "summary.json").unlink()
    foreign = write("foreign", FLHC, [])
    (foreign / "config.yaml").unlink()
    assert [run.path for run in collect_runs(tmp_path / "runs")] == [deep]


def test_runs_of_several_folders_count_once_each(write: Write, tmp_path: Path) -> None:
    first, second = write("a/run", FLHC, []), write("b/run", FLHC, ["seed=1"])
    runs = collect_runs(tmp_path / "runs/b", tmp_path / "runs/a", tmp_path / "runs")
    assert [run.path for run in runs] == [first, second]


def test_links_in_the_folder_are_followed_and_links_in_runs_are_not(
    write: Write, tmp_path: Path
) -> None:
    run = write("a", FLHC, [])
    elsewhere = write("../disk/many/b", FLHC, ["seed=1"])
    hidden = write("../hidden/c", FLHC, ["seed=2"])
    runs = tmp_path / "runs"
    (runs / "linked").symlink_to(elsewhere.parent.resolve())
    (runs / "again").symlink_to(run)  # found once
    (runs / "nowhere").symlink_to(tmp_path / "nowhere")
    (elsewhere.parent / "deeper").symlink_to(hidden.parent.resolve())
    (run / "inside").symlink_to(hidden.parent.resolve())
    assert [found.path for found in collect_runs(runs)] == [run, runs / "linked/b"]
    assert [found.path for found in find_runs([runs])[0]] == [run, runs / "linked/b"]
    assert [found.path for found in collect_runs(run)] == [run]
    assert [found.path for found in find_runs([run])[0]] == [run]


def test_rounds_are_read_only_when_asked_for(write: Write, tmp_path: Path) -> None:
    path = write("a", FLHC, [], rounds=[{"round": 1, "accuracy_mean": 0.5}])
    (run,) = collect_runs(tmp_path / "runs")
    pq.write_table(pa.Table.from_pylist([{"round": 1, "x": 2.0}]), path / "rounds.parquet")
    assert run.at(1) == {"round": 1, "x": 2.0}
    assert run.at(2) == {}
    assert run.at(50) is run.summary


# --- matching


def test_a_run_fills_its_row_and_no_other(write: Write, tmp_path: Path) -> None:
    write("a", FLHC, [])
    cells = filled("flhc.4", tmp_path)
    assert find_table("flhc.4").rows[L1_COMPLETE].labels == ("L1", "comp.")
    columns = (ACC_AFTER, ACC_50, CLIENTS_AFTER, CLIENTS_50)
    assert places(cells) == {(L1_COMPLETE, column) for column in columns}
    values = [ours(cells, L1_COMPLETE, column)["value"] for column in columns]
    assert values == pytest.approx([99.2, 99.3, 91.0, 92.0])
    assert not places(filled("flhc.5", tmp_path))


DIFFERENCES = (
    *("rounds=20", "participation=0.1", "train.epochs=1", "train.lr=0.01", "train.optimizer=adam"),
    *("split.clients=50", "split.holdout=20", "dataset.name=mnist_writers", "split.name=iid"),
    *("model.name=mlp200", "algorithm.name=fedavg", "algorithm.rounds_before=5"),
    *("algorithm.clustering.distance.name=matching", "algorithm.clustering.embed.name=pca"),
    *("algorithm.clustering.partition.number=4", "evaluate.target=0.8", "events=[{at: 5}]"),
)


def test_a_run_with_other_settings_fills_nothing(write: Write, tmp_path: Path) -> None:
    for number, difference in enumerate(DIFFERENCES):
        write(str(number), FLHC, [difference])
    cells = filled("flhc.4", tmp_path)
    assert not places(cells)
    assert not places(cells, "test")
    write("same", FLHC, [])
    assert places(filled("flhc.4", tmp_path))


@pytest.mark.parametrize("free", ["train.momentum=0.5", "algorithm.clustering.signature=weights"])
def test_what_the_paper_leaves_open_is_no_condition(
    write: Write, tmp_path: Path, free: str
) -> None:
    write("a", FLHC, [free])
    assert len(places(filled("flhc.4", tmp_path))) == 4


@pytest.mark.parametrize(("dataset", "count"), [("femnist", 4), ("mnist_writers", 0)])
def test_mnist_writers_never_fills_a_femnist_cell(
    write: Write, tmp_path: Path, dataset: str, count: int
) -> None:
    keys = [f"dataset.name={dataset}", "evaluate.target=0.8", "split={name: by_writer}"]
    write("a", FLHC, keys, clients=367)
    assert len(places(filled("flhc.6", tmp_path))) == count


def test_fractions_and_rounds_before_find_their_row(write: Write, tmp_path: Path) -> None:
    ward = ["algorithm.clustering.distance=l2", "algorithm.clustering.partition.linkage=ward"]
    write("a", FLHC, [*ward, "participation=0.5", "algorithm.rounds_before=3"])
    assert {r for r, _ in places(filled("flhc.1", tmp_path))} == {row_of("flhc.1", "0.5", "3")}


def test_an_encoder_is_known_by_what_it_was_trained_on(write: Write, tmp_path: Path) -> None:
    encoder = "algorithm.clustering.signature.encoder"
    config = {**FLT, "algorithm": ENCODED}
    write("enc1", config, [])
    write("other", config, [f"{encoder}=encoders/femnist.yaml", "seed=1"])
    cells = filled("flt.1", tmp_path)
    assert places(cells) == {(4, "MNIST.acc"), (4, "MNIST.var")}
    assert find_table("flt.1").rows[4].method == "FLT (Enc1)"
    assert ours(cells, 4, "MNIST.acc")["seeds"] == (0,)
    fashion = f"{encoder}={{dataset: {{name: fashion_mnist}}}}"
    write("not_fine_tuned", config, [fashion])
    assert {r for r, _ in places(filled("flt.1", tmp_path))} == {4}
    write("enc2", config, [fashion, "algorithm.clustering.signature.fine_tune=sequential"])
    assert {r for r, _ in places(filled("flt.1", tmp_path))} == {4, 5}


def test_accuracy_error_and_variance_are_percent(write: Write, tmp_path: Path) -> None:
    write("a", {**FLT, "algorithm": {"name": "local"}}, [])
    cells = filled("flt.1", tmp_path)
    accuracy, variance = (ours(cells, 1, f"MNIST.{name}") for name in ("acc", "var"))
    assert (accuracy["value"], accuracy["se"]) == pytest.approx((99.3, 0.14))
    assert variance["value"] == pytest.approx(2.0)


def test_a_longer_run_is_read_at_the_rows_round(write: Write, tmp_path: Path) -> None:
    config = {**FLT, "algorithm": {"name": "fedsem"}, "dataset": {"name": "cifar10"}}
    keys = ["split.scenario=ring", "model.name=lenet5", "train.epochs=5"]
    rounds = [{"round": 50, "accuracy_mean": 0.6, "accuracy_se_binomial": 0.005}]
    write("a", config, keys, rounds=rounds, accuracy_mean=0.7)
    cells = filled("flt.5", tmp_path)
    half, full = row_of("flt.5", "(100, 0.2, 5, 50)"), row_of("flt.5", "(100, 0.2, 5, 100)")
    assert places(cells) == {(half, "FedSEM"), (full, "FedSEM")}
    assert ours(cells, half, "FedSEM")["value"] == pytest.approx(60)
    assert ours(cells, full, "FedSEM")["value"] == pytest.approx(70)


def test_conditions_agree_with_the_published_settings() -> None:
    names = {
        "n_clients": ("split.clients", "summary.clients"),
        "rounds_total": ("rounds",),
        "rounds": ("rounds",),
        "participation": ("participation",),
        "client_fraction": ("participation",),
        "local_epochs": ("train.epochs",),
        "batch_size": ("train.batch_size",),
        "lr": ("train.lr",),
        "rounds_before_clustering": ("algorithm.rounds_before",),
        "distance_threshold": ("algorithm.clustering.partition.threshold",),
    }
    compared = 0
    for key, table in load_tables().items():
        if not table.match.numbers:
            continue
        for row in table.rows:
            if row.method in ("IFCA", "PerFedAvg", "SOLO"):  # with training of their own
                continue
            for column in table.columns:
                conditions = table.match.conditions(row, column)
                for name, keys in names.items():
                    stated = table.settings.get(name)
                    if isinstance(stated, dict):
                        stated = stated.get(column.entry)
                    if isinstance(stated, int | float):
                        assert stated in [conditions.get(k) for k in keys], (key, name)
                        compared += 1
                target = table.settings.get("target_accuracy")
                assert target is None or conditions["evaluate.target"] == target / 100
    assert compared > 500


def test_a_new_table_needs_no_python(write: Write, tmp_path: Path) -> None:
    match = {
        "runs": {"rounds": {"at_least": 20}, "split.clients": [50, 100], "dataset.name": "mnist"},
        "columns": {"easy": {"split.name": "pathological"}, "hard": {"split.name": "iid"}},
        "methods": {"mine": {"algorithm.name": "flhc"}},
        "numbers": {"acc": {"key": "accuracy_mean"}},
    }
    rows = [{"method": "mine", "values": {"easy": {"mean": 90.0}, "hard": {"mean": 80.0}}}]
    raw = {"paper": "P", "table": 1, "caption": "c", "columns": ["easy", "hard"], "rows": rows}
    table = parse_table("new.1", {**raw, "match": match}, Cost(None, ""))
    write("a", FLHC, [])
    cells = fill(table, collect_runs(tmp_path / "runs"))
    assert places(cells) == {(0, "easy")}
    assert ours(cells, 0, "easy")["value"] == pytest.approx(99.3)
    assert ours(cells, 0, "easy", "difference")["value"] == pytest.approx(9.3)


def test_an_unknown_condition_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown condition 'atleast'"):
        holds(3, {"atleast": 2})


def test_the_algorithm_of_every_cell_is_there() -> None:
    """Which the listing says of every table that is not of formulas."""
    tables = [table for table in load_tables().values() if not table.is_formulas]
    cells = [(t.match, row, column) for t in tables for row in t.rows for column in t.columns]
    wanted = {match.conditions(*cell)["algorithm.name"] for match, *cell in cells}
    assert {"flhc", "flt", "repa"} < wanted <= set(ALGORITHMS)


def test_flhc_as_flray_resolves_it_fills_its_cells(write: Write, tmp_path: Path) -> None:
    plain = {
        "dataset": "mnist",
        "split": {"name": "pathological", "clients": 100},
        "model": "flhc_cnn",
        "algorithm": {"name": "flhc", "clustering": {"distance": "l2"}},
        "train": {"lr": 0.1, "epochs": 3},
        "participation": 0.2,
        "rounds": 50,
        "evaluate": {"target": 0.99},
    }
    write("a", parse_experiment(plain).plain, [])
    assert {r for r, _ in places(filled("flhc.4", tmp_path))} == {row_of("flhc.4", "L2", "ward")}
    assert {r for r, _ in places(filled("flhc.1", tmp_path))} == {row_of("flhc.1", "0.2", "10")}


@pytest.mark.parametrize(
    ("name", "overrides", "cell"),
    [
        ("cifar10", [], (("REPA", "SAE"), "concept_drift_and_label_skew")),
        ("cifar10_labels", ["model.encoder=clf"], (("REPA", "CLF"), "label_skew")),
        (
            "cifar10_drift",
            ["algorithm=wd", "algorithm.clustering.signature={name: update, epochs: 2}"],
            (("WD", "f=2"), "concept_drift"),
        ),
    ],
)
def test_repa_as_flray_resolves_it_fills_its_cells(
    write: Write, tmp_path: Path, name: str, overrides: list[str], cell: tuple[tuple[str, ...], str]
) -> None:
    plain = read_yaml(EXPERIMENTS / "repa" / f"{name}.yaml")
    config = parse_experiment(override(plain, overrides)).plain
    write("a", config, [], robustness=0.5, robustness_se=0.125, clients=80)
    cells = filled("repa.1", tmp_path)
    labels, column = cell
    place = (row_of("repa.1", *labels), column)
    assert places(cells) == {place}
    found = ours(cells, *place)
    assert (found["value"], found["se"]) == (0.5, 0.125)  # shares, as the paper prints them
    text = text_of("md", "repa.1", tmp_path)
    assert "se is the standard error over clusters" in text
    assert "binomial" not in text


# 50 epochs of every client, alone.
SOLO = ["algorithm=local", "participation=1", "rounds=50", "train.epochs=1", "evaluate.every=50"]
SOLO += ["evaluate.fine_tune=null"]


# Table, experiment file and overrides of a run, and the method, partition and value of its cell.
DIRICHLET = "split={name: dirichlet, clients: 100, alpha: 0.1, server: 2500}"
PER_FEDAVG = ["algorithm=per_fedavg", "train.lr=0.001"]
FLIS_RUNS = [
    ("flis.1", "cifar10_dc", [], ("FLIS (DC)", "label_skew_20"), 55),
    ("flis.1", "cifar10_hc", ["split.share=0.3"], ("FLIS (HC)", "label_skew_30"), 55),
    ("flis.1", "cifar10_dc", ["algorithm=fedavg"], ("FedAvg", "label_skew_20"), 50),
    ("flis.1", "cifar10_dc", PER_FEDAVG, ("PerFedAvg", "label_skew_20"), 55),
    ("flis.1", "cifar10_dc", ["algorithm=cfl"], ("CFL", "label_skew_20"), 40),
    ("flis.1", "cifar10_dc", SOLO, ("SOLO", "label_skew_20"), 40),
    ("flis.2", "cifar10_dc", [DIRICHLET], ("FLIS (DC)", "dirichlet_0.1"), 60),
    ("flis.4", "cifar10_unseen", [], ("FLIS (DC)", "label_skew_20"), 70),
    ("flis.4", "cifar10_unseen", ["algorithm=scaffold"], ("SCAFFOLD", "label_skew_20"), 50),
    (
        "flis.4",
        "cifar10_unseen",
        ["algorithm=local", "evaluate.fine_tune.epochs=25"],
        ("SOLO", "label_skew_20"),
        70,
    ),
]


def test_flis_as_flray_resolves_it_fills_its_cells(write: Write, tmp_path: Path) -> None:
    """Each run fills one cell of one table, alone. The global methods show one model on all test
    data, CFL and SOLO models on the clients' own as they are, the others those that clients
    trained last, or with Dirichlet splits and newcomers models after fine-tuning.
    """
    accuracies = {
        "accuracy_mean": 0.4,
        "global_accuracy_mean": 0.5,
        "last_trained_accuracy_mean": 0.55,
        "tuned_accuracy_mean": 0.6,
        "tuned_holdout_accuracy_mean": 0.7,
    }
    expected: dict[str, dict[tuple[str, ...], tuple[float, tuple[Path]]]] = {}
    for number, (key, name, overrides, cell, value) in enumerate(FLIS_RUNS):
        plain = override(read_yaml(EXPERIMENTS / "flis" / f"{name}.yaml"), overrides)
        path = write(str(number), parse_experiment(plain).plain, [], **accuracies)
        expected.setdefault(key, {})[(*cell, "CIFAR-10")] = (pytest.approx(value), (path,))
    runs = collect_runs(tmp_path / "runs")
    for key in ("flis.1", "flis.2", "flis.3", "flis.4"):
        cells, rows = fill(find_table(key), runs), find_table(key).rows
        shown = {
            (rows[r].method, rows[r].settings["partition"], column): (
                number["value"],
                number["runs"],
            )
            for r, column in places(cells)
            for number in [ours(cells, r, column)]
        }
        assert shown == expected.get(key, {})


def test_pfllib_shows_the_best_round_of_each_run(write: Write, tmp_path: Path) -> None:
    """Models as they are in plain runs, and after fine-tuning where runs fine-tune."""
    plain = read_yaml(EXPERIMENTS / "pfllib" / "fashion_mnist_dirichlet.yaml")
    rounds = [{"round": t, "accuracy_weighted": a} for t, a in ((100, 0.5), (200, 0.7), (300, 0.6))]
    after = [row | {"tuned_accuracy_weighted": row["accuracy_weighted"] + 0.1} for row in rounds]
    tuned = "evaluate={every: 100, fine_tune: {epochs: 10}}"
    runs = {"FedAvg": [], "FedAvg fine-tuned": [tuned], "FedBABU": ["algorithm=fedbabu", tuned]}
    for name, keys in runs.items():
        config = parse_experiment(override(plain, keys)).plain
        last = {"accuracy_weighted": 0.6} | ({"tuned_accuracy_weighted": 0.7} if keys else {})
        write(name, config, [], rounds=after if keys else rounds, **last)
    write("shorter", parse_experiment(override(plain, ["rounds=200"])).plain, [], rounds=rounds[:2])
    cells = filled("pfllib.1", tmp_path)
    shown = {
        row: ours(cells, row_of("pfllib.1", row), "dirichlet")["value"]
        for row in ("FedAvg", "FedAvg fine-tuned", "FedBABU")
    }
    assert shown == pytest.approx({"FedAvg": 70, "FedAvg fine-tuned": 80, "FedBABU": 80})
    assert len(places(cells)) == 3
    assert "round with the best test number" in str(render(find_table("pfllib.1"), cells, "md"))


@pytest.mark.parametrize(("algorithm", "key"), [("flis_hc", "last_trained"), ("fedavg", "global")])
@pytest.mark.parametrize(("share", "column"), [(0.2, "rounds"), (0.3, "mb")])
def test_flis_table_3_has_rounds_of_one_split_and_megabits_of_the_other(
    write: Write, tmp_path: Path, algorithm: str, key: str, share: float, column: str
) -> None:
    plain = read_yaml(EXPERIMENTS / "flis" / "cifar10_hc.yaml")
    judged = ["evaluate.every=1", "evaluate.last_trained=true", "evaluate.fine_tune=null"]
    overrides = [f"algorithm={algorithm}", f"split.share={share}", *judged]
    numbers = {f"{key}_rounds_to_target": 24, f"{key}_model_megabits_to_target": 10.5}
    write("a", parse_experiment(override(plain, overrides)).plain, [], **numbers)
    cells, rows = filled("flis.3", tmp_path), find_table("flis.3").rows
    ((r, place),) = places(cells)
    assert place == f"CIFAR-10.{column}"
    assert rows[r].method == {"flis_hc": "FLIS (HC)", "fedavg": "FedAvg"}[algorithm]
    assert ours(cells, r, place)["value"] == {"rounds": 24, "mb": 10.5}[column]


@pytest.mark.parametrize(("algorithm", "row"), [("flis_hc", "FLIS (HC)"), ("lg_fedavg", "LG")])
def test_megabits_on_fashion_mnist_are_shown_with_the_papers_parameters_and_with_ours(
    write: Write, tmp_path: Path, algorithm: str, row: str
) -> None:
    """The paper counts LeNet-5 of three channels; LG-FedAvg sends its last two layers, which have
    as many parameters in both."""
    ours_, papers = (
        sum(p.numel() for p in LeNet5((channels, size, size), 10).parameters())
        for channels, size in ((1, 28), (3, 32))
    )
    assert (ours_, papers) == (44_426, 62_006)
    plain = read_yaml(EXPERIMENTS / "flis" / "fashion_mnist_hc.yaml")
    judged = ["evaluate.every=1", "evaluate.last_trained=true", "evaluate.fine_tune=null"]
    overrides = [f"algorithm={algorithm}", "split.share=0.3", *judged]
    number = {"last_trained_model_megabits_to_target": 4.5}
    write("a", parse_experiment(override(plain, overrides)).plain, [], **number)
    cells, r = filled("flis.3", tmp_path), row_of("flis.3", row)
    assert places(cells) == {(r, "FMNIST.mb"), (r, "FMNIST.mb_ours")}
    assert ours(cells, r, "FMNIST.mb_ours")["value"] == 4.5
    factor = 1 if algorithm == "lg_fedavg" else papers / ours_
    assert ours(cells, r, "FMNIST.mb")["value"] == pytest.approx(4.5 * factor)


@pytest.mark.parametrize(
    ("algorithm", "row"), [("flt", "FLT (Enc2)"), ("pca_km_hc", "PCA+kM+HC"), ("local", "Local")]
)
def test_flt_as_flray_resolves_it_fills_its_cells(
    write: Write, tmp_path: Path, algorithm: str, row: str
) -> None:
    plain = {
        "dataset": "mnist",
        "split": {"name": "label_groups", "clients": 100},
        "model": "mlp200",
        "algorithm": algorithm,
        "participation": 0.2,
    }
    write("a", parse_experiment(plain).plain, [])
    assert {r for r, _ in places(filled("flt.1", tmp_path))} == {row_of("flt.1", row)}


# --- selection and seeds


def test_selection_is_by_validation_and_the_papers_way_is_kept_beside_it(
    write: Write, tmp_path: Path
) -> None:
    threshold = "algorithm.clustering.partition.threshold"
    validated = write(
        "a", FLHC, [f"{threshold}=1.0"], validation_accuracy_mean=0.95, accuracy_mean=0.90
    )
    tested = write(
        "b", FLHC, [f"{threshold}=2.0"], validation_accuracy_mean=0.94, accuracy_mean=0.97
    )
    cells = filled("flhc.4", tmp_path)
    cell, by_test = (ours(cells, L1_COMPLETE, ACC_50, source) for source in ("ours", "test"))
    assert (cell["value"], cell["runs"]) == (pytest.approx(90), (validated,))
    assert (by_test["value"], by_test["runs"]) == (pytest.approx(97), (tested,))
    assert cell["varied"] == (threshold,)


def test_variance_is_of_the_run_whose_accuracy_is_selected(write: Write, tmp_path: Path) -> None:
    config = {**FLT, "algorithm": {"name": "local"}}
    write("a", config, ["train.momentum=0.0"], accuracy_mean=0.9, accuracy_variance=0.01)
    write("b", config, ["train.momentum=0.5"], accuracy_mean=0.8, accuracy_variance=0.001)
    by_test = ours(filled("flt.1", tmp_path), 1, "MNIST.var", "test")
    assert by_test["value"] == pytest.approx(100)


def test_without_a_choice_nothing_is_test_selected(write: Write, tmp_path: Path) -> None:
    write("a", FLHC, ["seed=0"])
    write("b", FLHC, ["seed=1"])
    assert not places(filled("flhc.4", tmp_path), "test")
    assert best(tmp_path, ACC_50)["varied"] == ()


def test_a_choice_without_validation_is_only_made_the_papers_way(
    write: Write, tmp_path: Path
) -> None:
    for threshold in (1.0, 2.0):
        keys = [f"{THRESHOLD}={threshold}"]
        write(f"at_{threshold}", FLHC, keys, validation_accuracy_mean=None)
    cells = filled("flhc.4", tmp_path)
    assert not places(cells)
    assert (L1_COMPLETE, ACC_50) in places(cells, "test")


def test_runs_of_equal_settings_are_no_choice(write: Write, tmp_path: Path) -> None:
    """One experiment in two sweeps, on other devices: the lower digest is taken, 0.8."""
    digests = {"a": ("d1", "cpu", 0.9), "b": ("c1", "cuda", 0.8)}
    for name, (digest, device, accuracy) in digests.items():
        numbers = {"accuracy_mean": accuracy, "params_sha256": digest}
        keys = [f"execution.device={device}"]
        write(name, FLHC, keys, validation_accuracy_mean=None, **numbers)
    cells = filled("flhc.4", tmp_path)
    assert not places(cells, "test")
    assert ours(cells, L1_COMPLETE, ACC_50)["value"] == pytest.approx(80)


def test_runs_with_the_same_models_and_numbers_are_no_choice(write: Write, tmp_path: Path) -> None:
    """One experiment evaluated in other rounds for two tables; another model is a choice."""
    shared = {"validation_accuracy_mean": None, "params_sha256": "d1"}
    for every in (1, 50):
        write(f"every_{every}", FLHC, [f"evaluate.every={every}"], **shared)
    cells = filled("flhc.4", tmp_path)
    assert (L1_COMPLETE, ACC_50) in places(cells)
    assert not places(cells, "test")
    write("other", FLHC, ["evaluate.every=25"], **{**shared, "params_sha256": "d2"})
    assert not places(filled("flhc.4", tmp_path))


def test_a_configuration_with_a_missing_seed_is_chosen_after_complete_ones(
    write: Write, tmp_path: Path
) -> None:
    """Threshold 2.0 has the better validation in seed 0, but its seed 1 never finished."""
    for seed in (0, 1):
        keys = [f"seed={seed}", f"{THRESHOLD}=1.0"]
        write(f"a{seed}", FLHC, keys, accuracy_mean=0.9, validation_accuracy_mean=0.90)
        keys = [f"seed={seed}", f"{THRESHOLD}=2.0"]
        path = write(f"b{seed}", FLHC, keys, accuracy_mean=0.95, validation_accuracy_mean=0.95)
    (path / "summary.json").unlink()
    cell = best(tmp_path, ACC_50)
    assert (cell["value"], cell["seeds"]) == (pytest.approx(90), (0, 1))
    assert cell["missing_seeds"] == 0
    assert cell["left_out"] == (tmp_path / "runs" / "b0",)
    text = text_of("md", "flhc.4", tmp_path)
    assert "1 run is left out of the choice" in text
    assert "‡" not in text


def test_a_configuration_with_a_missing_seed_is_marked_where_it_fills_a_cell(
    write: Write, tmp_path: Path
) -> None:
    write("a", FLHC, ["seed=0"])
    (write("b", FLHC, ["seed=1"]) / "summary.json").unlink()
    (write("again", FLHC, ["seed=0"]) / "summary.json").unlink()  # of seed 0 there is a run
    cell = best(tmp_path, ACC_50)
    assert (cell["seeds"], cell["missing_seeds"]) == ((0,), 1)
    assert "**99.3‡**" in text_of("md", "flhc.4", tmp_path)
    assert "‡ a seed of this configuration failed" in text_of("md", "flhc.4", tmp_path)
    assert r"99.3$\ddagger$" in text_of("latex", "flhc.4", tmp_path)
    lines = csv.DictReader(io.StringIO(text_of("csv", "flhc.4", tmp_path)))
    assert {line["missing_seeds"] for line in lines if line["ours"]} == {"1"}


def test_missing_seeds_of_a_sweep_are_those_of_its_table(write: Write, tmp_path: Path) -> None:
    """Each seed has thresholds of its own, at the same places between the merges of its tree."""
    found = [
        (0, 0, 1.1, 0.90, "done"),
        (0, 1, 1.2, 0.91, "done"),
        (1, 0, 2.1, 0.95, "done"),
        (1, 1, 2.2, None, "failed"),
    ]
    rows = []
    for place, seed, threshold, validation, status in found:
        name = f"runs/{place}{seed}"
        path = write(
            f"sweep/{name}",
            FLHC,
            [f"seed={seed}", f"{THRESHOLD}={threshold}"],
            accuracy_mean=validation,
            validation_accuracy_mean=validation,
        )
        if validation is None:
            (path / "summary.json").unlink()
        row = {"row": len(rows), "status": status, "run": name, "folder": name, "seed": seed}
        row |= {"validation_accuracy_mean": validation, "merge_place": place}
        rows.append(row | {THRESHOLD: threshold})
    sweep = tmp_path / "runs" / "sweep"
    pd.DataFrame(rows).to_parquet(sweep / "rows.parquet")
    (sweep / "space.yaml").write_text(yaml.safe_dump({"space": {THRESHOLD: {"between_merges": 2}}}))
    prefix = write("sweep/cache/prefix/x/run", FLHC, ["seed=0", f"{THRESHOLD}=1.1"])
    (prefix / "summary.json").unlink()
    cell = best(tmp_path, ACC_50)
    assert cell["runs"] == (sweep / "runs/00", sweep / "runs/01")
    assert cell["missing_seeds"] == 0
    assert cell["left_out"] == (sweep / "runs/10",)


def test_a_run_that_diverged_does_not_count(write: Write, tmp_path: Path) -> None:
    write("a", FLHC, [], accuracy_mean=None)
    cells = filled("flhc.4", tmp_path)
    assert (L1_COMPLETE, ACC_50) not in places(cells)
    assert (L1_COMPLETE, ACC_AFTER) in places(cells)


def test_seeds_are_averaged_with_their_spread(write: Write, tmp_path: Path) -> None:
    paths = [
        write(f"s{seed}", FLHC, [f"seed={seed}"], accuracy_mean=accuracy)
        for seed, accuracy in enumerate((0.97, 0.98, 0.99))
    ]
    cell = best(tmp_path, ACC_50)
    assert (cell["value"], cell["error"]) == pytest.approx((98, 1))  # squares 1 + 0 + 1 over 3 - 1
    assert (cell["seeds"], cell["runs"]) == ((0, 1, 2), tuple(paths))


# --- ratio to FedAvg


def fedavg_rounds(at_11: float, at_50: float, reaching: float = 0.5) -> list[dict[str, Any]]:
    return [
        {"round": t, "accuracy_mean": accuracy, "clients_reaching_target": reaching}
        for t, accuracy in ((10, 0.1), (11, at_11), (50, at_50))
    ]


def test_ratios_are_to_fedavg_at_the_same_round_and_seed(write: Write, tmp_path: Path) -> None:
    same = ["dataset.download=true", "evaluate.every=10", "execution.executor=ray"]
    for seed in (0, 1):
        write(
            f"flhc{seed}",
            FLHC,
            [f"seed={seed}"],
            accuracy_mean_after_clustering=0.8,
            accuracy_mean=0.9,
        )
    base = write(
        "fedavg", FEDAVG, [*same, "seed=1"], fedavg_rounds(at_11=0.4, at_50=0.6), accuracy_mean=0.6
    )
    write("another_problem", FEDAVG, ["seed=0", "split.clients=50"], fedavg_rounds(0.1, 0.1))
    cells = filled("flhc.4", tmp_path)
    after, last = ours(cells, L1_COMPLETE, ACC_AFTER), ours(cells, L1_COMPLETE, ACC_50)
    assert (after["ratio"], last["ratio"]) == (pytest.approx(2.0), pytest.approx(1.5))
    assert after["baselines"] == last["baselines"] == (base,)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_several_fedavg_runs_one_that_has_the_round_is_taken(
    write: Write, tmp_path: Path, names: tuple[str, str]
) -> None:
    write("flhc", FLHC, [], accuracy_mean_after_clustering=0.8)
    write(names[0], FEDAVG, ["evaluate.every=50"], fedavg_rounds(0.4, 0.6)[2:])
    has_it = write(names[1], FEDAVG, ["evaluate.every=1"], fedavg_rounds(0.4, 0.6))
    cell = best(tmp_path, ACC_AFTER)
    assert (cell["ratio"], cell["baselines"]) == (pytest.approx(2), (has_it,))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_which_of_equal_fedavg_runs_is_taken_does_not_depend_on_their_folders(
    write: Write, tmp_path: Path, names: tuple[str, str]
) -> None:
    """As on two kinds of devices, whose bits differ."""
    write("flhc", FLHC, [], accuracy_mean=0.9)
    write(names[0], FEDAVG, [], fedavg_rounds(0.4, 0.6), accuracy_mean=0.6, params_sha256="1f")
    write(names[1], FEDAVG, [], fedavg_rounds(0.4, 0.5), accuracy_mean=0.5, params_sha256="0e")
    assert best(tmp_path, ACC_50)["ratio"] == pytest.approx(1.8)


def test_a_ratio_needs_the_same_split(write: Write, tmp_path: Path) -> None:
    write("flhc", FLHC, [], split_sha256="one")
    write("fedavg", FEDAVG, [], fedavg_rounds(0.4, 0.6), split_sha256="another")
    cell = best(tmp_path, ACC_50)
    assert (cell["has_ratio"], cell["baselines"]) == (False, ())


def test_a_ratio_to_nothing_is_empty(write: Write, tmp_path: Path) -> None:
    write("flhc", FLHC, [])
    write("fedavg", FEDAVG, [], fedavg_rounds(0.4, 0.6, reaching=0.0), clients_reaching_target=0)
    cell = best(tmp_path, CLIENTS_AFTER)
    assert math.isnan(cell["ratio"])
    assert cell["baselines"]
    assert "**91.0** (–) [1]<br>paper 91.0 (6.5x)" in text_of("md", "flhc.4", tmp_path)


# --- ranks


@pytest.fixture
def compared(write: Write) -> None:
    """Local 97, FedAvg 98, FLT (Enc1) 96 on MNIST; the paper has 97.41, 82.73 and 97.98."""
    for name, algorithm, accuracy in (
        ("local", {"name": "local"}, 0.97),
        ("fedavg", {"name": "fedavg"}, 0.98),
        ("flt", ENCODED, 0.96),
    ):
        write(name, {**FLT, "algorithm": algorithm}, [], accuracy_mean=accuracy)


@pytest.mark.usefixtures("compared")
def test_ranks_are_among_the_methods_that_both_have(tmp_path: Path) -> None:
    ranked = rank(find_table("flt.1"), filled("flt.1", tmp_path))
    by_title = dict(list(ranked.groupby("comparison")))
    assert set(by_title) == {"MNIST acc.", "MNIST var."}
    accuracy = by_title["MNIST acc."]
    fedavg, local, flt = (0, "MNIST.acc"), (1, "MNIST.acc"), (4, "MNIST.acc")
    assert accuracy["ours"].to_dict() == {fedavg: 1, local: 2, flt: 3}
    assert accuracy["paper"].to_dict() == {fedavg: 3, local: 2, flt: 1}
    assert accuracy["spearman"].tolist() == pytest.approx([-1] * 3)
    # All our variances are equal, so they share rank 1; the paper's least is best.
    variance = by_title["MNIST var."]
    assert variance["ours"].tolist() == [1, 1, 1]
    assert variance["paper"].to_dict() == {
        (0, "MNIST.var"): 3,
        (1, "MNIST.var"): 2,
        (4, "MNIST.var"): 1,
    }
    assert variance["spearman"].isna().all()


def test_blocks_are_ranked_apart() -> None:
    table = find_table("flis.1")
    value = {
        (r, c.key): row.cells[c.key].value
        for r, row in enumerate(table.rows)
        for c in table.columns
    }
    known = {place: each for place, each in value.items() if each is not None}
    both = {(*place, of): {"value": x} for place, x in known.items() for of in ("ours", "paper")}
    ranked = rank(table, numbers(both))
    assert ranked.groupby("comparison").size().tolist() == [11] * (2 * 4)
    assert (ranked["ours"] == ranked["paper"]).all()
    assert ranked["ours"].max() > 9
    assert ranked["spearman"].iloc[0] == pytest.approx(1)


def test_columns_are_ranked_where_methods_are_columns() -> None:
    table = find_table("flt.5")
    values = {"FedSEM": 3.0, "FLT_enc1": 1.0, "FLT_enc2": 2.0}
    cells = {(0, name, "ours"): {"value": value} for name, value in values.items()}
    printed = {
        (0, c.key, "paper"): {"value": table.rows[0].cells[c.key].value} for c in table.columns
    }
    ranked = rank(table, numbers(cells | printed))
    assert set(ranked["comparison"]) == {"(100, 0.2, 1, 50)"}
    assert ranked["ours"].to_dict() == {(0, "FedSEM"): 1, (0, "FLT_enc1"): 3, (0, "FLT_enc2"): 2}
    assert ranked["paper"].to_dict() == {(0, "FedSEM"): 3, (0, "FLT_enc1"): 1, (0, "FLT_enc2"): 2}


# --- formats


@pytest.fixture
def swept(write: Write) -> None:
    """Two thresholds, two seeds, FedAvg; the second threshold is better on test, not validation."""
    for seed in (0, 1):
        for threshold, validation, test in ((1.0, 0.95, 0.970), (2.0, 0.94, 0.980)):
            keys = [f"seed={seed}", f"algorithm.clustering.partition.threshold={threshold}"]
            write(
                f"sweep/{threshold}/seed_{seed}",
                FLHC,
                [*keys, "uses_ground_truth=true"],
                uses_ground_truth=True,
                validation_accuracy_mean=validation,
                accuracy_mean=test + 0.002 * seed,
            )
        write(
            f"fedavg/seed_{seed}",
            FEDAVG,
            [f"seed={seed}", "uses_ground_truth=false"],
            fedavg_rounds(0.8, 0.9),
            accuracy_mean=0.9,
        )


def text_of(form: Format, key: str, tmp_path: Path) -> str:
    return str(render(find_table(key), filled(key, tmp_path), form))


def shown(key: str, folder: Path, form: Format = "rich", width: int = 120) -> str:
    """What the command prints of a table."""
    console = Console(width=width, record=True, file=io.StringIO())
    show_table(key, [folder], form, console)
    return console.export_text()


@pytest.mark.usefixtures("swept")
def test_csv_has_a_line_a_cell_with_the_runs_behind_it(tmp_path: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(text_of("csv", "flhc.4", tmp_path))))
    assert len(lines) == 10 * 4
    assert all(None not in line and None not in line.values() for line in lines)
    (line,) = (x for x in lines if x["row"] == "L1, comp." and x["column"] == ACC_50)
    numbers = {name: float(line[name]) for name in ("ours", "std", "seeds", "paper", "ratio")}
    assert numbers == pytest.approx(
        {"ours": 97.1, "std": 0.1 * 2**0.5, "seeds": 2, "paper": 99.3, "ratio": 0.971 / 0.9}
    )
    assert float(line["difference"]) == pytest.approx(-2.2)
    assert float(line["test_selected"]) == pytest.approx(98.1)
    assert line["uses_ground_truth"] == "True"
    runs = tmp_path / "runs"
    assert line["runs"] == ";".join(str(runs / f"sweep/1.0/seed_{s}") for s in (0, 1))
    assert line["fedavg_runs"] == ";".join(str(runs / f"fedavg/seed_{s}") for s in (0, 1))
    assert line["test_selected_runs"].startswith(str(runs / "sweep/2.0"))
    (empty,) = (x for x in lines if x["row"] == "L2, ward" and x["column"] == ACC_50)
    assert (empty["ours"], empty["runs"], empty["paper"]) == ("", "", "99.5")


@pytest.mark.parametrize(("used", "marked"), [(True, True), (False, False), (None, True)])
def test_a_run_is_marked_if_it_used_ground_truth_not_if_it_was_allowed_to(
    write: Write, tmp_path: Path, used: bool | None, marked: bool
) -> None:
    """Runs recorded before that was known are marked where they were allowed to."""
    known = {} if used is None else {"uses_ground_truth": used}
    write("a", FLHC, ["uses_ground_truth=true"], **known)
    assert best(tmp_path, ACC_50)["uses_ground_truth"] == marked


@pytest.mark.usefixtures("swept")
def test_markdown_has_equal_columns_and_lists_the_runs(tmp_path: Path) -> None:
    text = text_of("md", "flhc.4", tmp_path)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 10
    assert {line.count("|") for line in table} == {7}
    lines = ("**97.1†** ± 0.1 (1.1x) [1]", "paper 99.3 (1.0x)", "diff. -2.2")
    assert "<br>".join([*lines, "test 98.1† ± 0.1 (1.1x) [2]"]) in table[2 + L1_COMPLETE]
    assert table[2].startswith("| cos. | ave. | –<br>paper 89.3 (1.0x) |")
    assert "mean over 2 seeds" in text
    assert table[3].startswith("|  | comp. |")
    sweep, fedavg = (tmp_path / "runs" / name for name in ("sweep/1.0", "fedavg"))
    behind = [f"{folder}/seed_{seed}" for folder in (sweep, fedavg) for seed in (0, 1)]
    assert f"1. {behind[0]}, {behind[1]}; FedAvg: {behind[2]}, {behind[3]}" in text
    assert "differ in algorithm.clustering.partition.threshold." in text
    assert "† uses ground truth" in text
    assert "4 of 40 cells are filled" in text


@pytest.mark.usefixtures("swept")
def test_latex_has_balanced_columns(tmp_path: Path) -> None:
    for key in ("flhc.4", "flis.1", "flis.3", "flt.5", "flt.6"):
        text = text_of("latex", key, tmp_path)
        found = re.search(r"\\begin\{tabular\}\{(l+)\}\n\\toprule\n(.*)\\bottomrule", text, re.S)
        assert found is not None
        rows = [r for r in found[2].splitlines() if not r.startswith((r"\midrule", r"\cline"))]
        assert len(rows) > 3
        for row in rows:
            assert row.endswith(r" \\")
            spanned = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert len(re.findall(r"(?<!\\)&", row)) + 1 + sum(spanned) == len(found[1])
        assert not re.search(r"(?<!\\)[%_#]", found[2])
    assert r"97.1$\dagger$ $\pm$ 0.1 (1.1x)" in text_of("latex", "flhc.4", tmp_path)


@pytest.mark.usefixtures("swept")
def test_the_terminal_shows_ours_above_the_papers(tmp_path: Path) -> None:
    text = shown("flhc.IV", tmp_path / "runs")
    for words in ("97.1†±0.1 (1.1x) [1]", "paper 99.3 (1.0x)", "diff. -2.2", "test 98.1†±0.1"):
        assert words in text
    table = text[: text.index("cells are filled")].splitlines()
    assert max(len(line.rstrip()) for line in table[2:]) <= 100
    assert "6 finished runs" in text


def test_a_table_without_a_filled_cell_says_which_conditions_are_not_met(
    write: Write, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    assert "no cell is filled: 0 finished runs below" in shown("flhc.1", runs)
    assert "flray sweep flhc_table1 runs what fills it" in shown("flhc.1", runs)
    config = override(dict(FLHC), ["algorithm.clustering.partition.linkage=ward"])
    config = override(config, ["algorithm.clustering.distance.name=l2"])
    near = write("near", config, ["participation=0.3", "dataset.name=digits"])
    write("far", config, ["participation=0.3", "dataset.name=digits", "train.lr=9.0", "rounds=2"])
    text = shown("flhc.1", runs)
    assert f"nearest is {near} for " in text
    assert "dataset.name is digits, expected mnist; " in text
    assert "participation is 0.3, expected 0.1" in text
    write("good", config, ["participation=0.2"])
    assert "no cell is filled" not in shown("flhc.1", runs)


def test_a_run_that_lacks_the_number_of_a_cell_is_told_so(write: Write, tmp_path: Path) -> None:
    plain = read_yaml(EXPERIMENTS / "flis" / "cifar10_dc.yaml")
    write("a", parse_experiment(plain).plain, [])
    assert "last_trained_accuracy_mean is not recorded" in shown("flis.1", tmp_path / "runs")


@pytest.mark.usefixtures("compared")
def test_ranks_are_written_below_the_table(tmp_path: Path) -> None:
    expected = "| MNIST acc. | FedAvg 1/3, Local 2/2, FLT (Enc1) 3/1 | -1.00 |"
    text = text_of("md", "flt.1", tmp_path)
    assert expected in text
    assert "**98.00** se 0.14 [1]<br>paper 82.73 ± 0.38<br>diff. +15.27" in text


@pytest.mark.parametrize("form", ["rich", "md", "latex", "csv"])
def test_every_table_is_written_without_any_run(form: Format, tmp_path: Path) -> None:
    for key, table in load_tables().items():
        text = shown(key, tmp_path, form, width=200)
        assert table.rows[-1].labels[0].replace("_", " ") in text.replace("_", " ")
        if form == "rich":
            assert "0 finished runs below" in text


def test_a_formula_stands_alone_and_notes_name_their_rows(tmp_path: Path) -> None:
    assert "| FedSEM | 2*rho*M*W_local*T | 0 | 2*rho*M*W_local |" in text_of(
        "md", "flt.6", tmp_path
    )
    assert "- Paper, 1.0, 3: did not complete." in text_of("md", "flhc.3", tmp_path)
    assert "FedAvg; FedProx; FedNova; SCAFFOLD: FMNIST" in text_of("md", "flis.1", tmp_path)


def test_the_listing_says_cost_and_what_is_missing() -> None:
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(tables_listing())
    lines = console.export_text().splitlines()
    (repa,) = (line for line in lines if " repa.1 " in line)
    assert "624,000" in repa
    assert "its algorithms are there" in repa
    assert "no run records its numbers yet" not in repa
    (flis,) = (line for line in lines if " flis.3 " in line)
    assert "its algorithms are there" in flis
    assert sum(bool(re.search(r"^│ \w+\.\d ", line)) for line in lines) == 21
