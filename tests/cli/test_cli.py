"""The command line as a user meets it."""

import errno
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from tensorboardX.proto.event_pb2 import Event

from flray.cli import concluding, main
from flray.config.experiment import COMPONENTS
from flray.config.overrides import override
from flray.errors import ExperimentError
from flray.execution.cluster import connected
from flray.records.mirror import Mirror
from flray.records.run_directory import RunDirectory
from flray.runs import rehearsal
from flray.runs.watching import Watcher

from scenarios import GPU_FULL, GPU_FULL_SHOWN, TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def flray(monkeypatch, capsys, tmp_path):
    """Run the command line in a folder of its own: (exit code, stdout, stderr).

    Figures, which take seconds, are drawn where a test sets `figures`.
    """
    monkeypatch.chdir(tmp_path)
    write_figures = concluding.write_figures
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    local = override(TINY, ["algorithm=local"])
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(local))

    def run(*arguments: str, figures: bool = False) -> tuple[int, str, str]:
        drawn = write_figures if figures else lambda *_: []
        monkeypatch.setattr(concluding, "write_figures", drawn)
        monkeypatch.setattr(sys, "argv", ["flray", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


ERRORS = [
    ("trian.lr=0.1", "unknown key 'trian'", "did you mean 'train'"),
    ("rounds=many", "rounds must be a whole number", "'many'"),
    ("train.lr=-1", "train: lr must be > 0", "-1"),
    ("train.lr=1.0e400", "train.lr must be a finite number", "inf"),
    ("rounds=1000000000000000000000000000000", "rounds must be at most", "1000"),
    ("dataset={name: synthetic, num_train: 1000000000}", "this machine has", "GiB"),
    ("dataset={name: digits, size: 100000000}", "this machine has", "lower"),
    ("algorithm=fedprx", "unknown algorithm 'fedprx'", "did you mean 'fedprox'"),
    ("dataset=mnits", "unknown dataset 'mnits'", "known: arrays, cifar10"),
    ("participation=1.5", "participation must be in (0, 1]", "got 1.5"),
    ("split={name: pathological, clients: 290}", "label 0 has 30", "lower clients"),
    ("split={name: dirichlet, clients: 150, alpha: 0.01}", "min_samples", "clients"),
    ("execution.engine=warp", "execution.engine must be one of", "'warp'"),
    ("execution.device=tpu", "device must be auto, cpu, cuda", "'tpu'"),
    ("evaluate.target=99", "target must be in (0, 1]", "99"),
    ("on_client_failure=ignore", "on_client_failure must be one of raise, drop", "'ignore'"),
    ("dataset={name: mnist}", "FLRAY_DATA", "dataset.download=true"),
    ("seeds=none", "seeds must be a whole number", "'none'"),
    ("=3", "expected key=value", "'=3'"),
    ("train.lr=[1", "not valid YAML", "train.lr"),
]


@pytest.mark.parametrize(("argument", "expected", "detail"), ERRORS, ids=[e[0] for e in ERRORS])
def test_a_bad_experiment_is_one_message_and_exit_2(
    flray, argument, expected, detail, monkeypatch
) -> None:
    monkeypatch.setenv("FLRAY_DATA", "empty")
    code, _, err = flray("run", "tiny.yaml", argument)
    assert code == 2
    assert expected in err
    assert detail in err
    assert "Traceback" not in err


def test_a_missing_file_and_a_broken_file(flray, tmp_path) -> None:
    code, _, err = flray("run", "absent.yaml")
    assert (code, "no experiment file absent.yaml" in err) == (2, True)
    (tmp_path / "broken.yaml").write_text("train: [1, 2")
    code, _, err = flray("run", "broken.yaml")
    assert (code, "broken.yaml is not valid YAML" in err) == (2, True)
    (tmp_path / "short.yaml").write_text("dataset: digits")
    code, _, err = flray("run", "short.yaml")
    assert (code, "missing key 'split'" in err) == (2, True)


def test_a_folder_with_another_experiment_is_refused(flray) -> None:
    assert flray("run", "tiny.yaml", "rounds=1", "--out", "here")[0] == 0
    code, _, err = flray("run", "tiny.yaml", "train.epochs=1", "--out", "here", "--resume")
    assert code == 2
    assert "here holds another experiment (train.epochs is 2 there and 1 here)" in err
    Path("ifca.yaml").write_text(yaml.safe_dump(override(TINY, ["algorithm=ifca"])))
    assert flray("run", "ifca.yaml", "rounds=1", "algorithm.number=2", "--out", "ifca")[0] == 0
    code, _, err = flray("run", "tiny.yaml", "--out", "ifca", "--resume")
    assert (code, "unknown key 'algorithm.number'" in err) == (2, True)
    assert "algorithm.number=2, as the command that filled ifca did; without a file" in err
    code, _, err = flray("run", "tiny.yaml", "rounds=1", "--out", "here")
    assert (code, "pass --resume" in err) == (2, True)
    Path("other").mkdir()
    Path("other/thesis.txt").write_text("mine")
    code, _, err = flray("run", "tiny.yaml", "--out", "other")
    assert (code, "thesis.txt" in err) == (2, True)


def test_runs_without_out_lie_beside_a_run_of_their_name_and_resume_finds_them(flray) -> None:
    assert flray("run", "tiny.yaml", "rounds=1", "--out", "runs/tiny")[0] == 0
    out = flray("run", "tiny.yaml", "rounds=2", "--resume")[1]
    assert "runs/tiny\n" in out
    for _ in range(2):
        assert flray("run", "tiny.yaml", "rounds=1")[0] == 0
    *_, newest = sorted(Path("runs").glob("tiny-*"))
    assert len(list(Path("runs").rglob("summary.json"))) == 3
    assert not [path for path in Path("runs/tiny").rglob("summary.json") if len(path.parts) > 3]
    assert f"{newest}\n" in flray("run", "tiny.yaml", "rounds=2", "--resume")[1]


def test_a_diverging_client_is_one_message_and_exit_1(flray) -> None:
    code, _, err = flray("run", "tiny.yaml", "train.lr=1e30")
    assert code == 1
    assert "client" in err
    assert "where everybody fails, the cause is the model, its training or the data" in err
    assert "on_client_failure=drop" not in err
    assert "Traceback" not in err


def test_two_experiments_and_seeds_end_in_one_paired_table(flray) -> None:
    code, out, _ = flray("run", "tiny.yaml", "local.yaml", "seeds=2", "rounds=2", "--out", "cmp")
    assert code == 0
    assert out.count("round 2/2") == 4
    assert "over 2 seeds" in out
    assert "vs tiny" in out
    names = {str(p.parent.relative_to("cmp")) for p in Path("cmp").rglob("summary.json")}
    assert names == {f"{n}/seed_{s}" for n in ("tiny", "local") for s in (0, 1)}


def test_a_list_of_components_is_an_experiment_for_each(flray) -> None:
    methods = "algorithm=[fedavg, {name: fedprox, mu: 0.5}, fedprox]"
    code, out, err = flray("run", "tiny.yaml", methods, "rounds=1", "--out", "cmp")
    assert (code, err) == (0, "")
    names = {p.parent.parent.name for p in Path("cmp").rglob("summary.json")}
    assert names == {"fedavg", "fedprox_mu_0.5", "fedprox"}
    assert "vs fedavg" in out
    code, out, _ = flray("run", "--out", "cmp", "--resume", "rounds=2")
    assert (code, out.count("round 2/2")) == (0, 3)
    models = "model=[mlp200, {name: mlp200, hidden: 8}]"
    code, out, _ = flray("check", "tiny.yaml", models, "algorithm=[fedavg, local]")
    assert (code, out.count("ok mlp200_hidden_8_"), out.count("_local: ")) == (0, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["algorithm=[]"], "algorithm is an empty list"),
        (["algorithm=[fedavg, fedavg]"], "algorithm has 'fedavg' twice"),
        (["algorithm=[fedavg, fedprx]"], "did you mean 'fedprox'"),
        (["algorithm=[fedprox, fedavg]", "algorithm.mu=1"], "set it inside the list"),
        (["train=[1, 2]"], "train must be a mapping"),
    ],
)
def test_a_wrong_list_of_components_is_one_message(flray, arguments, expected) -> None:
    code, _, err = flray("run", "tiny.yaml", *arguments)
    assert (code, expected in err) == (2, True), err


