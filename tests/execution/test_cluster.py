"""A local cluster: nobody without its token is heard, and nothing of it outlives its owner."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from flray.errors import ExperimentError
from flray.execution.cluster import connected

from scenarios import is_alive, wait_for

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0  # Ray's agents alone take up to 100 s to notice that their raylet is gone
OWNER = """
import json
import os

import ray

from flray.execution.cluster import connected

with connected():
    import psutil

    assert ray.get(ray.remote(lambda: 6 * 7).remote()) == 42
    told = {
        "address": ray.get_runtime_context().gcs_address,
        "session": ray._private.worker._global_node.get_session_dir_path(),
        "token": os.environ.get("RAY_AUTH_TOKEN"),
        "processes": {
            process.pid: process.name() for process in psutil.Process().children(recursive=True)
        },
    }
    print(json.dumps(told), flush=True)
    input()
print({name for name in os.environ if name.startswith("RAY_AUTH")})
"""
# Asks whatever Ray asks first; a job would have to pass the same check.
STRANGER = """
import sys

from ray._raylet import GcsClient

print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", namespace=None, timeout=10))
"""


@contextmanager
def owner_of_a_cluster(home: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**environment, "HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def ask(address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STRANGER, address]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.long
def test_a_local_cluster_hears_only_processes_with_its_token(tmp_path) -> None:
    """The token is in the environment of its processes alone."""
    with owner_of_a_cluster(tmp_path) as (process, told):
        for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}):
            refused = ask(told["address"], **{"RAY_AUTH_MODE": "token", **wrong})
            assert refused.returncode == 1
            assert "InvalidAuthToken" in refused.stderr
        right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": told["token"]}
        assert ask(told["address"], **right).returncode == 0
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in told["processes"]]
        written = [path.read_bytes() for path in Path(told["session"]).rglob("*") if path.is_file()]
        assert len(commands) > 3
        assert len(written) > 3
        assert not any(told["token"] in text for text in commands)
        assert not any(told["token"].encode() in content for content in written)
        assert not (tmp_path / ".ray").exists()
        rest, _ = process.communicate("\n", timeout=TIMEOUT_S)
    assert rest == "set()\n"


@pytest.mark.usefixtures("without_cluster")
def test_an_authentication_mode_of_the_user_is_left_alone(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    seen: list[tuple[str | None, str | None]] = []

    def init(**_options: object) -> None:
        seen.append((os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")))
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ExperimentError), connected():
        pass
    assert seen == [("disabled", None)]


@pytest.mark.usefixtures("without_cluster")
def test_a_ray_that_does_not_start_is_one_line_with_the_reason(monkeypatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def init(**_options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    expected = r"Ray did not start on this machine \(.*timed out during startup\.\); .*try again"
    with pytest.raises(ExperimentError, match=expected) as raised, connected():
        pass
    assert "\n" not in str(raised.value)
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.long
def test_no_process_of_a_cluster_outlives_a_killed_owner(tmp_path) -> None:
    with owner_of_a_cluster(tmp_path) as (process, told):
        assert any("Agent" in name or "python" in name for name in told["processes"].values())
        assert all(map(is_alive, told["processes"]))
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, told["processes"])), "their end", TIMEOUT_S)
