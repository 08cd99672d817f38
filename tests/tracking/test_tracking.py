"""W&B: what it is told, what it is not told, and that it cannot be in the way."""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from time import time
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import yaml

from flray.config.experiment import Experiment, parse_experiment
from flray.config.overrides import THRESHOLD, override
from flray.config.tracking import NoTracking, Wandb
from flray.errors import ExperimentError
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.reports.figures import figures_of
from flray.runs.launch import Result, run_experiment
from flray.sweeps.driver import Progress, Watch, run_sweep
from flray.sweeps.space import parse_space
from flray.tracking import wandb_run as tracking
from flray.tracking.mirrors import track_table, tracked
from flray.tracking.wandb_run import MARK, chosen_mode, without_secrets

from scenarios import TINY
from wandb_server import teardown

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef0123456789abcdef01234567"
OFFLINE = "tracking={name: wandb, mode: offline, group: ours, tags: [tiny]}"
FLHC = (
    "split={name: label_swap, clients: 6, groups: 2}",
    "algorithm={name: flhc, rounds_before: 2}",
)


@pytest.fixture(autouse=True)
def _no_wandb_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        if name != "WANDB_SERVICE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_of_the_user"))


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_service() -> Iterator[None]:
    yield
    teardown()


def experiment_of(*overrides: str) -> Experiment:
    return parse_experiment(override(TINY, overrides))


def run_tracked(out: Path, *overrides: str, rounds: int = 4, **keywords: Any) -> Result:
    """Run the tiny experiment with tracking, until so many rounds are done in all."""
    experiment = experiment_of(*overrides)
    seen: list[int] = []
    with tracked(experiment, out, lambda row: seen.append(row["round"]), **keywords) as on_round:
        return run_experiment(
            experiment, out, out.exists(), on_round, lambda: bool(seen) and seen[-1] >= rounds
        )


def records(file: Path) -> Iterator["Record"]:
    """What a .wandb file holds: a LevelDB log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    block, at, whole = 32 * 1024, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits in what is left of the block
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last; 2 and 3 are first and middle
            yield Record.FromString(whole)
            whole = b""
    assert whole == b""


def segments(folder: Path) -> list[list["Record"]]:
    """The records of every .wandb file below a folder, in the order they were begun."""
    teardown()  # a run that is finished may not be written yet
    files = sorted(folder.glob("wandb/*run-*/*.wandb"), key=lambda file: file.stat().st_ctime_ns)
    return [list(records(file)) for file in files]


def history(segment: list["Record"]) -> list[dict[str, Any]]:
    """Everything that was logged, a dict a step, wandb's own keys left out."""
    found = []
    for record in segment:
        if record.WhichOneof("record_type") == "history":
            items = {(i.key or "/".join(i.nested_key[:1])): i for i in record.history.item}
            values = {name: json.loads(item.value_json) for name, item in items.items()}
            assert values["_step"] == record.history.step.num
            found.append(
                {k: v for k, v in values.items() if not k.startswith("_")}
                | {"step": values["_step"]}
            )
    return found


def config_of(segment: list["Record"]) -> dict[str, Any]:
    run = next(r.run for r in segment if r.WhichOneof("record_type") == "run")
    values = {update.key: json.loads(update.value_json) for update in run.config.update}
    return {key: value for key, value in values.items() if key != "_wandb"}