def sha256(folder: str) -> str:
    return json.loads(Path(folder, "summary.json").read_text())["params_sha256"]


def test_a_run_out_of_time_stops_with_0_and_prints_the_command_that_resumes_it(flray) -> None:
    """Overrides and the file need not be told again; the result is that of a run in one go."""
    flray("run", "tiny.yaml", "train.lr=0.05", "--out", "whole")
    run = ("run", "tiny.yaml", "train.lr=0.05", "--out", "cut")
    code, out, _ = flray(*run, "--max-minutes", "0")
    assert (code, "round 1/4" in out, "round 2/4" in out) == (0, True, False)
    command = out.split("go on with: flray ")[1].split("\n")[0]
    assert command == "run --out cut --resume"
    code, out, _ = flray(*command.split())
    assert code == 0
    assert "round 1/4" not in out
    assert sha256("cut") == sha256("whole")
    code, out, _ = flray("run", "tiny.yaml", "--out", "cut", "--resume")  # with the file too
    assert code == 0


def test_resume_with_more_rounds_extends_a_finished_run(flray) -> None:
    flray("run", "tiny.yaml", "rounds=4", "--out", "long")
    flray("run", "tiny.yaml", "rounds=2", "--out", "short")
    assert sha256("short") != sha256("long")
    code, out, _ = flray("run", "--out", "short", "--resume", "rounds=4")
    assert code == 0
    assert "round 2/4" not in out
    assert "round 3/4" in out
    assert sha256("short") == sha256("long")
    one, two = RunDirectory("short"), RunDirectory("long")
    pd.testing.assert_frame_equal(one.clients(), two.clients())
    assert one.config() == two.config()
    code, _, err = flray("run", "--out", "short", "--resume", "rounds=3")
    assert (code, "rounds is 4 there and 3 here" in err) == (2, True)


