"""Sweeps from a space to a table, with Ray Tune in between."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import ray
import yaml

from flray.config.build import deal, run_experiment
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.report.runs import collect_runs
from flray.sweep import driver, trials
from flray.sweep.driver import Progress, Watch, describe_space, run_sweep
from flray.sweep.folder import RowState, best_of, table_of, write_table
from flray.sweep.rows import expand
from flray.sweep.space import THRESHOLD, Options, parse_space, read_space
from flray.sweep.tree import Run, run_path

from scenarios import TINY

DISTANCE = "algorithm.clustering.distance"
LINKAGE = "algorithm.clustering.partition.linkage"
FLHC = {**TINY, "algorithm": "flhc", "rounds": 3}

SPACE = parse_space(
    {
        "experiment": FLHC,
        "space": {
            "algorithm.rounds_before": [1, 2],
            DISTANCE: ["l1", "l2", "cosine"],
            LINKAGE: ["complete", "ward"],
            THRESHOLD: {"between_merges": 3},
            "seed": [0, 1],
        },
        "except": [{LINKAGE: "ward", DISTANCE: ["l1", "cosine"]}],
        # The second cannot be trained.
        "baseline": [{"algorithm": "fedavg"}, {"algorithm": "local", "train.lr": 1e30}],
    }
)
NUM_FAILING = 2
NUM_ROWS = 2 * 4 * 3 * 2 + 2  # that do not fail


@pytest.fixture(scope="module")
def swept(request, tmp_path_factory):
    request.getfixturevalue("cluster")
    seen: list[Progress] = []
    folder = tmp_path_factory.mktemp("sweep") / "out"
    return run_sweep(SPACE, folder, watch=Watch(seen.append)), seen


@pytest.fixture(scope="module")
def naive(swept, tmp_path_factory) -> dict[int, dict]:
    """The summary of every row, run on its own."""
    result, _ = swept
    folder = tmp_path_factory.mktemp("naive")
    summaries = {}
    for row in result.table.iloc[:NUM_ROWS].itertuples():
        config = yaml.safe_load((result.path / row.folder / "config.yaml").read_text())
        found = run_experiment(parse_experiment(config), folder / str(row.row))
        summaries[row.row] = found.summary
    return summaries


def test_every_row_is_the_run_it_stands_for(swept, naive) -> None:
    table = swept[0].table.iloc[:NUM_ROWS]
    assert len(table) == NUM_ROWS == len(naive)
    for row in table.itertuples():
        assert row.params_sha256 == naive[row.row]["params_sha256"]
        held = json.loads((swept[0].path / row.folder / "summary.json").read_text())
        assert held.pop("shared_with", None) == (row.run if row.status == "shared" else None)
        assert {**held, "seconds": 0} == {**naive[row.row], "seconds": 0}
    assert table["params_sha256"].nunique() > 10


def steps_of_a_cluster(seed: int, members: list[int], rounds: range) -> int:
    """Half of the members a round, at least one; 2 epochs of batches of 10."""
    experiment = parse_experiment({**FLHC, "seed": seed})
    sizes = deal(experiment, experiment.dataset.build().load()).num_train_examples
    total = 0
    for t in rounds:
        size = max(len(members) // 2, 1)
        rng = generator(seed, "cohort", t, members[0])
        total += sum(2 * -(-int(sizes[i]) // 10) for i in rng.choice(members, size, replace=False))
    return total


def test_what_was_trained_is_counted_against_the_naive_sweep(swept, naive) -> None:
    """Trained: each distinct cluster after its clustering, two FedAvg runs, four observations."""
    report, table = swept[0].report, swept[0].table.iloc[:NUM_ROWS]
    assert report["client_steps_naive"] == sum(s["client_steps"] for s in naive.values())
    is_fedavg = table["algorithm"] == "fedavg"
    trained = table.loc[is_fedavg, "client_steps"].sum()
    clusters: set[tuple] = set()
    num_clusters = 0
    for (n, seed), group in table[~is_fedavg].groupby(["algorithm.rounds_before", "seed"]):
        rounds = RunDirectory(swept[0].path / group.iloc[0]["folder"]).rounds().set_index("round")
        fedavg = table[is_fedavg & (table["seed"] == seed)].iloc[0]
        alone = RunDirectory(swept[0].path / fedavg["run"]).rounds().set_index("round")
        trained += rounds.loc[n, "client_steps"] - alone.loc[n, "client_steps"]
        for folder in group["folder"]:
            (found,) = read_clusterings(swept[0].path / folder).values()
            for label in np.unique(found.labels):
                members = found.clients[found.labels == label].tolist()
                clusters.add((int(n), int(seed), tuple(members)))
                num_clusters += 1
    trained += sum(steps_of_a_cluster(seed, list(m), range(n + 1, 4)) for n, seed, m in clusters)
    assert report["client_steps_trained"] == trained
    assert report["ratio"] == report["client_steps_naive"] / trained > 3
    assert (report["strands_trained"], report["strands"]) == (len(clusters), num_clusters)
    counts = {key: report[key] for key in ("trunks", "observations", "distances", "trees")}
    assert counts == {"trunks": 2, "observations": 4, "distances": 12, "trees": 16}
    assert report["done"] == report["runs"] - NUM_FAILING < NUM_ROWS
    assert report["done"] + report["shared"] == NUM_ROWS


def test_every_row_is_collected_once(swept) -> None:
    runs = collect_runs(swept[0].path)
    assert len(runs) == NUM_ROWS
    configs = {json.dumps(run.config, sort_keys=True) for run in runs}
    assert len(configs) == NUM_ROWS
    shared = next(run for run in runs if "shared_with" in run.summary)
    assert shared.rounds["round"].tolist() == [1, 2, 3]


def test_the_folder_tells_everything_in_relative_paths(swept) -> None:
    result, seen = swept
    assert not (result.path / "tune").exists()
    texts = [p.read_text() for p in result.path.rglob("*") if p.suffix in (".json", ".yaml")]
    assert len(texts) > NUM_ROWS
    assert not any(str(result.path) in text for text in texts)
    pd.testing.assert_frame_equal(pd.read_parquet(result.path / "rows.parquet"), result.table)
    assert seen[-1].done + seen[-1].failed == seen[-1].trials == result.report["runs"]
    assert seen[-1].best == result.table["validation_accuracy_mean"].max()


def test_the_best_is_a_mean_over_seeds_by_validation(swept) -> None:
    """Thresholds of two seeds are alike by their place between the merges of their own trees."""
    report, table = swept[0].report, swept[0].table
    table = table.iloc[:NUM_ROWS]
    keys = ["algorithm", "algorithm.rounds_before", DISTANCE, LINKAGE, "merge_place"]
    means = table.groupby(keys, dropna=False)["validation_accuracy_mean"].agg(["mean", "size"])
    assert (means["size"] == 2).all()
    assert report["best"]["validation_accuracy_mean"] == pytest.approx(means["mean"].max())
    assert len(report["best"]["rows"]) == 2


def test_a_sweep_that_is_done_runs_nothing_again(swept, monkeypatch) -> None:
    result, _ = swept
    stamps = {p: p.stat().st_mtime_ns for p in result.path.glob("runs/*/*")}
    asked = []
    monkeypatch.setattr(driver, "run_trials", lambda runs, *_: asked.extend(runs))
    again = run_sweep(SPACE, result.path, resume=True)
    assert len(asked) == NUM_FAILING  # which are tried again
    assert stamps == {p: p.stat().st_mtime_ns for p in result.path.glob("runs/*/*")}
    pd.testing.assert_frame_equal(again.table, result.table)
    with pytest.raises(ExperimentError, match="already holds this sweep: pass --resume"):
        run_sweep(SPACE, result.path)
    other = parse_space({"experiment": FLHC, "space": {"seed": [0]}})
    with pytest.raises(ExperimentError, match="holds another sweep"):
        run_sweep(other, result.path, resume=True)


def test_a_failing_trial_is_a_row_and_the_others_go_on(swept) -> None:
    result, seen = swept
    failed = result.table.iloc[NUM_ROWS:]
    assert failed["status"].tolist() == ["failed", "failed"]
    assert failed["error"].str.contains("NaN or infinite; lower train.lr").all()
    assert result.table["error"].iloc[:NUM_ROWS].isna().all()
    assert result.report["failed"] == seen[-1].failed == NUM_FAILING


def test_rows_fail_with_the_run_that_trains_their_clients(swept, tmp_path, monkeypatch) -> None:
    """As if the trial of the first row had failed: whoever has one of its clusters fails too."""
    folder = tmp_path / "copy"
    shutil.copytree(swept[0].path, folder)
    records = [json.loads(p.read_text()) for p in folder.glob("trunks/*/*.json")]
    sources = {int(i): set(row["sources"]) for each in records for i, row in each["rows"].items()}
    key = Path(swept[0].table["run"].iloc[0]).name
    concerned = {i for i, runs in sources.items() if key in runs}
    assert 1 < len(concerned) < len(sources)
    (folder / "runs" / key / "strands" / "digests.json").unlink()
    for row in swept[0].table.itertuples():
        if row.row in concerned:
            (folder / row.folder / "summary.json").unlink()
    (folder / "trials" / f"{key}.json").write_text('{"status": "failed", "error": "a flood"}')
    monkeypatch.setattr(driver, "run_trials", lambda *_: None)
    table = run_sweep(SPACE, folder, resume=True).table.iloc[:NUM_ROWS]
    assert set(table.index[table["status"] == "failed"]) == concerned
    assert (table.loc[sorted(concerned), "error"] == "a flood").all()
    assert table.loc[table["status"] != "failed", "accuracy_mean"].notna().all()


@pytest.mark.usefixtures("cluster")
def test_asha_gives_every_row_a_trial_and_stops_some(tmp_path) -> None:
    plain = {
        "experiment": {**FLHC, "rounds": 6},
        "space": {"algorithm.rounds_before": 1, THRESHOLD: [0.0, 1e8, 1e9]},
        "scheduler": {"name": "asha", "grace": 2, "reduction": 2},
        "concurrency": 1,
        "metric": "clusters",
    }
    result = run_sweep(parse_space(plain), tmp_path / "out")
    assert result.table["run"].nunique() == 3
    # The first has six clusters, the others one.
    assert result.table["status"].tolist() == ["done", "stopped", "stopped"]
    stopped = result.table[result.table["status"] == "stopped"]
    assert (stopped["rounds"] < 6).all()
    assert stopped["validation_accuracy_mean"].notna().all()


@pytest.mark.usefixtures("cluster")
def test_a_sweep_out_of_time_goes_on_in_another_folder(tmp_path) -> None:
    plain = {
        "experiment": FLHC,
        "space": {"algorithm.rounds_before": 2, THRESHOLD: [0.0, 1e9]},
        "baseline": {"algorithm": "fedavg"},
    }
    space = parse_space(plain)
    first = run_sweep(space, tmp_path / "here", max_minutes=0)
    assert first.report["unfinished"] == 3
    (run,) = (tmp_path / "here" / "runs").iterdir()  # FedAvg is the trunk
    assert RunDirectory(run).rounds()["round"].tolist() == [1]
    shutil.move(tmp_path / "here", tmp_path / "there")
    second = run_sweep(space, tmp_path / "there", resume=True)
    assert second.table["status"].tolist() == ["done", "done", "done"]
    for row in second.table.itertuples():
        config = yaml.safe_load((second.path / row.folder / "config.yaml").read_text())
        alone = run_experiment(parse_experiment(config), tmp_path / "naive" / str(row.row))
        assert row.params_sha256 == alone.summary["params_sha256"]


def test_a_trial_out_of_time_stops_after_its_round(tmp_path, monkeypatch) -> None:
    reported = []
    clock = iter([0.0, 0.0, 2.0])
    monkeypatch.setattr(trials.tune, "report", lambda row, **_: reported.append(row))
    monkeypatch.setattr(trials, "time", lambda: next(clock))
    run = Run("abc", parse_experiment(TINY).plain)
    job = trials.Job(tmp_path, metric=None, deadline=1.0)
    trials.run_trial({"run": "abc"}, {"abc": run}, job)
    assert [row["round"] for row in reported] == [1, 2]
    assert trials.outcome_of(run, tmp_path).status == "unfinished"
    monkeypatch.setattr(trials, "time", lambda: 0.0)
    trials.run_trial({"run": "abc"}, {"abc": run}, job)
    assert [row["round"] for row in reported] == [1, 2, 3, 4]
    assert trials.outcome_of(run, tmp_path).status == "done"


@pytest.mark.usefixtures("cluster")
def test_what_never_fits_is_refused_before_anything_is_written(tmp_path) -> None:
    for execution, message in (
        ({"executor": "ray", "actors": {"count": 90}}, r"1 \+ 90 x 1 = 91 CPU, the cluster has"),
        ({"threads": 99}, "a trial asks for 99 CPU, the cluster has"),
        ({"device": "cuda:1"}, "device must be auto, cpu or cuda in a sweep"),
    ):
        plain = {"experiment": {**TINY, "execution": execution}, "space": {"seed": [0, 1]}}
        with pytest.raises(ExperimentError, match=message):
            run_sweep(parse_space(plain), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_table_says_of_each_row_whether_ground_truth_was_used(tmp_path) -> None:
    """Also of one that was stopped; what was allowed, here as a baseline's key, is not shown."""
    states = []
    for number, (used, is_done) in enumerate([(True, True), (False, True), (True, False)]):
        state = RowState(number, {"uses_ground_truth": True}, {}, run=str(number), status="done")
        directory = RunDirectory(tmp_path / run_path(str(number)))
        directory.start({"seed": 0}, {}, "digest")
        row = {"round": 1, "accuracy_mean": 0.5, "validation_accuracy_mean": 0.5}
        directory.append_round(row | ({"ground_truth_reads": 1} if used else {}))
        if is_done:
            directory.finish({**row, "uses_ground_truth": used})
        states.append(state if is_done else replace(state, status="stopped"))
    states.append(RowState(3, {"uses_ground_truth": True}, {}))
    table = table_of(tmp_path, states)
    assert table["uses_ground_truth"].tolist()[:3] == [True, False, True]
    assert pd.isna(table["uses_ground_truth"].iloc[3])
    write_table(tmp_path, table)
    assert pd.read_parquet(tmp_path / "rows.parquet")["uses_ground_truth"].iloc[0] is True
    assert best_of(states[:1], table, Options())["uses_ground_truth"] is True
    assert best_of(states[1:2], table, Options())["uses_ground_truth"] is False


