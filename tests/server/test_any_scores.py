"""Scores of any task, from predictions to summary, sweep, table and page."""

import copy
import json
import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from meters import Copying, Meters, Owners, OwnScores, Tokens
from recorded import write_sweep
from sklearn import metrics

import flray
from flray.columns import ScoreColumns, score_column
from flray.config.experiment import parse_experiment
from flray.data.owned import Rows
from flray.errors import ExperimentError
from flray.measures.scores import ClientScores, rounds_to_target, summarise
from flray.records.run_directory import RunDirectory
from flray.reports.comparison import comparison_sheet
from flray.reports.lines import line_of_run
from flray.reports.page import render_page
from flray.reports.runs import by_experiment, find_runs, read_run
from flray.reports.sweep_tables import row_texts, top_sheet
from flray.reports.sweeps import read_sweep
from flray.reports.writers import to_csv, to_markdown
from flray.sweeps.describing import describe_space, planned_rows
from flray.sweeps.rows import expand
from flray.sweeps.space import parse_space
from flray.sweeps.table import best_of

pytestmark = pytest.mark.slow

MAE = ScoreColumns("mae", "kW")
METERS = {
    "dataset": Meters(),
    "split": Owners(),
    "model": "linear",
    "algorithm": "fedavg",
    "train": {"lr": 0.05, "epochs": 2, "batch_size": 5},
    "rounds": 2,
    "evaluate": {"scores": [{"name": "mae", "unit": "kW"}, "rmse", "r2", "mape"], "target": 1.5},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("meters")
    algorithms = ["fedavg", {"name": "flhc", "rounds_before": 1}]
    return flray.run(METERS, out, algorithm=algorithms)


def test_scores_of_numbers_are_those_of_sklearn_for_every_client(measured) -> None:
    result, data = measured["fedavg"], Meters().load()
    split = Owners().split(data, 0)
    rows = result.clients.query("part == 'test' and round == 2").set_index("client")
    expected = {
        "mae": metrics.mean_absolute_error,
        "rmse": metrics.root_mean_squared_error,
        "r2": metrics.r2_score,
        "mape": metrics.mean_absolute_percentage_error,
    }
    for client, ids in enumerate(split.test):
        with torch.no_grad():
            predicted = result.model(client)(torch.from_numpy(data.images[ids])).numpy()
        for name, score in expected.items():
            wanted = score(data.labels[ids].astype(float), predicted.astype(float))
            assert rows.loc[client, name] == pytest.approx(wanted, rel=1e-5), (client, name)
    assert list(result.clients) == [
        *("round", "client", "part", "total", "mae", "rmse", "r2", "mape", "loss", "model", "group")
    ]


def test_the_first_score_decides_worst_client_and_target(measured) -> None:
    result = measured["fedavg"]
    last = result.clients.query("part == 'test' and round == 2")["mae"]
    summary = result.summary
    assert summary["mae_mean"] == pytest.approx(last.mean())
    assert summary["mae_worst"] == summary["mae_worst_decile"] == last.max() > last.mean()
    assert summary["r2_worst"] == result.clients.query("part == 'test' and round == 2")["r2"].min()
    assert summary["clients_reaching_target"] == (last <= 1.5).mean()
    assert 0 < summary["clients_reaching_target"] < 1
    means = result.rounds["mae_mean"]
    reached = means <= 1.5
    assert summary["rounds_to_target"] == (int(result.rounds["round"][reached].min()) or None)
    assert [summary[key] for key in ("score", "score_unit", "score_mode")] == ["mae", "kW", "min"]
    assert not [column for column in result.rounds if "accuracy" in column]
    clustered = measured["flhc"].summary
    assert clustered["mae_mean_after_clustering"] == pytest.approx(means[1])
    assert clustered["validation_mae_mean_after_clustering"] > 0


def test_lines_tables_and_pages_name_the_score_with_its_unit(measured) -> None:
    folder = measured["fedavg"].path
    row = RunDirectory(folder).rows()[-1]
    line = line_of_run(row, folder, {"rounds": 2})
    assert f"mae {row['mae_mean']:.4f} kW · worst client {row['mae_worst']:.4f} kW" in line
    runs, _ = find_runs([folder.parent])
    experiments = by_experiment(runs)
    sheet = comparison_sheet(experiments)
    assert "| mae kW |" in to_markdown(sheet)
    assert "test mae (kW),test mae (kW) ±" in to_csv(sheet)
    assert "var. kW²" in to_markdown(sheet)
    page = render_page(runs, [])
    for text in ("test mae", "test rmse", "worst client", "Mae by round and by client"):
        assert text in page
    assert f"{row['mae_mean']:.4f} ± " in page
    assert "target 1.5000 kW" in page
    assert "accuracy" not in page.replace("-accuracy", "").lower()


def test_clients_have_the_names_of_the_data_in_tables_and_pages(tmp_path) -> None:
    x = np.random.default_rng(0).random((60, 2))
    owner = np.repeat(["tiny", "north_ward", "east_ward", "south_ward"], [3, 20, 17, 20])
    rule = {"partition": {"name": "hierarchical", "number": 2}}
    result = flray.run(
        *(METERS, tmp_path / "run"),
        dataset=(x, x[:, 0]),
        clients=owner,
        split={"name": "natural", "min_samples": 10},  # client 0 is not the first owner
        algorithm={"name": "flhc", "rounds_before": 1, "clustering": rule},
    )
    assert result.client_names == ("east_ward", "north_ward", "south_ward")
    names = result.clients.set_index("client")["name"]
    assert all(names[i].eq(name).all() for i, name in enumerate(result.client_names))
    page = render_page(*find_runs([tmp_path / "run"]))
    for name in result.client_names:
        assert f">{name}<" in page
    assert ">tiny<" not in page


def test_kinds_of_clients_have_the_names_of_the_data(tmp_path) -> None:
    x, owner = np.random.default_rng(0).random((60, 2)), np.repeat(["a", "b", "c"], 20)
    kind = np.where(owner == "b", "watch", "phone")
    result = flray.run(
        *(METERS, tmp_path / "run"),
        dataset=Rows(x, x[:, 0], client=owner, group=kind).dataset("meters"),
        split="natural",
    )
    assert find_runs([result.path])[0][0].group_names == ("phone", "watch")


def test_an_unfinished_run_knows_its_score(tmp_path) -> None:
    rows = []
    with pytest.raises(KeyboardInterrupt):
        flray.run(METERS, tmp_path / "run", rounds=3, on_round=lambda row: _interrupt(rows, row))
    run = read_run(tmp_path / "run")
    assert run.summary is None
    assert run.score == MAE
    assert run.numbers["mae_mean"] == rows[0]["mae_mean"]


def _interrupt(rows, row):
    rows.append(row)
    raise KeyboardInterrupt


def test_numbers_have_the_mean_absolute_error_if_no_score_is_named(measured) -> None:
    result = flray.run({**METERS, "evaluate": {}})
    assert result.summary["score"] == "mae"
    assert result.summary["mae_mean"] == measured["fedavg"].summary["mae_mean"]


FINE_TUNED = METERS["evaluate"] | {"fine_tune": {"epochs": 1}, "last_trained": True}


def test_engines_give_the_same_scores() -> None:
    loop, vectorized = (
        flray.run(METERS, execution={"engine": engine, "precision": "float64"}, evaluate=FINE_TUNED)
        for engine in ("loop", "vectorized")
    )
    columns = [c for c in loop.rounds if c.startswith(("mae_", "r2_", "tuned_mae"))]
    assert len(columns) > 10
    np.testing.assert_allclose(loop.rounds[columns], vectorized.rounds[columns], rtol=1e-10)


@pytest.mark.usefixtures("cluster")
@pytest.mark.long
def test_actors_predict_sequences_as_one_process() -> None:
    pool = {"executor": "ray", "actors": {"count": 2, "num_cpus": 0.1}, "block": 2}
    keys = {"dataset": Tokens(), "model": {"name": "char_gru", "hidden": 4}, "rounds": 1}
    keys["evaluate"] = {"scores": ["perplexity", "accuracy"]}
    runs = [flray.run(METERS | keys, execution=execution) for execution in ({"block": 2}, pool)]
    here, there = (run.summary for run in runs)
    assert here["params_sha256"] == there["params_sha256"]
    assert here["perplexity_worst"] == there["perplexity_worst"] > 1


def test_a_regression_that_is_stopped_goes_on_to_the_same_bits(tmp_path) -> None:
    """With a schedule, moments at the server, a clustering and an early end."""
    keys = METERS | {
        "algorithm": {"name": "flhc", "rounds_before": 1},
        "train": METERS["train"] | {"lr": {"start": 0.2, "decay": 0.9}},
        "aggregate": {"optimizer": "fedyogi", "server_lr": 0.3},
        "stop": {"patience": 2},
        "rounds": 30,
    }
    whole = flray.run(keys).summary
    assert (whole["ended_by"], whole["score_mode"]) == ("patience", "min")
    assert 2 < whole["best_round"] < whole["rounds"] < 30
    for _ in range(2):  # after the clustering, and one round later
        with pytest.raises(KeyboardInterrupt):
            flray.run(keys, tmp_path / "run", resume=True, on_round=lambda row: _interrupt([], row))
    summary = flray.run(keys, tmp_path / "run", resume=True).summary
    same = [key for key in whole if not key.startswith("seconds")]
    assert [summary[key] for key in same] == [whole[key] for key in same]


@pytest.mark.usefixtures("cluster")
@pytest.mark.long
def test_actors_give_the_scores_of_one_process() -> None:
    pool = {"executor": "ray", "actors": {"count": 2, "num_cpus": 0.1}, "block": 2}
    here, there = (
        flray.run(METERS, execution=execution, evaluate=FINE_TUNED, rounds=1)
        for execution in ({"block": 2}, pool)
    )
    assert here.summary["params_sha256"] == there.summary["params_sha256"]
    columns = [column for column in here.clients if column != "model"]
    assert here.clients[columns].equals(there.clients[columns])
    assert here.summary["tuned_mae_mean"] < here.summary["mae_mean"]
    assert here.summary["last_trained_mae_mean"] == there.summary["last_trained_mae_mean"]


def test_more_scores_of_classes_change_nothing_of_accuracy(known_run) -> None:
    plain = known_run()
    scored = known_run("evaluate.scores=[accuracy, perplexity, macro_f1, auroc]")
    assert plain.summary["params_sha256"] == scored.summary["params_sha256"]
    assert "score" not in plain.summary
    assert "scores" not in json.loads((plain.path / "environment.json").read_text())
    same = [c for c in plain.rounds if not c.startswith("seconds")]
    assert plain.rounds[same].equals(scored.rounds[same])
    assert plain.clients.equals(scored.clients[list(plain.clients)])
    test = scored.clients.query("part == 'test'")
    np.testing.assert_allclose(test["perplexity"], np.exp(test["loss"]), rtol=1e-6)
    assert test["perplexity"].min() < test["perplexity"].max()
    worst = scored.rounds["perplexity_worst"]
    assert np.allclose(worst, test.groupby("round")["perplexity"].max())


def test_another_first_score_of_classes_ranks(known_run) -> None:
    result = known_run("evaluate.scores=[macro_f1, accuracy]", "evaluate.target=0.2")
    assert result.summary["score"] == "macro_f1"
    last = result.clients.query("part == 'test' and round == round.max()")
    assert result.summary["clients_reaching_target"] == (last["macro_f1"] >= 0.2).mean()
    assert (last["accuracy"] == last["correct"] / last["total"]).all()


def test_a_score_of_ones_own_is_named_by_its_path(tmp_path) -> None:
    result = flray.run(METERS, tmp_path / "run", evaluate={"scores": ["meters:Pinball", "mae"]})
    assert result.summary["score"] == "pinball"
    half = result.clients["mae"] / 2
    np.testing.assert_allclose(result.clients["pinball"], half, rtol=1e-6)
    assert read_run(tmp_path / "run").score == ScoreColumns("pinball")


def test_a_metric_of_torchmetrics_ranks_as_any_score(tmp_path) -> None:
    metric = {"name": "torchmetrics", "metric": "MeanAbsoluteError", "unit": "kW"}
    result = flray.run(METERS, tmp_path / "run", evaluate={"scores": [metric, "mae"]})
    np.testing.assert_allclose(result.clients["mean_absolute_error"], result.clients["mae"])
    assert read_run(tmp_path / "run").score == ScoreColumns("mean_absolute_error", "kW")
    again = flray.run(result._record.config | {k: METERS[k] for k in ("dataset", "split")})
    assert again.summary["params_sha256"] == result.summary["params_sha256"]


def test_a_module_has_scores_of_its_own() -> None:
    within = {"name": "module", "key": "within", "unit": "%", "higher_is_better": True}
    result = flray.run(METERS, model=OwnScores, evaluate={"scores": [within, "mae"]})
    assert result.summary["score_mode"] == "max"
    values = result.clients["within"] * result.clients["total"]
    np.testing.assert_allclose(values, values.round(), atol=1e-9)  # a count
    assert 0 < result.summary["within_mean"] < 1
    with pytest.raises(ExperimentError, match=r"returns no 'inside', only within"):
        flray.run(METERS, model=OwnScores, evaluate={"scores": [within | {"key": "inside"}]})


def test_scores_change_nothing_of_what_clients_choose() -> None:
    """Clients of IFCA judge models in every round."""
    within = {"name": "module", "key": "within"}
    keys = METERS | {"model": OwnScores, "algorithm": {"name": "ifca", "number": 2}}
    plain, scored = (flray.run(keys, evaluate=e) for e in ({}, {"scores": [within, "r2"]}))
    assert plain.summary["params_sha256"] == scored.summary["params_sha256"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"evaluate": {"scores": ["accuracy"]}},
            "accuracy is a score of classes, .* are numbers; ",
        ),
        ({"evaluate": {"scores": ["mae", "auroc"]}}, "auroc is a score of classes"),
        ({"evaluate": {"scores": ["mae", "rsme"]}}, r"unknown score 'rsme' \(did you mean 'rmse'"),
        ({"evaluate": {"scores": ["mae", "mae"]}}, "scores must have different names"),
        ({"evaluate": {"scores": "mae"}}, "evaluate.scores must be a list, got 'mae'"),
        ({"evaluate": {"scores": ["meters:Owners"]}}, r"it has no terms\(output, targets\)"),
        (
            {"evaluate": {"scores": [{"name": "module", "key": "within"}]}},
            r"within is a score of the module's own, and the model linear does not define",
        ),
        ({"evaluate": {"scores": ["mape"], "target": 20}}, r"target must be in \(0, 1\], got 20"),
    ],
)
def test_scores_that_do_not_fit_are_refused(keys, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        flray.run(METERS | keys)


def test_a_score_named_like_a_recorded_column_is_refused_by_its_name() -> None:
    taken = ["loss", "round", "client", "part", "correct", "total", "model", "group", "name"]
    taken += ["validation_mae", "tuned_holdout_loss", "seconds_late", "bytes_off", "logged_loss"]
    for name in taken:
        keys = METERS | {"evaluate": {"scores": ["mae", {"name": "module", "key": name}]}}
        with pytest.raises(ExperimentError, match=rf"got {name}, .* choose another, .* my_{name}"):
            parse_experiment(keys)
    for name in ("my_loss", "validation_rmse", "accuracy_mean"):  # no column is called so
        parse_experiment(METERS | {"evaluate": {"scores": [{"name": "module", "key": name}]}})


def test_scores_of_numbers_are_refused_for_classes(tiny_run) -> None:
    with pytest.raises(ExperimentError, match=r"r2 is a score of numbers, .* are classes; choose"):
        tiny_run("evaluate.scores=[r2]")


def test_a_sweep_goes_by_the_first_score_and_its_direction() -> None:
    plain = parse_experiment(METERS).plain
    space = parse_space({"experiment": plain, "space": {"train.lr": [0.1, 0.2]}})
    assert (space.options.metric, space.options.mode) == ("validation_mae_mean", "min")
    by_r2 = parse_space({"experiment": plain, "space": {}, "metric": "validation_r2_mean"})
    assert by_r2.options.mode == "max"
    assert describe_space(space, planned_rows(space)).startswith("2 rows")
    other = {"score": "mae", "uses_ground_truth": False}
    summaries = {
        n: {"validation_mae_mean": v, "mae_mean": v + 1} | other for n, v in enumerate((0.9, 0.4))
    }
    best = best_of(expand(space), summaries, space.options)
    assert (best["sets"], best["mae_mean"]) == ({"train.lr": 0.2}, 1.4)
    unnamed = plain | {"evaluate": {}}
    with pytest.raises(ExperimentError, match=r"name it, as in evaluate.scores=\[mae\]"):
        planned_rows(parse_space({"experiment": unnamed, "space": {"train.lr": [0.1, 0.2]}}))


def test_the_page_of_a_sweep_ranks_by_its_score(tmp_path) -> None:
    row = {"seed": 0, "status": "done", "run": "runs/0", "error": None, "clusters": 1}
    pairs = ((0.1, 0.5), (0.2, 0.3))
    rows = [row | {"train.lr": lr, "mae_mean": v, "validation_mae_mean": v} for lr, v in pairs]
    folder = write_sweep(tmp_path / "sweep", rows)
    RunDirectory(folder / "runs/0").start({"seed": 0}, {"scores": [asdict(MAE)]}, "digest")
    sweep = read_sweep(folder)
    assert sweep.score == MAE
    assert sweep.best["train.lr"].tolist() == [0.2]
    assert row_texts(sweep)["validation mae kW"].tolist() == ["0.5000", "0.3000"]
    assert "**0.3000**" in to_markdown(top_sheet(sweep))


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_the_best_row_of_a_sweep_has_the_lowest_error(tmp_path) -> None:
    plain = parse_experiment(METERS).plain | {"rounds": 1}
    space = {"experiment": plain, "space": {"train.lr": [0.1, 0.001]}, "concurrency": 1}
    found = flray.sweep(space, tmp_path / "sweep")
    assert found.table["status"].tolist() == ["done", "done"], found.table["error"].tolist()
    errors = found.table.set_index("train.lr")["validation_mae_mean"]
    assert errors[0.1] < errors[0.001]
    assert found.report["best"]["sets"] == {"train.lr": 0.1}
    assert found.report["best"]["mae_mean"] == found.table["mae_mean"][0]
    sweep = read_sweep(tmp_path / "sweep")
    assert sweep.score == MAE
    assert sweep.best["train.lr"].tolist() == [0.1]
    page = flray.report(found, out=tmp_path / "page.html").read_text()
    assert f"{errors[0.1]:.4f} kW" in page
    assert "validation mae" in page


def test_the_name_of_a_column_keeps_its_score() -> None:
    column = pickle.loads(pickle.dumps(copy.deepcopy(MAE.mean)))
    assert (column, column.score) == ("mae_mean", MAE)
    assert type(score_column("validation_my_mae_mean", [MAE])) is str
    assert score_column("tuned_mae_worst", [ScoreColumns("r2"), MAE]).score == MAE


def test_worst_is_the_highest_error_and_undefined_scores_are_left_out() -> None:
    num, values = np.arange(4), np.array([3.0, np.nan, 1.0, 2.0])
    scores = ClientScores(num, 0 * num, num + 1, np.zeros(4), {MAE: values})
    row = summarise(scores, 10, target=2.0)
    assert (row["mae_mean"], row["mae_worst"], row["clients_reaching_target"]) == (2.0, 3.0, 0.5)
    nothing = ClientScores(num, 0 * num, num + 1, np.zeros(4), {MAE: np.full(4, np.nan)})
    assert np.isnan(summarise(nothing, 10)["mae_worst"])
    assert rounds_to_target([1, 2, 3], [5.0, 1.5, 0.5], 1.5, MAE) == 2


def test_a_sequence_counts_by_its_right_positions() -> None:
    """Targets of several positions: the accuracy is the share of all of them."""
    data = Tokens().load()
    keys = {"dataset": Tokens(), "model": Copying, "evaluate": {}, "rounds": 1}
    result = flray.run(METERS | keys, execution={"engine": "loop"})
    rows, split = result.clients.query("part == 'test'"), Owners().split(data, 0)
    expected = [(data.images[ids] == data.labels[ids]).mean() for ids in split.test]
    np.testing.assert_allclose(rows["accuracy"], expected)
    assert result.summary["accuracy_mean"] == pytest.approx(np.mean(expected))