def test_all_runs_of_a_command_go_on_without_their_files(flray) -> None:
    arguments = ("run", "tiny.yaml", "local.yaml", "seeds=2", "rounds=2", "--out", "all")
    _, out, _ = flray(*arguments, "--max-minutes", "0")
    assert "go on with: flray run --out all --resume" in out
    Path("tiny.yaml").unlink()
    code, out, _ = flray("run", "--out", "all", "--resume")
    assert code == 0
    assert len(list(Path("all").rglob("summary.json"))) == 4
    assert "vs tiny" in out


def test_seeds_may_stand_in_the_file(flray, tmp_path) -> None:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**TINY, "rounds": 1, "seeds": 2}))
    code, out, _ = flray("run", "two.yaml", "--out", "two")
    assert code == 0
    assert "mean over 2 seeds" in out
    assert flray("run", "two.yaml", "seeds=1", "--out", "one")[0] == 0
    assert Path("one/summary.json").exists()


NOTES = [
    ("events=[{round: 9, kind: leave, clients: [0]}]", "events of round 9 never happen"),
    ("execution.actors.count=4", "execution.actors does nothing in process"),
    (
        "algorithm={name: flhc, rounds_before: 4}",
        "no cluster is trained: algorithm.rounds_b",
    ),
    ("algorithm={name: cfl, rounds_before: 9}", "no cluster is trained: algorithm.rounds_before=9"),
    (
        "algorithm={name: repa, rounds_before: 4, clustering: {partition: {number: 2}}}",
        "no cluster is trained: algorithm.rounds_b",
    ),
    ("algorithm={name: wd, rounds_before: 5}", "no cluster is trained: algorithm.rounds_b"),
    ("algorithm={name: lg_fedavg, global_layers: 2}", "this is FedAvg: algorithm.global_layers=2"),
    ("tracking=wandb", "no key for W&B"),
]


@pytest.mark.parametrize(("argument", "expected"), NOTES, ids=[n[0] for n in NOTES])
def test_what_will_not_happen_is_said_before(flray, monkeypatch, argument, expected) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    code, out, _ = flray("check", "tiny.yaml", argument)
    assert code == 0
    assert expected in out
    assert "note" not in flray("check", "tiny.yaml")[1]
    if argument.startswith(("events", "execution", "algorithm={name: lg")):
        assert expected in flray("run", "tiny.yaml", "rounds=1", argument)[1]


QUIET = [
    "algorithm={name: flhc, rounds_before: 3}",
    "algorithm={name: cfl, rounds_before: 3}",
    "algorithm={name: lg_fedavg, global_layers: 1}",
    "algorithm=fedsem",
]


