"""Sweeps from a space to a table, with Ray Tune in between."""

import itertools
import json
import shutil
from pathlib import Path
from time import time

import numpy as np
import pandas as pd
import pytest
import yaml
from ray.tune.search import Searcher

from flray.config.experiment import parse_experiment
from flray.config.overrides import THRESHOLD
from flray.data.events import make_timeline
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.records.clusterings import read_clusterings
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.reports.runs import collect_runs
from flray.runs.preparing import deal
from flray.server.loop import Server
from flray.sweeps import driver
from flray.sweeps.describing import describe_space, planned_rows, predicted_steps
from flray.sweeps.driver import Progress, Watch, _Sweep, run_sweep
from flray.sweeps.folder import read_rows
from flray.sweeps.rows import expand
from flray.sweeps.space import parse_space
from flray.sweeps.tuning import run_trial

from scenarios import TINY, run_experiment

DISTANCE = "algorithm.clustering.distance"
LINKAGE = "algorithm.clustering.partition.linkage"
FLHC = {**TINY, "algorithm": "flhc", "rounds": 3}

pytestmark = pytest.mark.slow  # on a Ray cluster

SPACE = parse_space(
    {
        "experiment": FLHC,
        "space": {
            "algorithm.rounds_before": [1, 2],
            DISTANCE: ["l2", "cosine"],
            LINKAGE: ["complete", "ward"],
            THRESHOLD: {"between_merges": 2},
            "seed": [0, 1],
        },
        "except": [
            {LINKAGE: "ward", DISTANCE: "cosine"},
            {LINKAGE: "complete", DISTANCE: "l2"},
            {"algorithm.rounds_before": 1, DISTANCE: "cosine"},
        ],
        # The second cannot be trained.
        "baseline": [{"algorithm": "fedavg"}, {"algorithm": "local", "train.lr": 1e30}],
        "concurrency": 1,
    }
)
NUM_FAILING = 2
NUM_ROWS = (1 + 2) * 2 * 2 + 2  # that do not fail
SECRET = "5ec2e7" * 7


@pytest.fixture(scope="module")
def swept(request, tmp_path_factory):
    """A sweep by Ray Tune."""
    request.getfixturevalue("cluster")
    seen: list[Progress] = []
    folder = tmp_path_factory.mktemp("sweep") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_TOKEN", SECRET)
        return run_sweep(SPACE, folder, watch=Watch(seen.append)), seen


@pytest.fixture
def _in_process(request, monkeypatch) -> None:
    """Run trials one after another in this process, where Tune is not what is tested."""
    request.getfixturevalue("cluster")  # whose resources are looked at

    def run_here(search, options, _scheduler, watch):
        for number in itertools.count():
            config = search.suggest(str(number))
            if config == Searcher.FINISHED:
                return []
            search.on_trial_complete(str(number), run_trial(config, watch.context, options.metric))
            watch.step([])

    monkeypatch.setattr(driver, "run_trials", run_here)


@pytest.fixture(scope="module")
def naive(swept, tmp_path_factory) -> dict[int, dict]:
    """The summary of every row, run on its own."""
    folder = tmp_path_factory.mktemp("naive")
    rows = swept[0].table.iloc[:NUM_ROWS].itertuples()
    return {row.row: summary_alone(swept[0].path, row, folder) for row in rows}


def summary_alone(sweep: Path, row, folder: Path) -> dict:
    """The summary of a row of a sweep, run on its own."""
    config = yaml.safe_load((sweep / row.folder / "config.yaml").read_text())
    return run_experiment(parse_experiment(config), folder / str(row.row)).summary


def test_every_row_is_the_run_it_stands_for(swept, naive) -> None:
    table = swept[0].table.iloc[:NUM_ROWS]
    assert len(table) == NUM_ROWS == len(naive)
    for row in table.itertuples():
        assert row.params_sha256 == naive[row.row]["params_sha256"]
        held = json.loads((swept[0].path / row.folder / "summary.json").read_text())
        assert {**held, "seconds": 0} == {**naive[row.row], "seconds": 0}
    assert table["params_sha256"].nunique() > 6
    assert (table.groupby("run")["status"].agg(list).map(lambda s: s.count("done")) == 1).all()


