"""W&B online: what a server receives, and what becomes of a run whose server goes away."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from threading import Timer
from typing import Any

import pandas as pd
import pytest
import yaml

from flray.config.experiment import Experiment, parse_experiment
from flray.config.overrides import override
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.runs.launch import Result, run_experiment
from flray.server.evaluation import RoundRow
from flray.server.loop import ignore
from flray.tracking import wandb_run as tracking
from flray.tracking.mirrors import tracked
from flray.tracking.wandb_run import MARK

from scenarios import TINY
from wandb_server import ReceivedRun, Request, WandbServer, teardown, wandb_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

KEY = "0123456789abcdef0123456789abcdef01234567"
SECRET = "a-secret-of-mine"
ONLINE = "tracking={name: wandb, mode: online, project: ours, group: tiny ones, tags: [tiny]}"
FLHC = (
    "split={name: label_swap, clients: 6, groups: 2}",
    "algorithm={name: flhc, rounds_before: 2}",
)
PRIVATE = """
from dataclasses import dataclass
from flray.data.datasets.synthetic import Synthetic

@dataclass(frozen=True)
class Private(Synthetic):
    api_token: str = ""
"""


def environment(server: WandbServer, folder: Path) -> dict[str, str]:
    """In which wandb knows this server, no other, and nothing of the user."""
    user = str(folder / "wandb_of_the_user")
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | {
        "NETRC": str(folder / "netrc"),
        "WANDB_API_KEY": KEY,
        "WANDB_BASE_URL": server.url,
        "WANDB_CACHE_DIR": user,
        "WANDB_CONFIG_DIR": user,
        "WANDB_DATA_DIR": user,
        "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1",  # the shortest there is; else it is 15 s
    }


@contextmanager
def online(folder: Path, finish_timeout_s: float = 60.0) -> Iterator[WandbServer]:
    """A server, and this process as one that W&B has not been used in."""
    teardown()
    with wandb_server() as server, pytest.MonkeyPatch.context() as patch:
        given = environment(server, folder)
        for name in os.environ.keys() - given.keys():
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        patch.setattr(tracking, "INIT_TIMEOUT_S", 60.0)  # this machine may be busy
        patch.setattr(tracking, "FINISH_TIMEOUT_S", finish_timeout_s)
        patch.setattr(tracking, "CLOSE_TIMEOUT_S", 120.0)
        yield server
        teardown()
    assert server.faults == []
    assert places_of(KEY, server.requests) == {"Authorization"}


def places_of(secret: str, requests: Sequence[Request]) -> set[str]:
    """The headers and other parts of requests in which a secret is, as it is or as base64."""
    encoded = base64.b64encode(f"api:{secret}".encode()).decode()
    parts = [
        (name, value)
        for request in requests
        for name, value in [
            *request.headers.items(),
            ("path", request.path),
            ("body", request.body.decode("latin-1")),
        ]
    ]
    return {name for name, value in parts if secret in value or encoded in value}


def experiment_of(*overrides: str) -> Experiment:
    return parse_experiment(override(TINY, (ONLINE, *overrides)))


def run_tracked(
    out: Path,
    *overrides: str,
    on_round: Callable[[RoundRow], None] = ignore,
    rounds: int = 4,
    **keywords: Any,
) -> Result:
    """Run the tiny experiment with tracking, until so many rounds are done in all."""
    experiment = experiment_of(*overrides)
    seen: list[int] = []

    def see(row: RoundRow) -> None:
        seen.append(row["round"])
        on_round(row)

    with tracked(experiment, out, see, **keywords) as log:
        return run_experiment(
            experiment, out, out.exists(), log, lambda: bool(seen) and seen[-1] >= rounds
        )


def the_run(server: WandbServer) -> ReceivedRun:
    (run,) = server.runs.values()
    return run


def assert_same_rounds(logged: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Every metric of every round is the one in rounds.parquet, to the last bit."""
    expected = [row | {"step": row["round"]} for row in RunDirectory(out).rows()]
    assert len(expected) == 4
    assert len(expected[0]) > 10
    assert [set(row) for row in logged] == [set(row) for row in expected]
    pd.testing.assert_frame_equal(  # NaN is NaN, and 0 is 0.0
        pd.DataFrame(logged),
        pd.DataFrame(expected),
        check_dtype=False,
        check_exact=True,
        check_like=True,
    )