def test_methods_that_do_what_they_are_for_have_no_notes(flray) -> None:
    for argument in QUIET:
        code, out, _ = flray("check", "tiny.yaml", argument)
        assert (code, "note" in out) == (0, False)
    assert "does nothing" in flray("check", "tiny.yaml", QUIET[-1], "aggregate.unheard=stale")[1]


def test_check_mentions_an_encoder_that_is_trained_first(flray, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    flray("init", "flt")
    out = flray("check", "flt.yaml")[1]
    assert "an encoder is trained first" in out
    assert "of digits" in out


def test_folders_that_cannot_be_written_or_read_are_one_message(flray) -> None:
    code, _, err = flray("run", "tiny.yaml", "--out", "tiny.yaml/below")
    assert (code, "cannot read or write" in err, "Traceback" in err) == (2, True, False)
    code, _, err = flray("table", "flhc.4", "--runs", "nowhere")
    assert (code, "there is no folder nowhere" in err) == (2, True)


def test_an_address_without_a_ray_cluster_is_one_message(monkeypatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever other tests have started
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ExperimentError, match=f"answers at RAY_ADDRESS={address}"), connected():
            pass


def test_a_threshold_outside_the_merges_is_said_with_their_range(flray) -> None:
    swap = ["split={name: label_swap, clients: 6, groups: 2}", "rounds=2"]
    cut = "algorithm={name: flhc, rounds_before: 1, clustering: {partition: {threshold: %s}}}"
    out = flray("run", "tiny.yaml", *swap, cut % 1e6)[1]
    assert "is above every merge, so there is one cluster" in out
    assert "merges 0." in out or "merges 1" in out
    out = flray("run", "tiny.yaml", *swap, cut % 1e-6)[1]
    assert "is below every merge, so every client is alone" in out


def events_of(file: Path) -> Iterator[Event]:
    """The events of a file: length, checksum, event, checksum, one after the other."""
    data, place = file.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        yield Event.FromString(data[place + 12 : place + 12 + length])
        place += length + 16


def test_tensorboard_and_csv_have_what_the_run_directory_has(flray) -> None:
    code, _, _ = flray("run", "tiny.yaml", "rounds=3", "tracking=tensorboard", "--out", "board")
    assert code == 0
    (events,) = Path("board/tensorboard").glob("events.*")
    found = {}
    for event in events_of(events):
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
    rounds = RunDirectory("board").rounds()
    for row in rounds.to_dict("records"):
        assert found["accuracy_mean", row["round"]] == pytest.approx(row["accuracy_mean"])
    assert flray("export", "board", "--table", "rounds", "rounds.csv")[0] == 0
    assert pd.read_csv("rounds.csv")["accuracy_mean"].tolist() == rounds["accuracy_mean"].tolist()


NOTIFIED = """
import os
import shutil
import signal

from flray.algorithms.fedavg import FedAvg


class Notified(FedAvg):
    def round(self, state, cohort, fed):
        if cohort.t == 2 and "NOTICE" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().round(state, cohort, fed)
"""


def test_sigterm_ends_the_round_and_resume_goes_on_to_the_same_bits(flray, monkeypatch) -> None:
    """As a spot machine is told before it goes: the round in progress is kept."""
    Path("notified_of_tests.py").write_text(NOTIFIED)
    run = ("run", "tiny.yaml", "algorithm=notified_of_tests:Notified", "--out")
    assert flray(*run, "whole")[0] == 0
    monkeypatch.setenv("NOTICE", "1")
    before = signal.getsignal(signal.SIGTERM)
    code, out, _ = flray(*run, "cut")
    assert code == 0
    assert "SIGTERM: stopping after the round in progress" in out
    assert "go on with: flray run --out cut --resume" in out
    assert RunDirectory("cut").rounds()["round"].tolist() == [1, 2]
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.delenv("NOTICE")
    assert flray(*run, "cut", "--resume")[0] == 0
    hashes = [RunDirectory(out).summary()["params_sha256"] for out in ("whole", "cut")]
    assert hashes[0] == hashes[1]


def test_attach_to_a_run_that_is_over(flray) -> None:
    flray("run", "tiny.yaml", "--out", "over", figures=True)
    code, out, _ = flray("attach", "over")
    assert code == 0
    assert "round 4/4" in out
    assert "accuracy %" in out
    assert "tiny" in out  # the name of the file, as without attaching
    assert Path("over/figures/accuracy.png").exists()
    Path("empty").mkdir()
    code, _, err = flray("attach", "empty")
    assert (code, "holds no run" in err) == (2, True)


def forbid_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse what would write below a folder, also to root, whom no permission stops."""
    opened, made = Path.open, Path.mkdir

    def refuse(path: Path) -> None:
        if folder.absolute() in path.absolute().parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def open_(path: Path, mode: str = "r", *arguments, **options):
        if set(mode) & set("wax+"):
            refuse(path)
        return opened(path, mode, *arguments, **options)

    def mkdir(path: Path, *arguments, **options) -> None:
        refuse(path)
        made(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "touch", lambda path, *_, **__: refuse(path))


def test_attach_to_the_run_of_another_user_writes_nothing(flray, monkeypatch) -> None:
    flray("run", "tiny.yaml", "--out", "theirs")
    Path("theirs/run.lock").write_text("1")  # of a process that was killed
    forbid_writing(Path("theirs"), monkeypatch)
    with pytest.raises(PermissionError):
        Path("theirs/run.lock").touch()
    code, out, err = flray("attach", "theirs", figures=True)
    assert (code, err) == (0, "")
    assert "accuracy %" in out
    assert "no figures: theirs/figures cannot be written (Permission denied)" in out
    assert not Path("theirs/figures").exists()


def test_who_may_not_write_cannot_stop_a_run_and_goes_on_watching(
    flray, monkeypatch, capsys
) -> None:
    """Ctrl-C and `s` while somebody else runs it; it is over at the third look."""
    flray("run", "tiny.yaml", "--out", "theirs")
    forbid_writing(Path("theirs"), monkeypatch)
    monkeypatch.setattr("builtins.input", lambda: "s")
    looks = iter([True, KeyboardInterrupt, True, False])

    def is_running() -> bool:
        look = next(looks)
        if look is KeyboardInterrupt:
            raise KeyboardInterrupt
        return bool(look)

    capsys.readouterr()
    Watcher(show=print, say=print).watch(Path("theirs"), is_running)
    said = capsys.readouterr().out
    assert "cannot stop the run: theirs may not be written (Permission denied)" in said
    assert "stopping" not in said
    assert next(looks, None) is None  # it went on after that


def test_resume_without_out_takes_the_newest_run(flray) -> None:
    flray("run", "tiny.yaml", "--max-minutes", "0")
    Path("runs/tiny/report.html").touch()  # the page of all of them, which `flray report` writes
    code, out, _ = flray("run", "tiny.yaml", "--resume")
    assert code == 0
    assert "round 4/4" in out
    assert len(list(Path("runs/tiny").iterdir())) == 2
    code, _, err = flray("run", "local.yaml", "--resume")
    assert (code, "nothing to resume" in err) == (2, True)


def test_the_demo_runs_without_a_file(flray) -> None:
    code, out, _ = flray("run", "rounds=1", "train.epochs=1")
    assert code == 0
    assert "fedavg" in out
    assert "flhc" in out


def test_check_says_what_would_run(flray) -> None:
    code, out, _ = flray("check", "tiny.yaml", "local.yaml")
    assert code == 0
    assert out.count("ok") >= 2
    assert "6 clients" in out
    assert not Path("runs").exists()
    assert flray("check", "tiny.yaml", "model=resnet999")[0] == 2


def test_check_looks_at_every_file_and_names_the_one_that_is_wrong(flray, tmp_path) -> None:
    (tmp_path / "bad.yaml").write_text("dataset: nothing")
    code, out, _ = flray("check", "bad.yaml", "nowhere.yaml", "tiny.yaml")
    assert code == 2
    assert [line[:2] for line in out.splitlines()] == ["no", "no", "ok"]
    assert "bad.yaml: missing key 'split'" in out
    assert "nowhere.yaml: no experiment file" in out


def test_check_says_so_if_the_gpu_has_no_memory_left(flray, monkeypatch) -> None:
    def start(_parts) -> None:
        raise torch.OutOfMemoryError(GPU_FULL)

    monkeypatch.setattr(rehearsal, "start_executor", start)
    code, out, _ = flray("check", "tiny.yaml", "local.yaml")
    assert code == 2
    assert out.splitlines() == [f"no {name}.yaml: {GPU_FULL_SHOWN}" for name in ("tiny", "local")]


@pytest.mark.parametrize("kind", COMPONENTS)
def test_list_names_every_component_and_says_what_it_is(flray, kind) -> None:
    code, out, _ = flray("list", f"{kind}s")
    assert code == 0
    for name in COMPONENTS[kind]:
        assert name in out


def test_help_teaches(flray) -> None:
    code, out, _ = flray("run", "--help")
    assert code == 0
    for word in ("--resume", "--max-minutes", "--out", "seeds=N", "key=value"):
        assert word in out


def test_the_usage_of_list_is_one_line_and_names_all_kinds(flray) -> None:
    usage, *text = flray("list", "--help")[1].splitlines()
    assert usage.endswith("list [OPTIONS] [KIND]")
    assert all(f"{kind}s" in " ".join(text) for kind in ("dataset", "stage", "space", "table"))


def test_messages_are_sentences(flray) -> None:
    Path("run").mkdir()
    code, _, err = flray("export", "run", "x.csv")
    assert (code, "give one of --client and --table. See " in err) == (2, True)


def test_help_does_not_import_torch() -> None:
    script = "import sys, flray.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.long
def test_an_installed_wheel_runs_in_any_folder(tmp_path) -> None:
    root = Path(__file__).parents[2]
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(root),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("flray-*.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    folder = tmp_path / "anywhere"
    folder.mkdir()
    script = "import flray, sys; from flray.cli import main; print(flray.__file__); main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "rounds=1"],
        cwd=folder,
        env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(target) in done.stdout
    assert "round 1/1" in done.stdout
    assert len(list((folder / "runs").rglob("summary.json"))) == 2


def test_a_run_at_a_url_is_resumed_from_there(flray, tmp_path) -> None:
    """What the machine had is gone; the URL has all that a resume, a table and a page need."""
    url = (tmp_path / "store" / "run").as_uri()
    assert flray("run", "tiny.yaml", "--out", "whole")[0] == 0
    code, out, _ = flray("run", "tiny.yaml", "--out", url, "--max-minutes", "0")
    assert (code, f"go on with: flray run --out {url} --resume" in out) == (0, True)
    shutil.rmtree(Mirror(url).local)
    code, _, err = flray("run", "tiny.yaml", "--out", url)
    assert (code, f"pass --resume to go on with it (flray run --out {url} --resume;" in err) == (
        2,
        True,
    )
    code, out, _ = flray("run", "--out", url, "--resume")
    assert (code, f"flray report {url}" in out) == (0, True)
    stored = RunDirectory(tmp_path / "store" / "run")
    assert stored.summary()["params_sha256"] == RunDirectory("whole").summary()["params_sha256"]
    assert stored.rounds()["round"].tolist() == [1, 2, 3, 4]
    shutil.rmtree(Mirror(url).local)
    code, out, _ = flray("table", "flhc.4", "--runs", url)
    assert (code, "1 finished run below" in out) == (0, True)
    assert flray("report", url)[0] == 0
    assert Path("report.html").stat().st_size > 10_000


def test_a_url_that_nobody_knows_is_refused(flray) -> None:
    code, _, err = flray("run", "tiny.yaml", "--out", "carrier-pigeon://x")
    assert (code, "carrier-pigeon://x cannot be used" in err) == (2, True)
    assert "Traceback" not in err


def test_names_of_classes_are_shown_as_they_are_and_not_as_emoji(flray, monkeypatch) -> None:
    text = (
        "from dataclasses import dataclass\n"
        "from flray.algorithms.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class Key(FedAvg):\n"
        "    def __post_init__(self):\n"
        "        raise ValueError('not to be had')\n"
    )
    Path("keys_of_tests.py").write_text(text)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    arguments = ("tiny.yaml", "algorithm=keys_of_tests:Key")
    # :Key: would be an emoji of rich
    message = "algorithm keys_of_tests:Key (keys_of_tests.py, line 6): not to be had"
    assert message in flray("run", *arguments)[2]
    assert message in flray("check", *arguments)[1]