def test_nothing_of_a_sweep_has_what_the_environment_holds(swept) -> None:
    files = [path for path in swept[0].path.rglob("*") if path.is_file()]
    assert len(files) > 100
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def steps_of_a_cluster(seed: int, members: list[int], rounds: range) -> int:
    """Half of all six clients in a round, at most the cluster; 2 epochs of batches of 10."""
    experiment = parse_experiment({**FLHC, "seed": seed})
    sizes = deal(experiment, experiment.dataset.build().load()).num_train_examples
    total = 0
    for t in rounds:
        size = min(6 // 2, len(members))
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
        alone = RunDirectory(swept[0].path / fedavg["folder"]).rounds().set_index("round")
        trained += rounds.loc[n, "client_steps"] - alone.loc[n, "client_steps"]
        for folder in group["folder"]:
            (found,) = read_clusterings(swept[0].path / folder).values()
            for label in np.unique(found.labels):
                members = found.clients[found.labels == label].tolist()
                clusters.add((int(n), int(seed), tuple(members)))
                num_clusters += 1
    trained += sum(steps_of_a_cluster(seed, list(m), range(n + 1, 4)) for n, seed, m in clusters)
    assert report["client_steps_trained"] == trained
    assert report["ratio"] == report["client_steps_naive"] / trained > 2
    assert (report["components_trained"], report["components"]) == (len(clusters), num_clusters)
    counts = {key: report[key] for key in ("prefixes", "observations", "distances", "trees")}
    # Baselines that cannot be trained have no prefix; FedAvg goes on from the one of its seed.
    assert counts == {"prefixes": 2, "observations": 4, "distances": 6, "trees": 6}
    assert report["done"] == report["runs"] - NUM_FAILING < NUM_ROWS
    assert report["done"] + report["shared"] == NUM_ROWS


def test_every_row_is_collected_once(swept) -> None:
    runs = collect_runs(swept[0].path)
    assert len(runs) == NUM_ROWS
    configs = {json.dumps(run.config, sort_keys=True) for run in runs}
    assert len(configs) == NUM_ROWS
    assert all(run.rounds["round"].tolist() == [1, 2, 3] for run in runs)


def test_the_folder_tells_everything_in_relative_paths(swept) -> None:
    result, seen = swept
    assert not (result.path / "tune").exists()
    texts = [p.read_text() for p in result.path.rglob("*") if p.suffix in (".json", ".yaml")]
    assert len(texts) > NUM_ROWS
    assert not any(str(result.path) in text for text in texts)
    pd.testing.assert_frame_equal(pd.read_parquet(result.path / "rows.parquet"), result.table)
    assert seen[-1].done + seen[-1].failed == seen[-1].rows == len(result.table)
    assert seen[-1].best == result.report["best"]["validation_accuracy_mean"]  # a mean over seeds


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
    monkeypatch.setattr(_Sweep, "_fit", lambda _, search, __: asked.extend(search.pending))
    again = run_sweep(SPACE, result.path, resume=True)
    assert [row.number for row in asked] == [NUM_ROWS, NUM_ROWS + 1]  # failures are tried again
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


@pytest.mark.usefixtures("_in_process")
def test_a_sweep_out_of_time_goes_on_in_another_folder(tmp_path) -> None:
    plain = {
        "experiment": FLHC,
        "space": {"algorithm.rounds_before": 2, THRESHOLD: [0.0, 1e9]},
        "baseline": {"algorithm": "fedavg"},
    }
    space = parse_space(plain)
    first = run_sweep(space, tmp_path / "here", max_minutes=0)
    assert first.report["unfinished"] == 3
    shutil.move(tmp_path / "here", tmp_path / "there")
    second = run_sweep(space, tmp_path / "there", resume=True)
    assert second.table["status"].tolist() == ["done", "done", "done"]
    for row in second.table.itertuples():
        alone = summary_alone(second.path, row, tmp_path / "naive")
        assert row.params_sha256 == alone["params_sha256"]


@pytest.mark.usefixtures("_in_process")
def test_when_time_is_over_the_round_in_progress_is_the_last_and_no_row_begins(
    tmp_path, monkeypatch
) -> None:
    """The time ends during round 2 of the first row; the table has what there is."""
    space = parse_space({"experiment": {**TINY, "rounds": 4}, "space": {"train.lr": [0.1, 0.2]}})
    round_of, now = Server._round, [time()]

    def late_in_round_2(server, before, t):
        now[0] += 3600 * (t == 2)
        return round_of(server, before, t)

    monkeypatch.setattr(Server, "_round", late_in_round_2)
    monkeypatch.setattr("flray.sweeps.cache.time", lambda: now[0])
    first = run_sweep(space, tmp_path / "out", max_minutes=10)
    table = pd.read_parquet(tmp_path / "out" / "rows.parquet")
    assert table["status"].tolist() == ["unfinished"] * 2
    assert table["rounds"].fillna(0).tolist() == [2, 0]
    assert first.report["unfinished"] == 2
    assert list(read_rows(tmp_path / "out")) == [0]  # the second was not even begun
    assert RunDirectory(tmp_path / "out/runs/0000").store().newest_round() == 2


@pytest.mark.parametrize(("minutes", "left_s"), [(0, 0), (1, 6), (10, 60), (600, 60)])
def test_max_minutes_leave_time_for_the_end(minutes, left_s) -> None:
    stop = driver._time_to_stop(minutes)
    assert stop - time() == pytest.approx(60 * minutes - left_s, abs=1)


@pytest.mark.usefixtures("_in_process")
def test_predicted_steps_are_those_that_the_sweep_counts(tmp_path) -> None:
    """All clients take part, or half of them in one cluster: 2 thresholds and FedAvg, 2 seeds."""
    plain = {
        "experiment": {**FLHC, "participation": 1.0},
        "space": {"algorithm.rounds_before": 2, THRESHOLD: [0.0, 1e9], "seeds": 2},
        "baseline": {"algorithm": "fedavg"},
    }
    space = parse_space(plain)
    assert len(expand(space)) == 2 * 2 + 2
    result = run_sweep(space, tmp_path / "out")
    counted = result.report["client_steps_naive"]
    planned = planned_rows(space)
    assert describe_space(space, planned).endswith(f"about {counted:,} client steps")
    # FedAvg goes on from the two rounds before the clusterings of its seed.
    assert result.report["client_steps_trained"] < planned.at_most < counted
    for row in expand(parse_space(plain | {"experiment": FLHC, "space": {THRESHOLD: 1e9}})):
        experiment = parse_experiment(row.plain)
        split = deal(experiment, experiment.dataset.build().load())
        alone = run_experiment(experiment, tmp_path / str(row.number))
        steps = predicted_steps(experiment, make_timeline(split, ()))
        assert steps == alone.summary["client_steps"] > 0


OPTUNA = {
    "experiment": {**FLHC, "evaluate": {"every": 3}},
    "space": {
        "algorithm.rounds_before": {"randint": [1, 2]},
        DISTANCE: ["l1", "l2", "cosine"],
        LINKAGE: ["average", "ward"],
        THRESHOLD: {"between_merges": 4},
        "seeds": 2,
    },
    "except": [{LINKAGE: "ward", DISTANCE: ["l1", "cosine"]}],
    "baseline": {"algorithm": "fedavg"},
    "search": {"name": "optuna", "samples": 3},
}


@pytest.mark.long
@pytest.mark.usefixtures("_in_process")
def test_suggestions_of_optuna_share_their_prefixes_and_are_told_of_when_resumed(tmp_path) -> None:
    """Two baselines and three samples of two seeds; a kill left a sample and a half of them."""
    result = run_sweep(parse_space(OPTUNA), tmp_path / "out")
    table = result.table
    assert len(table) == 2 + 6
    assert set(table["status"]) <= {"done", "shared"}
    suggested = table.iloc[2:]
    assert suggested["seed"].tolist() == [0, 1] * 3
    ward = suggested[suggested[LINKAGE] == "ward"]
    assert (ward[DISTANCE] == "l2").all()
    assert result.report["prefixes"] == 2
    assert result.report["ratio"] > 1.5
    for row in table.iloc[:2].itertuples():
        rounds = RunDirectory(result.path / row.folder).rounds().dropna(subset=["accuracy_mean"])
        assert rounds["round"].tolist() == [2, 3]  # after a clustering, and the last
        fedavg = OPTUNA["experiment"] | {"algorithm": "fedavg", "seed": int(row.seed)}
        alone = run_experiment(parse_experiment(fedavg), tmp_path / f"fedavg{row.seed}")
        assert alone.summary["params_sha256"] == row.params_sha256
    for row in suggested.iloc[:2].itertuples():
        alone = summary_alone(result.path, row, tmp_path / "naive")
        assert row.params_sha256 == alone["params_sha256"]

    kept = {n: row.overrides for n, row in read_rows(result.path).items() if n < 6}
    for number in range(5, 8):
        (result.path / "trials" / f"{number:04d}.json").unlink()
    told = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "optuna.study.Study.add_trial",
            lambda _, trial: told.append((trial.params, trial.value)),
        )
        again = run_sweep(parse_space(OPTUNA), result.path, resume=True)
    assert len(again.table) == 8
    assert {n: read_rows(result.path)[n].overrides for n in kept} == kept
    mean = table.iloc[2:4]["validation_accuracy_mean"].mean()
    assert [value for _, value in told] == [pytest.approx(mean)]
    assert all(set(point) == {*OPTUNA["space"]} - {"seeds"} for point, _ in told)


@pytest.mark.usefixtures("cluster")
def test_two_sweeps_cannot_run_in_one_folder(tmp_path) -> None:
    with locked(tmp_path / "out"), pytest.raises(ExperimentError, match="by another process"):
        run_sweep(SPACE, tmp_path / "out")


@pytest.mark.usefixtures("cluster")
def test_what_never_fits_is_refused_before_anything_is_written(tmp_path) -> None:
    for execution, message in (
        (
            {"executor": "ray", "actors": {"count": 90}},
            r"90 x 1 \+ 1 for the server = 91 CPU, the cluster has",
        ),
        ({"threads": 99}, "a trial asks for 99 CPU, the largest machine has"),
        ({"device": "cuda:1"}, "device must be auto, cpu or cuda in a sweep"),
    ):
        plain = {"experiment": {**TINY, "execution": execution}, "space": {"seed": [0, 1]}}
        with pytest.raises(ExperimentError, match=message):
            run_sweep(parse_space(plain), tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.long
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