@dataclass(frozen=True)
class Mirrored:
    """A run that is over, and the server that was told of it."""

    result: Result
    server: WandbServer

    @property
    def run(self) -> ReceivedRun:
        return the_run(self.server)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Mirrored:
    """A clustering run with a figure, a secret in its configuration and one in its environment."""
    folder = tmp_path_factory.mktemp("online")
    (folder / "private_data.py").write_text(PRIVATE)
    data = ", ".join(f"{name}: {value}" for name, value in TINY["dataset"].items())
    data = data.replace("name: synthetic", "name: 'private_data:Private'")

    def draw(run: Path) -> list[Path]:
        from matplotlib.figure import Figure

        Figure(figsize=(1, 1)).savefig(run / "distance.png")
        return [run / "distance.png"]

    with online(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("MY_TOKEN", SECRET)
        result = run_tracked(
            folder / "run", f"dataset={{{data}, api_token: {SECRET}}}", *FLHC, draw=draw
        )
    return Mirrored(result, server)


def test_the_server_receives_every_metric_of_every_round(mirrored) -> None:
    rows = mirrored.run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]  # the last one: tables and figures
    assert_same_rounds(rows[:4], mirrored.result.path)
    assert mirrored.run.places == [0, 1, 2, 3, 4]  # each line once


def test_the_server_receives_the_summary_and_that_all_went_well(mirrored) -> None:
    run, summary = mirrored.run, mirrored.result.summary
    assert "params_sha256" in summary
    assert {name: run.summary.get(name) for name in summary} == summary  # W&B has no null
    assert json.loads(run.files["wandb-summary.json"])["params_sha256"] == summary["params_sha256"]
    assert run.exit_codes == [0]


def test_the_server_receives_the_configuration_without_its_secret(mirrored) -> None:
    held = yaml.safe_load((mirrored.result.path / "config.yaml").read_text())
    assert held["dataset"].pop("api_token") == SECRET
    config = mirrored.run.config()
    assert set(config.pop("_wandb")) == {"cli_version", "m", "python_version", "t"}
    assert config == held
    uploaded = yaml.safe_load(mirrored.run.files["config.yaml"])
    assert {name: given["value"] for name, given in uploaded.items() if name != "_wandb"} == held


def test_the_run_has_the_name_group_and_project_of_the_experiment(mirrored) -> None:
    run = mirrored.run
    assert run.id == json.loads((mirrored.result.path / MARK).read_text())["id"]
    assert set(run.told("project")) == {"ours"}
    assert run.told("groupName") == ["tiny ones"]
    assert run.told("displayName") == ["flhc private_data:Private seed 0"]
    assert run.told("tags") == [["tiny"]]


def test_the_partition_and_the_figure_are_uploaded(mirrored) -> None:
    out, run = mirrored.result.path, mirrored.run
    last = run.rows()[-1]
    assert set(last) == {"step", "clusterings/round_2", "figures/distance"}
    clustering = read_clusterings(out)[2]
    rows = zip(clustering.clients, clustering.labels, clustering.groups, strict=True)
    expected = {
        "columns": ["client", "cluster", "group"],
        "data": [[int(value) for value in row] for row in rows],
    }
    assert len(expected["data"]) == 6
    assert json.loads(run.files[last["clusterings/round_2"]["path"]]) == expected
    (table,) = (
        json.loads(content)
        for name, content in mirrored.server.artifact_files.items()
        if name.endswith("clusterings/round_2.table.json")
    )
    assert {name: table[name] for name in expected} == expected
    assert run.files[last["figures/distance"]["path"]] == (out / "distance.png").read_bytes()
    assert set(run.files) == {
        "config.yaml",
        "wandb-summary.json",
        last["clusterings/round_2"]["path"],
        last["figures/distance"]["path"],
    }


def test_nothing_is_told_but_what_is_meant_to_be(mirrored) -> None:
    """The folder of wandb's own copy of a table is the one path, as the module says."""
    requests = mirrored.server.requests
    assert places_of(KEY, requests) == {"Authorization"}
    assert places_of(SECRET, requests) == set()
    assert {r.method for r in requests if "Authorization" in r.headers} == {"POST"}  # no uploads
    told = {name: mirrored.run.told(name) for name in ("commit", "host", "program", "repo")}
    assert told == {"commit": [], "host": [], "program": ["flray"], "repo": []}
    paths = (str(mirrored.result.path.parent), str(Path(__file__).parent), sys.prefix)
    told_a_path = {r.path for r in requests for path in paths if path.encode() in r.body}
    assert {name.rpartition("/")[2] for name in told_a_path} == {"wandb_manifest.json"}


