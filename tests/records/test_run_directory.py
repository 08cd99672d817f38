import json
import math
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from flray.config.deciding import first_difference
from flray.errors import ExperimentError
from flray.measures.scores import ClientScores
from flray.records import recorded, run_directory
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory

CONFIG = {
    "dataset": "mnist",
    "algorithm": {"name": "flhc", "clustering": {"distance": "l2", "threshold": 1e-05}},
    "betas": [0.9, 0.99],
    "target": None,
}
ENVIRONMENT = {"versions": {"torch": "2.10.0"}, "commit": None}


def scores(correct, clients=None):
    correct = np.array(correct)
    clients = np.arange(len(correct)) if clients is None else np.array(clients)
    return ClientScores(clients, correct, np.full(len(correct), 4), correct / 8)


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "out" / "run")
    directory.start(CONFIG, ENVIRONMENT, "abc")
    return directory


def record(run, t):
    run.append_rounds([{"round": t, "accuracy_mean": t / 10}])
    run.append_clients(t, "test", scores([t % 4, 4]), np.array([0, 1]))


def test_start_writes_config_and_environment(run):
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config == CONFIG
    assert list(config) == list(CONFIG)
    recorded = json.loads((run.path / "environment.json").read_text())
    held = {"from_round": 1, "config": {**CONFIG, "execution": {}}}
    assert recorded == {**ENVIRONMENT, "split_sha256": "abc", "configurations": [held]}
    assert run.summary() is None
    assert len(run.rounds()) == len(run.clients()) == 0


@pytest.mark.parametrize("key", ["config", "from_round"])
def test_an_entry_of_configurations_without_a_key_is_damage(run, key):
    path = run.path / "environment.json"
    path.write_text(path.read_text().replace(f'"{key}"', '"other"'))
    with pytest.raises(ExperimentError, match=f"environment.json .*has no {key}"):
        run.environment()


def test_a_fresh_directory_may_be_used(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        RunDirectory(path).start(CONFIG, ENVIRONMENT, "abc")
        assert RunDirectory(path).holds_run()


def test_a_start_that_was_cut_short_may_be_repeated(tmp_path):
    killed = patch.object(run_directory, "replace_text", side_effect=[None, KeyboardInterrupt])
    with killed, pytest.raises(KeyboardInterrupt):
        RunDirectory(tmp_path).start(CONFIG, ENVIRONMENT, "abc")
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.yaml.7.tmp").write_text("dataset: mn")
    assert not RunDirectory(tmp_path).holds_run()
    RunDirectory(tmp_path).start(CONFIG, ENVIRONMENT, "abc")
    assert RunDirectory(tmp_path).holds_run()


def test_the_same_experiment_asks_for_resume(run):
    with pytest.raises(ExperimentError, match=r"pass --resume to .* in Python resume=True"):
        RunDirectory(run.path).start(CONFIG, ENVIRONMENT, "abc")
    RunDirectory(run.path).resume(CONFIG, ENVIRONMENT, "abc")


def test_another_experiment_is_refused_with_the_first_difference(run):
    other = {**CONFIG, "algorithm": {"name": "flhc", "clustering": {"distance": "l1"}}}
    message = (
        r"holds another experiment \(algorithm.clustering.distance is 'l2' there and 'l1' here\)"
    )
    for enter in (run.start, run.resume):
        with pytest.raises(ExperimentError, match=message + ": choose another --out or remove it"):
            enter(other, ENVIRONMENT, "abc")


def test_differences_in_keys_are_found_on_both_sides():
    assert first_difference({"a": 1}, {"a": 1, "b": {"c": 2}}) == "b.c is absent there and 2 here"
    assert first_difference({"a": 1, "b": {}}, {"a": 1}) == "b is {} there and absent here"
    assert first_difference({"a": None}, {}) == "a is None there and absent here"
    assert first_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) is None


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for enter in (RunDirectory(tmp_path).start, RunDirectory(tmp_path).resume):
        with pytest.raises(ExperimentError, match=r"not an experiment \(thesis.tex\): choose"):
            enter(CONFIG, ENVIRONMENT, "abc")
    with pytest.raises(ExperimentError, match="is a file"):
        RunDirectory(tmp_path / "thesis.tex").check_start(CONFIG)


@pytest.mark.parametrize("text", ["", "- a list", "a: [broken"])
def test_a_foreign_config_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ExperimentError, match=r"config\.yaml is damaged"):
        RunDirectory(tmp_path).check_resume(CONFIG)