def summary_of(segment: list["Record"]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in segment:
        if record.WhichOneof("record_type") == "summary":
            found |= {u.key: json.loads(u.value_json) for u in record.summary.update if u.key}
    return found


def test_every_metric_of_every_round_is_the_one_in_rounds_parquet(tmp_path) -> None:
    out = tmp_path / "run"
    result = run_tracked(out, OFFLINE)
    (segment,) = segments(out)
    rows = RunDirectory(out).rows()
    assert len(rows) == 4
    assert len(rows[0]) > 10
    expected, logged = [row | {"step": row["round"]} for row in rows], history(segment)
    assert [set(row) for row in logged] == [set(row) for row in expected]
    pd.testing.assert_frame_equal(  # NaN is NaN, and 0 is 0.0
        pd.DataFrame(logged),
        pd.DataFrame(expected),
        check_dtype=False,
        check_exact=True,
        check_like=True,
    )
    assert {key: summary_of(segment)[key] for key in result.summary} == result.summary


def test_it_is_told_the_configuration_and_nothing_of_the_machine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    out = tmp_path / "run"
    run_tracked(out, OFFLINE)
    (segment,) = segments(out)
    held = yaml.safe_load((out / "config.yaml").read_text())
    assert config_of(segment) == held
    assert held["execution"]["block"] > 0  # chosen when the run began
    held["execution"]["block"] = None
    assert held == experiment_of(OFFLINE).plain
    told = next(r.run for r in segment if r.WhichOneof("record_type") == "run")
    assert (told.project, told.run_group, list(told.tags)) == ("flray", "ours", ["tiny"])
    assert (told.host, told.git.commit, told.git.remote_url) == ("", "", "")
    kinds = {record.WhichOneof("record_type") for record in segment}
    assert "history" in kinds
    assert not kinds & {"environment", "output", "output_raw", "stats"}
    files = [path for path in out.rglob("*") if path.is_file()]
    assert any(path.name == "debug.log" for path in files)
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
        assert b"a-secret-of-mine" not in path.read_bytes(), path
    names = {path.name for path in files}
    assert not names & {"requirements.txt", "wandb-metadata.json", "output.log"}


def test_keys_that_look_like_secrets_are_dropped_and_others_stay() -> None:
    kept = {"seed": 1, "keyframes": 2, "tokenizer": "a", "split": {"clients": 3}, "tags": ["a"]}
    secret = {"key": 1, "api_key": 1, "WANDB_API_KEY": 1, "hf-token": 1, "password": 1, "secret": 1}
    assert without_secrets(kept) == kept
    assert without_secrets(kept | secret | {"more": [secret | kept]}) == kept | {"more": [kept]}


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path) -> None:
    out = tmp_path / "run"
    assert run_tracked(out, OFFLINE, rounds=2).summary is None
    assert run_tracked(out, OFFLINE).summary is not None
    first, second = segments(out)
    assert [row["step"] for row in history(first)] == [1, 2]
    assert [row["step"] for row in history(second)] == [3, 4]
    ids = {r.run.run_id for s in (first, second) for r in s if r.WhichOneof("record_type") == "run"}
    assert ids == {json.loads((out / MARK).read_text())["id"]}


def test_rounds_that_were_recorded_but_not_logged_follow_in_order(tmp_path) -> None:
    """Killed between a checkpoint and its log: W&B has round 1, the run directory 1 and 2."""
    out = tmp_path / "run"
    run_tracked(out, OFFLINE, rounds=2)
    mark = json.loads((out / MARK).read_text())
    assert mark["round"] == 2
    (out / MARK).write_text(json.dumps(mark | {"round": 1}))
    run_tracked(out, OFFLINE)
    assert [row["step"] for row in history(segments(out)[1])] == [2, 3, 4]


def test_rounds_that_are_computed_again_are_not_logged_again(tmp_path) -> None:
    """Killed with its last checkpoint half written: W&B has round 3, the run directory 1 and 2."""
    out = tmp_path / "run"
    run_tracked(out, OFFLINE, rounds=2)
    mark = json.loads((out / MARK).read_text())
    (out / MARK).write_text(json.dumps(mark | {"round": 3}))
    run_tracked(out, OFFLINE)
    assert [row["step"] for row in history(segments(out)[1])] == [4]


def test_a_finished_run_is_mirrored_once(tmp_path) -> None:
    out = tmp_path / "run"
    experiment = experiment_of(OFFLINE)
    run_experiment(experiment, out)
    for _ in range(2):
        with tracked(experiment, out, group="the sweep"):
            pass
    (segment,) = segments(out)
    assert [row["step"] for row in history(segment)] == [1, 2, 3, 4]
    assert "params_sha256" in summary_of(segment)
    group = next(r.run.run_group for r in segment if r.WhichOneof("record_type") == "run")
    assert group == "ours"  # what the experiment says comes first


def test_clusterings_are_tables_and_figures_images(tmp_path) -> None:
    out = tmp_path / "run"

    def draw(run: Path) -> list[Path]:
        from matplotlib.figure import Figure

        Figure(figsize=(1, 1)).savefig(run / "distance.png")
        return [run / "distance.png"]

    run_tracked(out, OFFLINE, *FLHC, draw=draw)
    (segment,) = segments(out)
    logged = history(segment)
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5]
    assert set(logged[-1]) == {"step", "clusterings/round_2", "figures/distance"}
    (table,) = out.glob("wandb/*/files/media/table/clusterings/*.json")
    clustering = read_clusterings(out)[2]
    expected = zip(clustering.clients, clustering.labels, clustering.groups, strict=True)
    assert json.loads(table.read_text()) == {
        "columns": ["client", "cluster", "group"],
        "data": [[int(value) for value in row] for row in expected],
    }
    (image,) = out.glob("wandb/*/files/media/images/figures/*.png")
    assert image.read_bytes() == (out / "distance.png").read_bytes()