def seeds_of(values: dict[float, list[float | None]]) -> tuple[list[RowState], pd.DataFrame]:
    """Rows by learning rate and seed with their validation accuracy; None: it failed."""
    states, records = [], []
    for lr, accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            status = "failed" if accuracy is None else "done"
            state = RowState(len(states), {"train.lr": lr, "seed": seed}, {}, status=status)
            states.append(state)
            measured = dict.fromkeys(("validation_accuracy_mean", "accuracy_mean"), accuracy)
            records.append({"row": state.number, "uses_ground_truth": False, **measured})
    return states, pd.DataFrame(records)


def test_a_configuration_with_a_failed_seed_wins_only_where_none_is_complete() -> None:
    """0.1 is better in the one seed that it survived."""
    best = best_of(*seeds_of({0.1: [0.9, None], 0.2: [0.7, 0.8], 0.3: [0.6, 0.7]}), Options())
    assert best["sets"] == {"train.lr": 0.2}
    assert best["validation_accuracy_mean"] == pytest.approx(0.75)
    assert (best["rows"], best["missing_rows"], best["left_out"]) == ([2, 3], [], 1)
    best = best_of(*seeds_of({0.1: [None, 0.9], 0.2: [0.7, None], 0.3: [None, None]}), Options())
    assert best["sets"] == {"train.lr": 0.1}
    assert (best["rows"], best["missing_rows"], best["left_out"]) == ([1], [0], 0)
    assert best_of(*seeds_of({0.1: [None, None]}), Options()) is None


