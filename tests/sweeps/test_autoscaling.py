"""A cluster that grows for a sweep and shrinks after it, on Ray's own fake provider.

`ray.cluster_utils.AutoscalingCluster` itself cannot be used: the wheel of ray 2.60 lacks the file
that it reads its configuration from, and it begins with `ray stop --force`, which ends every Ray of
the machine. What it starts is started here.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import pytest
import ray

import flray
from flray.execution.cluster import connected
from flray.execution.nodes import BOOTSTRAP
from flray.wording import counted

from scenarios import TINY, processes_marked, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

HEAD = "ray.head.default"  # as the provider calls it
NUM_WORKERS = 2
MARK = "AUTOSCALING_OF_TESTS"
PATIENCE_S = 120.0
LISTS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray")


def configuration(address: str) -> dict:
    """A head without CPUs and up to two workers, which end when idle for six seconds."""
    worker = {"CPU": 1, "object_store_memory": 100_000_000}
    return {
        "cluster_name": "growing",
        "max_workers": NUM_WORKERS,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,  # all are on one machine
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "max_workers": NUM_WORKERS},
        },
        "head_node_type": HEAD,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in (*LISTS, "worker_start_ray")},
    }


@pytest.fixture
def growing(request, tmp_path, monkeypatch) -> Iterator[None]:
    request.getfixturevalue("without_cluster")
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # their paths must be short
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    file = tmp_path / BOOTSTRAP
    file.write_text(json.dumps(configuration(address)))
    for name, value in {
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        MARK: str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    options = ["--num-cpus=0", "--object-store-memory=100000000", "--include-dashboard=false"]
    with (tmp_path / "head.log").open("wb") as log:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *(f"--port={port}", f"--autoscaling-config={file}", *options),
                f"--temp-dir={sockets}",
            ],
            stdout=log,
            stderr=log,
        )
    monkeypatch.setenv("RAY_ADDRESS", address)
    wait_for(lambda: reachable(port) or head.poll() is not None, "the head to listen", PATIENCE_S)
    assert head.poll() is None, (tmp_path / "head.log").read_text()
    yield
    for pid in processes_marked(MARK, tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    head.wait()
    shutil.rmtree(sockets, ignore_errors=True)


def reachable(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((ray.util.get_node_ip_address(), port), 1).close()
        return True
    return False


def num_workers() -> int:
    return sum(node["Alive"] for node in ray.nodes()) - 1


@pytest.mark.usefixtures("growing")
def test_a_cluster_grows_for_a_sweep_and_shrinks_after_it(tmp_path, capsys) -> None:
    space = {
        "experiment": {**TINY, "rounds": 2},
        "space": {"train.lr": [0.1, 0.05], "seed": [0, 1]},
    }
    with connected():
        assert num_workers() == 0
        seen: list[tuple[float, int]] = []  # seconds, workers
        begin, is_over = time.monotonic(), Event()

        def follow() -> None:
            while not is_over.wait(0.2):
                if not seen or seen[-1][1] != num_workers():
                    seen.append((time.monotonic() - begin, num_workers()))

        with ThreadPoolExecutor(1) as at_once:
            at_once.submit(follow)
            try:
                result = flray.sweep(space, tmp_path / "sweep")
                took = time.monotonic() - begin
                wait_for(lambda: num_workers() == 0, "the workers to end", PATIENCE_S)
                wait_for(lambda: seen[-1][1] == 0, "that to be noted", PATIENCE_S)
            finally:
                is_over.set()
    with capsys.disabled():
        steps = ", ".join(f"{counted(n, 'worker')} after {seconds:.0f} s" for seconds, n in seen)
        print(f"\n{steps}; the sweep took {took:.0f} s")
    assert result.report["done"] == 4
    assert max(number for _, number in seen) >= 1
