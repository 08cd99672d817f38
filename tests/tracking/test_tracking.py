"""What trackers get, what they do not get, and that they cannot be in the way of a run."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import yaml
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent

import flray
from flray.config.experiment import parse_experiment
from flray.config.overrides import THRESHOLD, override
from flray.config.tracking import NoTracking, Wandb
from flray.errors import ExperimentError
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.reports.figure_files import figures_of
from flray.runs.conduct import Monitor
from flray.runs.launch import run_experiment
from flray.sweeps.driver import Progress, Watch, run_sweep
from flray.sweeps.space import parse_space
from flray.tracking import loggers, mirrors
from flray.tracking.loggers import WandbRounds, chosen_mode
from flray.tracking.mirrors import track_table, tracked, without_secrets

from scenarios import TINY, Result, tiny_experiment

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef0123456789abcdef01234567"
SECRETS = (
    *("WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("GOOGLE_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "RAY_AUTH_TOKEN", "DATABASE_PASSWORD"),
)
OFFLINE = "tracking={name: wandb, mode: offline, group: ours, tags: [tiny]}"
BOARD = "tracking=tensorboard"
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


def teardown() -> None:
    """Let W&B's service write what it was given, and end it."""
    import wandb  # which takes seconds

    wandb.teardown()


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_service() -> Iterator[None]:
    yield
    teardown()


def run_tracked(out: Path, *overrides: str, rounds: int = 4, **keywords: Any) -> Result:
    """Run the tiny experiment with tracking, until so many rounds are done in all."""
    experiment = tiny_experiment(*overrides)
    seen: list[int] = []
    monitor = Monitor(
        lambda row: seen.append(row["round"]), lambda: bool(seen) and seen[-1] >= rounds, **keywords
    )
    run_experiment(experiment, out, out.exists(), monitor)
    return Result.of(out)


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


def run_record(segment: list["Record"]) -> Any:  # Any: a message of protobuf
    return next(r.run for r in segment if r.WhichOneof("record_type") == "run")


def config_of(segment: list["Record"]) -> dict[str, Any]:
    updates = run_record(segment).config.update
    return {u.key: json.loads(u.value_json) for u in updates if u.key != "_wandb"}