def test_a_folder_with_something_else_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ExperimentError, match=r"something that is not a sweep \(thesis.tex\)"):
        run_sweep(SPACE, tmp_path)
    with pytest.raises(ExperimentError, match="nothing to resume"):
        run_sweep(SPACE, tmp_path / "none", resume=True)


def test_a_space_is_described_without_training() -> None:
    text = describe_space(SPACE)
    assert text.startswith("52 rows: 48 branch from 2 trunks, 4 are 4 runs of their own")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_of_a_trial_live_in_its_placement_group(tmp_path) -> None:
    """Two trials of more than half of the machine each: they must wait for each other."""
    actors = {"count": 1, "num_cpus": 0.6}
    plain = {
        "experiment": {**TINY, "execution": {"executor": "ray", "actors": actors}},
        "space": {"seed": [0, 1]},
    }
    result = run_sweep(parse_space(plain), tmp_path / "out")
    assert result.table["status"].tolist() == ["done", "done"]
    for row in result.table.itertuples():
        inline = {**TINY, "seed": row.seed}
        alone = run_experiment(parse_experiment(inline), tmp_path / str(row.row))
        assert row.params_sha256 == alone.summary["params_sha256"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_trials_that_share_client_actors_have_the_bits_of_runs_alone(tmp_path) -> None:
    """Two seeds are two trunks and two hosts; trials of both meet in one pool of one actor."""
    actors = {"executor": "ray", "actors": {"count": 1, "num_cpus": 0.5}}
    space = {"algorithm.rounds_before": 1, THRESHOLD: {"between_merges": 3}, "seed": [0, 1]}
    plain = {
        "experiment": {**FLHC, "execution": actors},
        "space": space,
        "client_actors": "shared",
        "concurrency": 3,
    }
    result = run_sweep(parse_space(plain), tmp_path / "out")
    assert set(result.table["status"]) <= {"done", "shared"}
    assert len(result.table) == 6
    for row in result.table.itertuples():
        config = yaml.safe_load((result.path / row.folder / "config.yaml").read_text())
        inline = config | {"execution": {}}
        alone = run_experiment(parse_experiment(inline), tmp_path / str(row.row))
        assert row.params_sha256 == alone.summary["params_sha256"]
    deadline = time.monotonic() + 30
    while ray.available_resources()["CPU"] < ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, "the pool is still there"
        time.sleep(0.1)


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_shared_is_refused(tmp_path) -> None:
    def ray_of(**actors):
        return {**TINY, "execution": {"executor": "ray", "actors": actors}}

    for experiment, varied, message in (
        (TINY, {"seed": [0, 1]}, "execution.executor is inline .* set execution.executor=ray"),
        (ray_of(count="per_client"), {"seed": [0, 1]}, "with per_client actors"),
        (ray_of(), {"execution.actors.count": [1, 2]}, "rows differ in execution"),
        (ray_of(count=90), {"seed": [0, 1]}, r"90 x 1 = 90 CPU .* the cluster has"),
    ):
        plain = {"experiment": experiment, "space": varied, "client_actors": "shared"}
        with pytest.raises(ExperimentError, match=message):
            run_sweep(parse_space(plain), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_shipped_spaces_can_be_read() -> None:
    files = sorted((Path(__file__).parents[2] / "tune_spaces").glob("*.yaml"))
    assert len(files) > 0
    for file in files:
        assert file.read_text().startswith(f"# flray sweep tune_spaces/{file.name}")
        assert len(expand(read_space(file))) > 1
