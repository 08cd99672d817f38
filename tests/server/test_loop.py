import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from flray import files
from flray.algorithms.fedavg import FedAvg
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ClientFailure, ExperimentError
from flray.execution.federation import Federation
from flray.records.checkpoint import CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.server.loop import packages_of

from scenarios import TINY, assert_same_run, sha

SUMMARY_KEYS = {
    *("algorithm", "dataset", "split", "model", "seed", "rounds", "clients", "accuracy_mean"),
    *("accuracy_se_binomial", "accuracy_se_clients", "accuracy_variance"),
    *("clients_reaching_target", "clusters", "ari", "nmi", "bytes_up", "bytes_down"),
    *("client_steps", "seconds", "params_sha256"),
}


def test_a_run_directory_holds_what_the_design_names(tiny_run) -> None:
    result = tiny_run("evaluate={every: 2, target: 0.3}", "rounds=5")
    names = {p.name for p in result.path.iterdir()}
    assert names >= {"config.yaml", "environment.json", "rounds.parquet", "clients.parquet"}
    assert names >= {"checkpoints", "summary.json"}
    assert set(result.summary) >= SUMMARY_KEYS
    assert json.loads((result.path / "summary.json").read_text())["rounds"] == 5
    assert result.rounds["round"].tolist() == [1, 2, 3, 4, 5]
    evaluated = result.rounds["accuracy_mean"].notna().tolist()
    assert evaluated == [False, True, False, True, True]  # every second, and the last
    assert result.clients.groupby(["round", "part"]).size().to_dict() == {
        (t, part): 6 for t in (2, 4, 5) for part in ("test", "validation")
    }


def test_config_yaml_is_resolved_and_runs_again_to_the_same_result(tiny_run) -> None:
    first = tiny_run("train.lr=0.07")
    held = yaml.safe_load((first.path / "config.yaml").read_text())
    assert held["train"] == {
        "optimizer": "sgd",
        "lr": 0.07,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "epochs": 2,
        "batch_size": 10,
        "drop_last": False,
    }
    assert parse_experiment(held).plain == held
    again = tiny_run(*[f"{key}={json.dumps(value)}" for key, value in held.items()])
    assert again.summary["params_sha256"] == first.summary["params_sha256"]


def test_metrics_agree_with_the_rows_of_clients(tiny_run) -> None:
    result = tiny_run("evaluate.target=0.2")
    last = result.clients.query("round == 4 and part == 'test'")
    accuracy = last["correct"] / last["total"]
    summary = result.summary
    assert summary["accuracy_mean"] == pytest.approx(accuracy.mean())
    assert summary["accuracy_variance"] == pytest.approx(accuracy.var(ddof=0))
    assert summary["accuracy_worst"] == accuracy.min()
    assert summary["clients_reaching_target"] == (accuracy >= 0.2).mean()
    validation = result.clients.query("round == 4 and part == 'validation'")
    expected = (validation["correct"] / validation["total"]).mean()
    assert summary["validation_accuracy_mean"] == pytest.approx(expected)


def test_bytes_and_steps_are_counted_by_hand(tiny_run) -> None:
    """Cohort 3 of 6, 4 rounds; 8x8 inputs, 16 hidden, 10 classes: 64*16+16 + 16*10+10 params."""
    result = tiny_run("split={name: iid, clients: 6, samples_per_client: 50, validation: 0.1}")
    params = 64 * 16 + 16 + 16 * 10 + 10
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 4 * 3 * params * 4
    # 45 of 50 are training examples: 5 batches of at most 10, two epochs.
    assert result.summary["client_steps"] == 4 * 3 * 2 * 5


def test_holdout_clients_never_train_and_are_scored_apart(tiny_run) -> None:
    result = tiny_run("split.holdout=2", "participation=1", "algorithm=local")
    assert result.summary["clients"] == 4
    assert result.summary["clusters"] == 4
    assert 0 <= result.summary["holdout_accuracy_mean"] <= 1


def test_planted_groups_are_scored(tiny_run) -> None:
    groups = "split={name: label_groups, clients: 10}"
    assert tiny_run(groups).summary["ari"] == 0  # one model for all
    assert tiny_run(groups, "algorithm=local", "participation=1").summary["purity"] == 1


def test_divergence_names_the_client(tiny_run) -> None:
    with pytest.raises(ClientFailure, match=r"round 1 client \d+ failed.*NaN.*where everybody"):
        tiny_run("train.lr=1e30")


def test_a_diverging_client_is_dropped_and_counted(tiny_run) -> None:
    result = tiny_run("train.lr=1e30", "on_client_failure=drop", "rounds=2")
    assert result.summary["clients_dropped"] == 6  # the cohort of 3, twice
    assert np.isfinite(result.summary["loss_mean"])  # the model stayed as it was


def test_stopping_in_time_and_resuming_is_as_one_run(tiny_run, known_run, tmp_path: Path) -> None:
    whole = known_run("algorithm=local")
    out = tmp_path / "parts"
    for expected in (1, 2, 3):
        part = tiny_run("algorithm=local", out=out, resume=expected > 1, should_stop=lambda: True)
        assert part.summary is None
        assert len(part.rounds) == expected
    done = tiny_run("algorithm=local", out=out, resume=True)
    assert_same_run(done, whole)


def test_a_run_has_the_same_bits_on_any_number_of_threads(tiny_run, monkeypatch) -> None:
    """40 clients, whose images are turned, are trained and scored in several tiles."""
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        overrides = ("split={name: rotation, clients: 40}", "participation=1", "rounds=2")
        results.append(tiny_run(*overrides))
        assert RunDirectory(results[-1].path).environment()["threads"] == int(threads)
    one, three = results
    assert sha(one) == sha(three)
    pd.testing.assert_frame_equal(one.clients, three.clients, check_exact=True)