def test_resume_of_nothing_starts(tmp_path):
    run = RunDirectory(tmp_path / "new")
    run.resume(CONFIG, ENVIRONMENT, "abc")
    assert run.holds_run()


def test_resume_refuses_another_split_and_records_where_it_went_on(run):
    with pytest.raises(ExperimentError, match="its split has the digest abc, the split made now d"):
        run.resume(CONFIG, ENVIRONMENT, "d")
    elsewhere = {"versions": {"torch": "2.11.0"}, "commit": "f"}
    run.resume(CONFIG, elsewhere, "abc")
    recorded = json.loads((run.path / "environment.json").read_text())
    assert recorded.pop("configurations")
    assert recorded == {**ENVIRONMENT, "split_sha256": "abc", "resumed": [elsewhere]}


def test_rounds_may_gain_and_lose_columns(run):
    run.append_rounds([{"round": 0, "loss": 1, "clusters": None}])
    run.append_rounds([{"round": 1, "loss": 0.5, "clusters": np.int64(4), "note": True}])
    run.append_rounds([{"round": 2, "loss": np.float32(0.25), "clusters": 3}])
    frame = RunDirectory(run.path).rounds()
    assert frame["round"].tolist() == [0, 1, 2]
    assert frame["loss"].tolist() == [1.0, 0.5, 0.25]
    assert math.isnan(frame["clusters"][0])
    assert frame["clusters"].tolist()[1:] == [4, 3]
    assert frame["note"].isna().tolist() == [True, False, True]


def test_a_round_is_recorded_once(run):
    record(run, 1)
    with pytest.raises(ValueError, match="appended in order, got 1 after 1"):
        run.append_rounds([{"round": 1}])
    with pytest.raises(ValueError, match="the test scores of round 1 are already recorded"):
        run.append_clients(1, "test", scores([1, 1]), np.array([0, 0]))
    with pytest.raises(ValueError, match="unknown part 'train'; known: test, validation"):
        run.append_clients(4, "train", scores([1, 1]), np.array([0, 0]))


def test_client_rows_carry_the_values_of_their_client(run):
    model, group = np.array([9, 8, 7]), np.array([1, 0, 1])
    run.append_clients(0, "validation", scores([4, 1], clients=[2, 0]), model)
    run.append_clients(0, "test", scores([2], clients=[1]), model, group)
    expected = pd.DataFrame(
        {
            "round": [0, 0, 0],
            "client": [1, 2, 0],
            "part": ["test", "validation", "validation"],
            "correct": [2, 4, 1],
            "total": [4, 4, 4],
            "accuracy": [0.5, 1.0, 0.25],
            "loss": [0.25, 0.5, 0.125],
            "model": [8, 7, 9],
            "group": [0.0, math.nan, math.nan],
        }
    )
    for finished in (False, True):
        pd.testing.assert_frame_equal(RunDirectory(run.path).clients(), expected)
        parts = ("test", "validation", "last_trained")
        assert [run.has_scores_of(part) for part in parts] == [True, True, False]
        if not finished:
            run.finish({})


def test_an_evaluation_costs_the_same_however_many_came_before(run):
    def written():
        return sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())

    sizes = [written()]
    for t in range(12):
        run.append_clients(t, "test", scores([1, 2]), np.array([0, 0]))
        sizes.append(written())
    assert not (run.path / "clients.parquet").exists()
    assert np.ptp(np.diff(sizes)) <= 8  # checksums are numbers of one to five bytes


def test_clients_come_in_order_of_rounds_beyond_a_million(run):
    for t in (999_999, 1_000_000, 5):
        run.append_clients(t, "test", scores([1]), np.array([0]))
    assert run.clients()["round"].tolist() == [5, 999_999, 1_000_000]


def test_finish_joins_the_clients_and_writes_the_summary(run):
    for t in range(3):
        record(run, t)
    unfinished = run.clients()
    summary = {"accuracy_mean": np.float64(0.5), "ari": math.nan, "seconds": math.inf, "seed": 0}
    run.finish({**summary, "nested": {"clusters": (np.int64(2), np.nan)}})
    expected = {"accuracy_mean": 0.5, "ari": None, "seconds": None, "seed": 0}
    assert run.summary() == {**expected, "nested": {"clusters": [2, None]}}
    assert "NaN" not in (run.path / "summary.json").read_text()
    assert not (run.checkpoints / "clients").exists()
    pd.testing.assert_frame_equal(run.clients(), unfinished)
    assert len(pq.read_table(run.path / "clients.parquet")) == 6


