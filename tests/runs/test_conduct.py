"""A run is conducted one way: one process at a time, tracked, stopped on request, dealt once."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import flray
from flray.algorithms.fedavg import FedAvg
from flray.errors import ClientFailure, ExperimentError
from flray.forecast.forecast import forecast
from flray.records.lock import holder
from flray.records.run_directory import RunDirectory
from flray.runs import preparing, watching
from flray.runs.conduct import STOP_FILE, Monitor, ask_to_stop, conduct
from flray.runs.launch import run_experiment

from scenarios import GPU_FULL, GPU_FULL_SHOWN, TINY, tiny_experiment

RAY = ["execution.executor=ray", "execution.block=2"]


@pytest.fixture
def dealt(monkeypatch) -> list[object]:
    """The experiments whose data were dealt."""
    seen: list[object] = []
    deal = preparing.deal
    monkeypatch.setattr(
        preparing, "deal", lambda given, data: seen.append(given) or deal(given, data)
    )
    return seen


def test_the_lock_is_held_and_an_earlier_wish_to_stop_is_forgotten(tmp_path: Path) -> None:
    ask_to_stop(tmp_path)

    def compute(on_round, should_stop) -> bool:
        assert holder(tmp_path) == os.getpid()
        assert not should_stop()
        with pytest.raises(ExperimentError, match="being run by another process"):
            conduct(compute, tmp_path, Monitor())
        ask_to_stop(tmp_path)
        on_round({"round": 1})
        return not should_stop()

    rows: list[dict[str, int]] = []
    assert not conduct(compute, tmp_path, Monitor(rows.append))
    assert rows == [{"round": 1}]
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    def refuse(_on_round, _should_stop) -> bool:
        raise ExperimentError("no")

    with pytest.raises(ExperimentError, match=r"^no$"):
        conduct(refuse, tmp_path / "run", Monitor())
    assert not (tmp_path / "run").exists()


class Full(FedAvg):
    def round(self, state, cohort, fed):
        raise torch.OutOfMemoryError(GPU_FULL)


class FullAtClients(FedAvg):
    def gradient(self, grad, w, batch, w0, memo):
        raise torch.OutOfMemoryError(GPU_FULL)


BY_CLIENTS = (
    rf"^in round 1 client 0 failed: {re.escape(GPU_FULL_SHOWN)} \(test_conduct.py, line \d+\) "
    r"\(6 of 6 clients failed: .*\); the cause is the GPU, not a client$"
)


@pytest.mark.parametrize(
    ("method", "message", "rule"),
    [
        (Full(), f"^{re.escape(GPU_FULL_SHOWN)}$", "raise"),
        (FullAtClients(), BY_CLIENTS, "raise"),
        (FullAtClients(), BY_CLIENTS, "drop"),
    ],
)
def test_a_full_gpu_ends_a_run_in_one_plain_message(method, message, rule) -> None:
    with pytest.raises(ClientFailure, match=message):
        flray.run(TINY, algorithm=method, rounds=1, participation=1, on_client_failure=rule)


def test_who_watches_a_directory_can_stop_a_run_in_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert (
        run_experiment(tiny_experiment(), out, monitor=Monitor(lambda _row: ask_to_stop(out)))
        is None
    )
    assert RunDirectory(out).rounds()["round"].tolist() == [1]
    assert not (out / STOP_FILE).exists()


def test_a_run_from_python_is_tracked(tmp_path: Path) -> None:
    run_experiment(tiny_experiment("tracking=tensorboard"), tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_data_are_dealt_once_in_process_and_for_a_plan(tmp_path: Path, dealt) -> None:
    run_experiment(tiny_experiment(), tmp_path / "run")
    assert len(dealt) == 1
    forecast(tiny_experiment(*RAY))
    assert len(dealt) == 2


def test_the_terminal_deals_the_data_and_the_server_gets_them(tmp_path, dealt, monkeypatch) -> None:
    """The pickled function of the request builds a server with the data, without dealing again."""
    sent = tmp_path / "request"

    class Waiting:
        stdin = sent.open("wb")

    monkeypatch.setattr(watching, "take_keeper", Waiting)
    watching.start_keeper(tiny_experiment(*RAY), tmp_path / "run", mirror=None)
    assert len(dealt) == 1
    request = pickle.loads(sent.read_bytes())
    build = pickle.loads(request.build)
    _, parts = build.args
    assert parts.plan == request.plan
    assert parts.payload.timeline.at(1).num_clients == TINY["split"]["clients"]
    assert request.experiment is None  # nothing is tracked
    assert len(dealt) == 1