def summary_of(segment: list["Record"]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in segment:
        if record.WhichOneof("record_type") == "summary":
            found |= {u.key: json.loads(u.value_json) for u in record.summary.update if u.key}
    return found


def board_of(out: Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of everything in the event files of TensorBoard, which are TFRecords."""
    scalars = []
    for file in sorted((out / "tensorboard").glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = TensorBoardEvent.FromString(data[at + 12 : at + 12 + length])
            scalars += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += length + 16
    return scalars


def test_wandb_gets_every_metric_of_every_round_and_the_summary(tmp_path) -> None:
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
    kinds = [record.WhichOneof("record_type") for record in segment]
    last_row = len(kinds) - kinds[::-1].index("history")
    assert "params_sha256" not in summary_of(segment[:last_row])  # rows overwrite the summary


def test_wandb_gets_the_configuration_and_nothing_of_the_machine(tmp_path, monkeypatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, KEY)
    out = tmp_path / "run"
    run_tracked(out, OFFLINE)
    (segment,) = segments(out)
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config_of(segment) == config
    assert config["execution"]["block"] > 0  # chosen when the run began
    run = run_record(segment)
    assert (run.project, run.run_group, list(run.tags)) == ("flray", "ours", ["tiny"])
    assert run.display_name == "fedavg synthetic seed 0"
    assert (run.host, run.git.commit, run.git.remote_url) == ("", "", "")
    kinds = {record.WhichOneof("record_type") for record in segment}
    assert "history" in kinds
    assert not kinds & {"environment", "output", "output_raw", "stats"}
    files = [path for path in out.rglob("*") if path.is_file()]
    assert any(path.name == "debug.log" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    names = {path.name for path in files}
    assert not names & {"requirements.txt", "wandb-metadata.json", "output.log"}


def test_keys_that_look_like_secrets_are_dropped_and_others_stay() -> None:
    kept = {"seed": 1, "keyframes": 2, "tokenizer": "a", "split": {"clients": 3}, "tags": ["a"]}
    secret = {"key": 1, "api_key": 1, "WANDB_API_KEY": 1, "hf-token": 1, "password": 1, "secret": 1}
    assert without_secrets(kept) == kept
    assert without_secrets(kept | secret | {"more": [secret | kept]}) == kept | {"more": [kept]}


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path) -> None:
    """Killed between record and log, or with its last checkpoint half written: no step is logged
    twice and none is left out."""
    begun = tmp_path / "begun"
    assert run_tracked(begun, OFFLINE, rounds=2).summary is None
    mark = json.loads((begun / "wandb.json").read_text())
    assert mark["round"] == 2
    teardown()  # as if in another process
    for num_logged, steps in ((2, [3, 4]), (1, [2, 3, 4]), (3, [4])):
        out = tmp_path / str(num_logged)
        shutil.copytree(begun, out)
        (out / "wandb.json").write_text(json.dumps(mark | {"round": num_logged}))
        assert run_tracked(out, OFFLINE).summary is not None
        first, second = segments(out)
        assert [row["step"] for row in history(first)] == [1, 2]
        assert [row["step"] for row in history(second)] == steps
        assert {run_record(first).run_id, run_record(second).run_id} == {mark["id"]}


def test_a_finished_run_is_mirrored_once(tmp_path) -> None:
    out = tmp_path / "run"
    run_experiment(tiny_experiment(), out)
    experiment = tiny_experiment(OFFLINE)
    for _ in range(2):
        with tracked(experiment, out, group="the sweep"):
            pass
    (segment,) = segments(out)
    assert [row["step"] for row in history(segment)] == [1, 2, 3, 4]
    assert "params_sha256" in summary_of(segment)
    assert run_record(segment).run_group == "ours"  # the experiment's group comes first


def test_more_rounds_of_a_finished_run_and_their_summary_follow(tmp_path) -> None:
    out = tmp_path / "run"
    run_tracked(out, OFFLINE)
    RunDirectory(out).change_settings(tiny_experiment(OFFLINE, "rounds=6").plain, ["rounds"])
    result = run_tracked(out, OFFLINE, "rounds=6", rounds=6)
    first, second = segments(out)
    assert [row["step"] for row in history(second)] == [5, 6]
    assert summary_of(first)["params_sha256"] != result.summary["params_sha256"]
    assert summary_of(second)["params_sha256"] == result.summary["params_sha256"]


def test_clusterings_are_tables_and_figures_images(tmp_path) -> None:
    out = tmp_path / "run"

    def draw(run: Path) -> list[Path]:
        from matplotlib.figure import Figure

        Figure(figsize=(1, 1)).savefig(run / "distance.png")
        return [run / "distance.png"]

    run_tracked(out, OFFLINE, *FLHC, draw=draw)
    (segment,) = segments(out)
    logged = history(segment)
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    assert logged[-1].keys() - logged[0].keys() >= {"clusterings/round_2", "figures/distance"}
    (table,) = out.glob("wandb/*/files/media/table/clusterings/*.json")
    clustering = read_clusterings(out)[2]
    expected = zip(clustering.clients, clustering.labels, clustering.groups, strict=True)
    assert json.loads(table.read_text()) == {
        "columns": ["client", "cluster", "group"],
        "data": [[int(value) for value in row] for row in expected],
    }
    (image,) = out.glob("wandb/*/files/media/images/figures/*.png")
    assert image.read_bytes() == (out / "distance.png").read_bytes()


def test_charts_of_a_score_have_its_unit_and_clusterings_the_names_of_clients(tmp_path) -> None:
    x = np.random.default_rng(0).random((40, 2))
    flray.run(
        dataset=(x, x[:, 0]),
        clients=np.repeat(["house", "farm", "mill", "shop"], 10),
        model="linear",
        algorithm={"name": "flhc", "rounds_before": 1},
        rounds=2,
        evaluate={"scores": [{"name": "mae", "unit": "kW"}, "mape"]},
        tracking={"name": "wandb", "mode": "offline"},
        out=tmp_path / "run",
    )
    (segment,) = segments(tmp_path / "run")
    logged = history(segment)[-1]
    assert {"mae_mean kW", "validation_mae_worst kW", "mae_variance kW²", "mape_mean"} <= set(
        logged
    )
    assert not {"mae_mean", "mape_mean %"} & set(logged)
    (table,) = (tmp_path / "run").glob("wandb/*/files/media/table/clusterings/*.json")
    assert [row[1] for row in json.loads(table.read_text())["data"]] == [
        *("farm", "house", "mill", "shop")
    ]


def test_the_table_of_a_sweep_is_a_run_of_its_group(tmp_path) -> None:
    folder = tmp_path / "my_sweep"
    folder.mkdir()
    frame = pd.DataFrame({"lr": [0.1, 0.2], "accuracy": [0.5, 0.75]})
    space = {"space": {"train.lr": [0.1, 0.2]}, "token": "x"}
    track_table(Wandb(mode="offline"), folder, frame, space)
    (segment,) = segments(folder)
    assert config_of(segment) == {"space": {"train.lr": [0.1, 0.2]}}
    assert run_record(segment).run_group == run_record(segment).display_name == "my_sweep"
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
        assert run_record(segment).run_group == "mine"
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
from flray.tracking.loggers import SETTINGS
from test_tracking import run_tracked
SETTINGS["init_timeout"] = 2.0
run_tracked(Path(sys.argv[1]), "tracking={name: wandb, mode: online}")
"""


@pytest.mark.long
@pytest.mark.parametrize("is_listening", [False, True], ids=["refuses", "is silent"])
def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path, is_listening) -> None:
    """The process ends, too."""
    out, here = tmp_path / "run", Path(__file__).parent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if is_listening else 9
        env = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"} | {
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)]),
            "WANDB_API_KEY": KEY,
            "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        }
        command = [sys.executable, "-c", UNREACHABLE, str(out)]
        ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("W&B does not answer") == 1
    assert "Traceback" not in ended.stderr
    logged = [row for segment in segments(out) for row in history(segment)]
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    assert all(KEY.encode() not in path.read_bytes() for path in out.rglob("*") if path.is_file())


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_that_fails_is_one_warning_and_the_rest_follows_later(
    tmp_path, tracker, monkeypatch, caplog
) -> None:
    out, logger = (
        tmp_path / "run",
        {"wandb": WandbRounds, "tensorboard": TensorBoardLogger}[tracker],
    )
    given, log = {"wandb": OFFLINE, "tensorboard": BOARD}[tracker], logger.log_metrics
    steps = []

    def log_or_fail(self: Any, metrics: Any, step: int) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise ConnectionResetError("Connection lost")
        log(self, metrics, step)

    monkeypatch.setattr(logger, "log_metrics", log_or_fail)
    assert run_tracked(out, given).summary is not None
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("flray")]
    assert warning.startswith(f"tracking is off (Connection lost): {out} holds everything")
    assert ("wandb sync" in warning) == (tracker == "wandb")
    assert json.loads((out / f"{tracker}.json").read_text())["round"] == 2
    teardown()  # as if in another process
    run_tracked(out, given)
    assert steps[:5] == [1, 2, 3, 3, 4]
    assert json.loads((out / f"{tracker}.json").read_text())["is_complete"]