def test_a_run_without_evaluations_finishes_with_empty_tables(run):
    run.finish({"seed": 0})
    assert len(run.clients()) == 0
    assert {"round", "client", "part", "accuracy", "model"} < set(run.clients().columns)


def test_truncate_drops_what_is_later_than_the_checkpoint(run):
    (run.path / "clusterings").mkdir()
    for t in range(5):
        record(run, t)
        (run.path / "clusterings" / f"round_{t:06d}.npz").touch()
    resumed = RunDirectory(run.path)
    resumed.truncate(2)
    assert resumed.rounds()["round"].tolist() == [0, 1, 2]
    assert sorted(set(resumed.clients()["round"])) == [0, 1, 2]
    assert len(list((run.path / "clusterings").iterdir())) == 3
    record(resumed, 3)
    assert resumed.rounds()["accuracy_mean"].tolist() == [0.0, 0.1, 0.2, 0.3]
    resumed.truncate(-1)
    assert len(resumed.rounds()) == len(resumed.clients()) == 0
    record(resumed, 0)


def test_a_finish_that_was_cut_short_can_be_resumed(run):
    for t in range(3):
        record(run, t)
    killed = patch.object(recorded, "replace_text", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        run.finish({"seed": 0})
    assert (run.path / "clients.parquet").exists()
    assert run.summary() is None
    record(run, 3)
    assert run.clients()["round"].max() == 3
    run.truncate(1)
    assert not (run.path / "clients.parquet").exists()
    record(run, 2)
    run.finish({"seed": 0})
    assert run.clients()["round"].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_finished_run_is_final(run):
    record(run, 0)
    run.finish({"seed": 0})
    with pytest.raises(ValueError, match="finished run"):
        run.truncate(0)
    assert len(run.clients()) == 2


def half_a_table(_, path, **_options):
    path.write_bytes(b"PAR1 and no more")
    raise OSError("disk full")


def test_an_interrupted_append_never_leaves_half_a_file(run):
    record(run, 0)
    rounds, clients = run.rounds(), run.clients()
    with patch.object(pq, "write_table", half_a_table):
        with pytest.raises(OSError, match="disk full"):
            run.append_rounds([{"round": 1, "accuracy_mean": 0.1}])
        with pytest.raises(OSError, match="disk full"):
            run.append_clients(1, "test", scores([1, 2]), np.array([0, 1]))
    pd.testing.assert_frame_equal(run.rounds(), rounds)
    pd.testing.assert_frame_equal(run.clients(), clients)
    record(run, 1)
    assert run.rounds()["round"].tolist() == [0, 1]


def test_leftovers_of_a_kill_are_not_read(run):
    record(run, 0)
    (run.path / "rounds.parquet.7.tmp").write_bytes(b"half")
    (run.checkpoints / "clients" / "round_000001_test.parquet.tmp").write_bytes(b"half")
    assert len(run.rounds()) == 1
    assert len(run.clients()) == 2
    record(run, 1)
    assert len(run.rounds()) == 2
    run.truncate(0)
    assert not list(run.path.glob("*.tmp"))


def test_names_of_folders_add_no_columns(tmp_path):
    run = RunDirectory(tmp_path / "seed=0")
    run.start(CONFIG, ENVIRONMENT, "abc")
    record(run, 0)
    run.finish({})
    assert "seed" not in {*run.rounds().columns, *run.clients().columns}


def test_rows_can_be_read_while_others_are_written(run):
    """A reader that opened the file by name twice would meet two files in a read out of twenty."""
    over = Event()

    def write() -> None:
        while not over.is_set():
            for t in range(2, 40):
                run.append_rounds([{"round": t, "accuracy_mean": t / 10}])
            run.truncate(1)

    run.append_rounds([{"round": 1}])
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            lengths = {len(run.rows()) for _ in range(500)}
        finally:
            over.set()
        writing.result()
    assert len(lengths) > 1


def test_several_clusterings_of_a_round_are_kept_and_the_last_is_read(tmp_path) -> None:
    directory = RunDirectory(tmp_path)
    for num_later, labels in ((1, [0, 0]), (0, [0, 1])):
        arrays = {"clients": np.arange(2), "labels": np.array(labels), "D": np.zeros((2, 2))}
        directory.append_clustering(3, arrays, num_later)
    assert directory.clustering_rounds() == [3]
    assert read_clusterings(tmp_path)[3].labels.tolist() == [0, 1]
    assert len(list((tmp_path / "clusterings").iterdir())) == 2
    directory.truncate(2)
    assert not list((tmp_path / "clusterings").iterdir())