SLOW_ROUNDS = ["rounds=15", "algorithm=local", "train.epochs=10"]


@pytest.mark.long
def test_sigkill_in_the_middle_of_a_round_then_resume(tiny_run, tmp_path: Path) -> None:
    whole = tiny_run(*SLOW_ROUNDS)
    file = tmp_path / "slow.yaml"
    file.write_text(yaml.safe_dump(override(TINY, SLOW_ROUNDS)))
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "flray", "run", str(file), "--out", str(out)]
    for wanted, resume in ((2, []), (6, ["--resume"])):
        process = subprocess.Popen(
            command + resume, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        deadline = time.monotonic() + 120
        while _rounds_done(out) < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (out / "summary.json").exists()
        assert wanted <= _rounds_done(out) < 15
    done = tiny_run(*SLOW_ROUNDS, out=out, resume=True)
    assert done.summary["params_sha256"] == whole.summary["params_sha256"]
    assert done.rounds["round"].tolist() == list(range(1, 16))


@pytest.mark.parametrize("nth_write", [3, 7, 10])
def test_a_full_disk_is_one_error_and_loses_one_round(
    tiny_run, known_run, tmp_path: Path, monkeypatch, nth_write: int
) -> None:
    """The disk is full at one write of config, records, data or manifest, and has room later."""
    whole = known_run()
    writes = iter(range(1, 1000))
    replace = os.replace

    def write(source, target) -> None:
        if next(writes) == nth_write:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace(source, target)

    with monkeypatch.context() as full:
        full.setattr(files.os, "replace", write)
        with pytest.raises(ExperimentError, match=r"No space left on device.*--resume"):
            tiny_run(out=tmp_path / "full")
    assert not list((tmp_path / "full").rglob("*.tmp"))
    done = tiny_run(out=tmp_path / "full", resume=True)
    assert done.summary["params_sha256"] == whole.summary["params_sha256"]
    assert done.rounds["round"].tolist() == [1, 2, 3, 4]


def _rounds_done(out: Path) -> int:
    return max((int(p.stem[6:]) for p in (out / "checkpoints").glob("round_*.json")), default=0)


def test_a_finished_run_is_read_not_run_again(tiny_run, tmp_path: Path) -> None:
    first = tiny_run(out=tmp_path / "x")
    stamp = (tmp_path / "x" / "rounds.parquet").stat().st_mtime_ns
    again = tiny_run(out=tmp_path / "x", resume=True)
    assert again.summary == first.summary
    assert (tmp_path / "x" / "rounds.parquet").stat().st_mtime_ns == stamp


def test_checkpoints_of_local_follow_the_cohort(tiny_run) -> None:
    """Once everybody was heard, a round of 1 of 6 clients writes about one model, not six."""
    quickly = ["train.epochs=1", "evaluate.every=40"]
    common = ["algorithm=local", "participation=0.17", "rounds=40", "model.hidden=200"]
    result = tiny_run(*common, *quickly)
    sizes = {p.stem: p.stat().st_size for p in (result.path / "checkpoints").glob("*.safetensors")}
    model = (64 * 200 + 200 + 200 * 10 + 10) * 4
    assert min(sizes.values()) < 1.5 * model


def test_rounds_are_readable_while_a_run_goes_on(tiny_run, tmp_path: Path) -> None:
    """The directory holds the first rounds; all but the last once that is shown."""
    seen = []
    tiny_run(
        out=tmp_path / "live",
        on_round=lambda row: seen.append(
            (row["round"], len(RunDirectory(tmp_path / "live").rounds()))
        ),
    )
    assert [t for t, _ in seen] == [1, 2, 3, 4]
    recorded = [number for _, number in seen]
    assert recorded == sorted(recorded)
    assert all(number <= t for t, number in seen)
    assert recorded[-1] >= 3


def test_a_round_is_written_while_the_next_one_trains(tiny_run, monkeypatch) -> None:
    """Round 1 cannot be written before round 2 was computed."""
    computed, write = threading.Event(), CheckpointStore.write

    def waiting(self, snapshot):
        if snapshot.round == 1:
            assert computed.wait(60)
        write(self, snapshot)

    train = Federation.train

    def noted(self, bank, cohort, *arguments, **keywords):
        if cohort.t == 2:
            computed.set()
        return train(self, bank, cohort, *arguments, **keywords)

    monkeypatch.setattr(CheckpointStore, "write", waiting)
    monkeypatch.setattr(Federation, "train", noted)
    assert tiny_run("evaluate.every=4").summary["rounds"] == 4


def test_an_interrupted_run_writes_the_round_it_had_computed(tiny_run, tmp_path) -> None:
    out = tmp_path / "run"

    def interrupt(row) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(out=out, on_round=interrupt)
    assert _rounds_done(out) == 2
    assert len(RunDirectory(out).rounds()) == 2


def test_clients_without_test_examples_are_left_out_of_the_mean(tiny_run) -> None:
    """20 clients, 20 samples, own_split: a client's only sample is for training."""
    split = "split={name: iid, clients: 20, samples_per_client: 1, test: own_split, holdout: 3}"
    with pytest.raises(ExperimentError, match="no client has test examples"):
        tiny_run(split)
    ragged = tiny_run("split.test=own_split", "split.min_samples=1", "split.alpha=0.05")
    assert ragged.summary["rounds"] == 4


def test_a_method_may_inherit_from_one_whose_state_is_in_another_package(monkeypatch) -> None:
    @dataclass(frozen=True)
    class Mine(FedAvg):
        stage: str = "mine"

    monkeypatch.setattr(Mine, "__module__", "mine.methods")
    assert packages_of(Mine()) == {"mine", "flray"}