def test_training_does_not_wait_for_a_tracker(tmp_path, monkeypatch, caplog) -> None:
    answer, rows = Event(), []
    monkeypatch.setattr(loggers, "TensorBoardLogger", lambda *_, **__: answer.wait(30))
    monkeypatch.setattr(mirrors, "CLOSE_TIMEOUT_S", 0.2)
    experiment = tiny_experiment(BOARD)
    assert run_experiment(experiment, tmp_path / "run", False, Monitor(rows.append)) is not None
    assert len(rows) == 4  # while the logger is not open
    assert "tracking is off (it takes more than 0.2 s)" in caplog.text
    answer.set()


@pytest.mark.parametrize("given", [OFFLINE, BOARD])
def test_a_run_that_is_refused_leaves_nothing(tmp_path, given) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "foreign").touch()
    with pytest.raises(ExperimentError, match="foreign"):
        run_tracked(tmp_path / "run", given)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["foreign"]


@pytest.mark.parametrize("given", ["none", "{name: wandb, mode: disabled}"])
def test_without_tracking_there_is_nothing_of_wandb(tmp_path, given, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    out = tmp_path / "run"
    assert run_tracked(out, f"tracking={given}").summary is not None
    assert not list(out.rglob("*wandb*"))


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_without_its_package_a_tracker_names_what_to_install(
    tmp_path, package, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExperimentError, match=rf"pip install {package}.*tracking=none"):
        run_tracked(tmp_path / "run", f"tracking={package}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_tensorboard_has_each_number_once_in_every_task_of_a_job(
    tmp_path, monkeypatch, rank
) -> None:
    """Resumed, too. Lightning logs in rank 0 only, which it reads from the variables of a job."""
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    out = tmp_path / "run"
    run_tracked(out, BOARD, rounds=2)
    result = run_tracked(out, BOARD)
    scalars = {(name, step): value for name, step, value in board_of(out)}
    assert len(scalars) == len(board_of(out))
    for row in RunDirectory(out).rows():
        for name, value in row.items():
            assert scalars[name, row["round"]] == pytest.approx(value, nan_ok=True), name
    assert scalars["summary_accuracy_mean", 4] == pytest.approx(result.summary["accuracy_mean"])
    assert yaml.safe_load((out / "tensorboard" / "hparams.yaml").read_text())["rounds"] == 4


def test_mlflow_has_configuration_rounds_and_summary_in_one_run(tmp_path) -> None:
    mlflow = pytest.importorskip("mlflow")
    out, store = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    given = f"tracking={{name: mlflow, uri: '{store}', experiment: mine}}"
    run_tracked(out, given, rounds=2)
    result = run_tracked(out, given)
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.data.params["train.lr"] == str(RunDirectory(out).config()["train"]["lr"])
    accuracies = client.get_metric_history(run.info.run_id, "accuracy_mean")
    expected = [(row["round"], row["accuracy_mean"]) for row in RunDirectory(out).rows()]
    assert [(metric.step, metric.value) for metric in accuracies] == expected
    assert run.data.metrics["summary_accuracy_mean"] == result.summary["accuracy_mean"]
    assert run.info.status == "FINISHED"


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


def test_online_without_a_key_is_refused_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("wandb.login", lambda **_: False)
    with pytest.raises(ExperimentError, match="no key of W&B: `wandb login`"):
        run_tracked(tmp_path / "run", "tracking={name: wandb, mode: online}")
    assert not (tmp_path / "run").exists()


def test_tracking_is_a_name_or_a_mapping() -> None:
    assert tiny_experiment().settings.tracking == NoTracking()
    assert tiny_experiment("tracking=wandb").settings.tracking == Wandb()
    given = tiny_experiment("tracking=wandb", "tracking.mode=offline", "tracking.project=mine")
    assert given.settings.tracking == Wandb("mine", "offline")
    assert parse_experiment(given.plain).settings == given.settings
    with pytest.raises(ExperimentError, match="unknown tracking 'wandbb'"):
        tiny_experiment("tracking=wandbb")
    with pytest.raises(ExperimentError, match="unknown tracking 'fractions:Fraction'"):
        tiny_experiment("tracking=fractions:Fraction")