def test_the_table_of_a_sweep_is_a_run_of_its_group(tmp_path) -> None:
    folder = tmp_path / "my_sweep"
    folder.mkdir()
    frame = pd.DataFrame({"lr": [0.1, 0.2], "accuracy": [0.5, 0.75]})
    space = {"space": {"train.lr": [0.1, 0.2]}, "token": "x"}
    track_table(Wandb(mode="offline"), folder, "results", frame, space)
    (segment,) = segments(folder)
    assert config_of(segment) == {"space": {"train.lr": [0.1, 0.2]}}
    told = next(r.run for r in segment if r.WhichOneof("record_type") == "run")
    assert told.run_group == told.display_name == "my_sweep"
    (table,) = folder.glob("wandb/*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content == {"columns": ["lr", "accuracy"], "data": [[0.1, 0.5], [0.2, 0.75]]}


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_sweep_is_a_group_with_a_run_for_each_trial_and_a_table(tmp_path) -> None:
    """Of FedAvg, and of two clusterings: rounds, though others trained a part.

    The best has figures. What is written after the last row is done is shown while it happens.
    """
    tracking = {"name": "wandb", "mode": "offline"}
    experiment = override(TINY, FLHC) | {"tracking": tracking}
    space = {
        "experiment": experiment,
        "space": {THRESHOLD: {"between_merges": 2}},
        "baseline": {"algorithm": "fedavg"},
    }
    shown: list[Progress] = []
    watch = Watch(shown.append, figures_of)
    result = run_sweep(parse_space(space), tmp_path / "mine", watch=watch)
    assert [each.tracked for each in shown if each.tracked] == [(0, 2), (1, 2)]
    assert result.table["status"].tolist() == ["done"] * 3
    assert result.report["components_trained"] > 2
    best = result.report["best"]["rows"]
    assert result.table["algorithm"][best].tolist() == ["flhc"]
    for row in result.table.itertuples():
        out = result.path / row.folder
        (segment,) = segments(out)
        told = next(r.run for r in segment if r.WhichOneof("record_type") == "run")
        assert told.run_group == "mine"
        logged = {each["step"]: each for each in history(segment)}
        for held in RunDirectory(out).rows():
            assert held["round"] in logged
            for name, value in held.items():
                assert logged[held["round"]][name] == value or value != value, name
        assert summary_of(segment)["params_sha256"] == row.params_sha256
        images = list(out.glob("wandb/*/files/media/images/figures/*.png"))
        assert (len(images) > 2) == (row.row in best)
    (table,) = result.path.glob("wandb/*/files/media/table/*.json")
    assert len(json.loads(table.read_text())["data"]) == 3


UNREACHABLE = """
import sys
from pathlib import Path
from time import perf_counter, time
from flray.tracking import wandb_run as tracking
from test_tracking import run_tracked
tracking.INIT_TIMEOUT_S = 2.0
begin = perf_counter()
run_tracked(Path(sys.argv[1]), "tracking={name: wandb, mode: online}")
print(perf_counter() - begin, time())
"""


def start_unreachable(out: Path, port: int) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    env = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"} | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)]),
        "WANDB_API_KEY": KEY,
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
    }
    command, pipe = [sys.executable, "-c", UNREACHABLE, str(out)], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


