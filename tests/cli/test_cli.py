"""The command line as a user meets it."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flray.cli import main
from flray.config.experiment import COMPONENTS, override
from flray.records.mirror import Mirror
from flray.records.run_directory import RunDirectory

from scenarios import TINY


@pytest.fixture
def flray(monkeypatch, capsys, tmp_path):
    """Run the command line in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    local = override(TINY, ["algorithm=local"])
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(local))

    def run(*arguments: str) -> tuple[int, str, str]:
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
    ("train.lrr=0.1", "unknown key 'train.lrr'", "did you mean 'lr'"),
    ("rounds=many", "rounds must be a whole number", "'many'"),
    ("train.lr=fast", "train.lr must be a number", "'fast'"),
    ("train.lr=-1", "train: lr must be > 0", "-1"),
    ("train.lr=1.0e400", "train: lr must be > 0 and finite", "inf"),
    ("rounds=1000000000000000000000000000000", "rounds must be at most", "1000"),
    ("dataset={name: synthetic, num_train: 1000000000000}", "this machine has", "GiB"),
    ("dataset={name: digits, size: 100000000}", "this machine has", "lower"),
    ("algorithm=fedprx", "unknown algorithm 'fedprx'", "did you mean 'fedprox'"),
    ("dataset=mnits", "unknown dataset 'mnits'", "known: cifar10"),
    ("split.name=pathlogical", "unknown split 'pathlogical'", "did you mean 'pathological'"),
    ("model=resnet999", "unknown model 'resnet999'", "known: conv_ae"),
    ("participation=0", "participation must be in (0, 1]", "got 0.0"),
    ("participation=1.5", "participation must be in (0, 1]", "got 1.5"),
    ("split={name: pathological, clients: 6, labels_per_client: 11}", "labels_per_client", "11"),
    ("split={name: iid, clients: 1000}", "clients", "300"),
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
    code, _, err = flray("run", "tiny.yaml", "rounds=2", "--out", "here", "--resume")
    assert code == 2
    assert "here holds another experiment (rounds is 1 there and 2 here)" in err
    code, _, err = flray("run", "tiny.yaml", "rounds=1", "--out", "here")
    assert (code, "pass --resume" in err) == (2, True)
    Path("other").mkdir()
    Path("other/thesis.txt").write_text("mine")
    code, _, err = flray("run", "tiny.yaml", "--out", "other")
    assert (code, "thesis.txt" in err) == (2, True)


def test_a_diverging_client_is_one_message_and_exit_1(flray) -> None:
    code, _, err = flray("run", "tiny.yaml", "train.lr=1e30")
    assert code == 1
    assert "client" in err
    assert "on_client_failure=drop" in err
    assert "Traceback" not in err


def test_two_experiments_and_seeds_end_in_one_paired_table(flray) -> None:
    code, out, _ = flray("run", "tiny.yaml", "local.yaml", "seeds=2", "rounds=2", "--out", "cmp")
    assert code == 0
    assert out.count("round 2/2") == 4
    assert "over 2 seeds" in out
    assert "vs tiny" in out
    names = {str(p.parent.relative_to("cmp")) for p in Path("cmp").rglob("summary.json")}
    assert names == {f"{n}/seed_{s}" for n in ("tiny", "local") for s in (0, 1)}


def test_max_minutes_stops_with_0_and_resume_goes_on(flray) -> None:
    code, out, _ = flray("run", "tiny.yaml", "--out", "timed", "--max-minutes", "0")
    assert code == 0
    assert "stopped" in out
    assert "round 1/4" in out
    assert "round 2/4" not in out
    code, out, _ = flray("run", "tiny.yaml", "--out", "timed", "--resume")
    assert code == 0
    assert "round 2/4" in out
    assert "round 1/4" not in out
    assert Path("timed/summary.json").exists()


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
    assert "--out and --resume goes on" in out
    assert RunDirectory("cut").rounds()["round"].tolist() == [1, 2]
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.delenv("NOTICE")
    assert flray(*run, "cut", "--resume")[0] == 0
    hashes = [RunDirectory(out).summary()["params_sha256"] for out in ("whole", "cut")]
    assert hashes[0] == hashes[1]


def test_attach_to_a_run_that_is_over(flray) -> None:
    flray("run", "tiny.yaml", "--out", "over")
    code, out, _ = flray("attach", "over")
    assert code == 0
    assert "round 4/4" in out
    assert "accuracy %" in out
    Path("empty").mkdir()
    code, _, err = flray("attach", "empty")
    assert (code, "holds no run" in err) == (2, True)


def test_resume_without_out_takes_the_newest_run(flray) -> None:
    flray("run", "tiny.yaml", "--max-minutes", "0")
    code, out, _ = flray("run", "tiny.yaml", "--resume")
    assert code == 0
    assert "round 4/4" in out
    assert len(list(Path("runs/tiny").iterdir())) == 1
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
    assert (code, "--resume goes on" in out) == (0, True)
    shutil.rmtree(Mirror(url).local)
    code, _, err = flray("run", "tiny.yaml", "--out", url)
    assert (code, "pass --resume" in err) == (2, True)
    assert flray("run", "tiny.yaml", "--out", url, "--resume")[0] == 0
    stored = RunDirectory(tmp_path / "store" / "run")
    assert stored.summary()["params_sha256"] == RunDirectory("whole").summary()["params_sha256"]
    assert stored.rounds()["round"].tolist() == [1, 2, 3, 4]
    shutil.rmtree(Mirror(url).local)
    code, out, _ = flray("table", "flhc.4", "--runs", url)
    assert (code, "1 finished runs below" in out) == (0, True)
    assert flray("report", url)[0] == 0
    assert Path("report.html").stat().st_size > 10_000


def test_a_url_that_nobody_knows_is_refused(flray) -> None:
    code, _, err = flray("run", "tiny.yaml", "--out", "carrier-pigeon://x")
    assert (code, "carrier-pigeon://x cannot be used" in err) == (2, True)
    assert "Traceback" not in err