def test_a_stopped_run_goes_on_in_the_same_run(tmp_path) -> None:
    out = tmp_path / "run"
    with online(tmp_path) as server:
        assert run_tracked(out, rounds=2).summary is None
        assert [row["step"] for row in the_run(server).rows()] == [1, 2]
        teardown()  # as if in another process
        result = run_tracked(out)
    run = the_run(server)
    assert run.id == json.loads((out / MARK).read_text())["id"]
    assert_same_rounds(run.rows(), out)
    assert run.places == [0, 1, 2, 3]  # each line once, none over another
    assert run.summary["params_sha256"] == result.summary["params_sha256"]
    assert run.exit_codes == [0, 0]
    asked = [request.operation for request in server.requests]
    assert asked.count("RunResumeStatus") >= 2  # by both


def test_a_failed_run_says_so_and_goes_on_with_the_round_that_was_not_logged(tmp_path) -> None:
    out = tmp_path / "run"

    def fail(row: RoundRow) -> None:
        if row["round"] == 3:
            raise RuntimeError("in round 3, which is recorded")

    with online(tmp_path) as server:
        with pytest.raises(RuntimeError, match="in round 3"):
            run_tracked(out, on_round=fail)
        run = the_run(server)
        assert ([row["step"] for row in run.rows()], run.exit_codes) == ([1, 2], [1])
        teardown()
        run_tracked(out)
    assert_same_rounds(the_run(server).rows(), out)
    assert the_run(server).places == [0, 1, 2, 3]
    assert the_run(server).exit_codes == [1, 0]


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Result:
    experiment = parse_experiment(TINY)
    return run_experiment(experiment, tmp_path_factory.mktemp("untracked") / "run")


@pytest.mark.parametrize("then", [WandbServer.die, WandbServer.fall_silent])
def test_a_server_that_goes_away_is_not_missed(tmp_path, untracked, then, caplog) -> None:
    """And what it has missed can be sent later: with what it has got, which is the same."""
    out = tmp_path / "run"

    def lose_the_server(row: RoundRow) -> None:
        if row["round"] == 3:
            wait_for_history(server)
            then(server)

    with online(tmp_path, finish_timeout_s=2.0) as server:
        result = run_tracked(out, on_round=lose_the_server)
    assert [row["step"] for row in the_run(server).rows()] in ([1], [1, 2])
    assert the_run(server).exit_codes == []
    assert result.summary["params_sha256"] == untracked.summary["params_sha256"]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("tracking is off (Timed out finishing run.)")

    advice = warning.split("`")[1]
    with wandb_server(server.runs) as again:
        env = environment(again, tmp_path) | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "WANDB_ERROR_REPORTING": "false",
        }
        subprocess.run(
            advice, shell=True, cwd=tmp_path, env=env, timeout=120, check=True, capture_output=True
        )
    assert again.faults == []
    received = {json.dumps(row, sort_keys=True) for row in the_run(again).rows()}
    assert_same_rounds(sorted(map(json.loads, received), key=itemgetter("step")), out)
    assert the_run(again).summary["params_sha256"] == untracked.summary["params_sha256"]
    assert the_run(again).exit_codes == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the service below /proc")
@pytest.mark.parametrize("when", ["in round 3", "at the end"])
def test_a_service_that_is_killed_is_not_missed(
    tmp_path, untracked, when, monkeypatch, caplog
) -> None:
    from wandb import Run

    finish = Run.finish

    def kill_in_round_3(row: RoundRow) -> None:
        if row["round"] == 3:
            wait_for_history(server)
            signal_services(signal.SIGKILL)

    def finish_and_kill(run: Run, exit_code: int) -> None:
        signal_services(signal.SIGSTOP)  # so that `finish` waits for an answer
        Timer(0.5, signal_services, [signal.SIGKILL]).start()
        finish(run, exit_code)

    if when == "at the end":
        monkeypatch.setattr(Run, "finish", finish_and_kill)
    with online(tmp_path) as server:
        on_round = kill_in_round_3 if when == "in round 3" else ignore
        result = run_tracked(tmp_path / "run", on_round=on_round)
        with suppress(OSError):  # of a service that is gone
            teardown()
    assert result.summary["params_sha256"] == untracked.summary["params_sha256"]
    (warning,) = warnings_of(caplog)
    assert re.match(r"tracking is off \(.+\): .*`wandb sync ", warning)


def wait_for_history(server: WandbServer) -> None:
    server.wait_for(lambda: any(run.history for run in server.runs.values()))


def signal_services(what: signal.Signals) -> None:
    """Signal the wandb services that this process has started."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # that process has ended
            stats.append(path.read_text())
    services = [
        int(stat.split()[0])
        for stat in stats
        if "(wandb-core)" in stat and int(stat.rpartition(")")[2].split()[1]) == os.getpid()
    ]
    assert services
    for pid in services:
        os.kill(pid, what)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == tracking.__name__]