@pytest.mark.long
def test_a_server_that_cannot_be_reached_leaves_the_run_offline(tmp_path) -> None:
    """Two at a time: one refuses, the other connects and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {"refuses": 9, "is silent": listener.getsockname()[1]}
        started = {name: start_unreachable(tmp_path / name, port) for name, port in ports.items()}
        for name, process in started.items():
            said, warned = process.communicate(timeout=120)
            assert process.returncode == 0, warned
            took, ended = map(float, said.split())
            assert 2 < took < 20  # it did wait for an answer, and not much longer
            assert time() - ended < 15  # nothing keeps the process from ending
            check_offline(tmp_path / name, warned)


def check_offline(out: Path, warned: str) -> None:
    assert warned.count("W&B does not answer") == 1
    assert "wandb sync" in warned
    assert "Traceback" not in warned
    logged = [row for segment in segments(out) for row in history(segment)]
    rows = RunDirectory(out).rows()
    assert [row["step"] for row in logged] == [row["round"] for row in rows] == [1, 2, 3, 4]
    assert all(KEY.encode() not in p.read_bytes() for p in out.rglob("*") if p.is_file())


class LostRun:
    """A W&B run whose service dies after the second round."""

    def log(self, values: dict[str, Any], step: int) -> None:
        if step > 2:
            raise ConnectionResetError("Connection lost")


def test_a_service_that_dies_turns_tracking_off_with_one_warning(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("wandb.init", lambda **_: LostRun())
    result = run_tracked(tmp_path / "run", OFFLINE)
    assert result.summary is not None
    assert [r.getMessage()[:35] for r in caplog.records] == ["tracking is off (Connection lost): "]
    assert json.loads((result.path / MARK).read_text())["round"] == 2


def test_training_does_not_wait_for_wandb(tmp_path, monkeypatch, caplog) -> None:
    answer = Event()
    seen = []
    monkeypatch.setattr("wandb.init", lambda **_: answer.wait(30) and LostRun())
    monkeypatch.setattr(tracking, "CLOSE_TIMEOUT_S", 0.2)
    experiment = experiment_of(OFFLINE)
    with tracked(experiment, tmp_path / "run", seen.append) as on_round:
        result = run_experiment(experiment, tmp_path / "run", False, on_round)
        assert len(seen) == 4  # while W&B has not answered
    answer.set()
    assert result.summary is not None
    assert "W&B takes more than 0.2 s" in caplog.text


def test_a_run_that_is_refused_leaves_nothing(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "foreign").touch()
    with pytest.raises(ExperimentError, match="foreign"):
        run_tracked(tmp_path / "run", OFFLINE)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["foreign"]


@pytest.mark.parametrize("given", ["none", "{name: wandb, mode: disabled}"])
def test_without_tracking_there_is_nothing_of_wandb(tmp_path, given, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    out = tmp_path / "run"
    assert run_tracked(out, f"tracking={given}").summary is not None
    assert not list(out.rglob("*wandb*"))


def test_without_the_package_it_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ExperimentError, match=r"pip install wandb.*tracking=none"):
        run_tracked(tmp_path / "run", OFFLINE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("asked", "in_environment", "has_key", "mode"),
    [
        ("offline", "online", True, "offline"),
        ("disabled", "online", True, "disabled"),
        ("online", "offline", True, "online"),
        (None, "offline", True, "offline"),
        (None, "disabled", True, "disabled"),
        (None, None, True, "online"),
        (None, None, False, "offline"),
    ],
)
def test_the_mode_is_what_was_asked_for_or_else_by_key(
    asked, in_environment, has_key, mode, monkeypatch
) -> None:
    if in_environment:
        monkeypatch.setenv("WANDB_MODE", in_environment)
    monkeypatch.setattr("wandb.login", lambda **_: has_key)
    assert chosen_mode(Wandb(mode=asked)) == mode


def test_what_cannot_be_tracked_is_refused_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("wandb.login", lambda **_: False)
    with pytest.raises(ExperimentError, match="no key of W&B: `wandb login`"):
        run_tracked(tmp_path / "run", "tracking={name: wandb, mode: online}")
    with pytest.raises(ExperimentError, match=r"tracking: .*project"):
        run_tracked(tmp_path / "run", OFFLINE, "tracking.project=a/b")
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ExperimentError, match="WANDB_MODE must be one of online, offline, dis"):
        run_tracked(tmp_path / "run", "tracking=wandb")
    assert not (tmp_path / "run").exists()


def test_tracking_is_a_name_or_a_mapping() -> None:
    assert experiment_of().settings.tracking == NoTracking()
    assert experiment_of("tracking=wandb").settings.tracking == Wandb()
    given = experiment_of("tracking=wandb", "tracking.mode=offline", "tracking.project=mine")
    assert given.settings.tracking == Wandb("mine", "offline")
    assert parse_experiment(given.plain).settings == given.settings
    with pytest.raises(ExperimentError, match="unknown tracking 'wandbb'"):
        experiment_of("tracking=wandbb")
    with pytest.raises(ExperimentError, match="tracking must be one of mlflow, none"):
        experiment_of("tracking=fractions:Fraction")
