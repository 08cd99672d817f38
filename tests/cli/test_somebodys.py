"""Folders and files that came from somebody else, and what may lie where output is to go."""

import json
import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
import yaml
from click.testing import CliRunner

from flray.cli import cli
from flray.errors import ExperimentError
from flray.execution import cluster
from flray.runs import keeper


@pytest.fixture
def run(known_run, tmp_path, monkeypatch) -> Path:
    """A finished run in the folder `run` of the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(known_run().path, "run")
    Path("victim").mkdir()
    return Path("run")


def refused(message: str, *arguments: str) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, ExperimentError), done.output
    assert message in str(done.exception)
    assert not list(Path("victim").iterdir())


@pytest.mark.parametrize("folder", ["../victim", "{here}/victim", "victim", "a/../../victim"])
def test_a_command_names_no_folder_outside_of_its_own(run, folder) -> None:
    plain = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").unlink()
    if folder == "victim":
        (run / "victim").symlink_to("../victim")
    entry = {"name": "x", "folder": folder.format(here=Path.cwd()), "experiment": plain}
    (run / "command.json").write_text(json.dumps({"overrides": [], "runs": [entry]}))
    outside = "holds a link out of it" if folder == "victim" else "lies outside of it"
    refused(outside, "run", "--out", "run", "--resume")


@pytest.mark.parametrize("name", ["figures", "run.lock", "server.log"])
def test_a_run_is_not_gone_on_with_through_a_link(run, name) -> None:
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(Path("victim").resolve())
    refused("holds a link out of it", "run", "--out", "run", "--resume", "rounds=9")


def test_a_page_is_not_written_through_a_link_of_the_run(run) -> None:
    (run / "report.html").symlink_to("../victim/page")
    refused("names 'report.html', which lies outside of it", "report", "run")


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize(
    "command", [["report", "run", "--out"], ["export", "run", "--table", "rounds"]]
)
def test_output_does_not_take_the_place_of_a_link_or_a_fifo(kind, command) -> None:
    (Path("out").symlink_to if kind == "link" else lambda _: os.mkfifo("out"))("target")
    held: list[bytes] = []
    reader = Thread(target=lambda: held.append(Path("out").read_bytes()))
    if kind == "fifo":
        reader.start()
    done = CliRunner().invoke(cli, [*command, "out"], catch_exceptions=False)
    if kind == "fifo":
        reader.join()
    else:
        held.append(Path("target").read_bytes())
    assert (done.exit_code, done.output) == (0, "")
    assert Path("out").is_symlink() == (kind == "link")
    assert held[0].startswith(b"<!DOCTYPE html>" if "report" in command else b"round,")


@pytest.fixture
def shadowing(run, monkeypatch) -> Path:
    """The current folder is a run, with a file named like a module of Python's."""
    monkeypatch.chdir(run)
    Path("json.py").write_text("from pathlib import Path\n\nPath('ran').touch()\n")
    return Path.cwd()


def test_a_keeper_imports_nothing_of_the_current_folder(shadowing, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where nobody answers
    process = keeper._start()
    process.communicate("")
    assert process.returncode == 0
    assert not (shadowing / "ran").exists()


def test_processes_of_ray_do_not_search_a_folder_of_runs(shadowing, monkeypatch) -> None:
    """Ray puts the folder in which it is started before all others."""
    started: list[Path] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "kept_forking_python", lambda: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: started.append(Path.cwd()))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with cluster.connected():
        assert Path.cwd() == shadowing
    monkeypatch.chdir(shadowing.parent)
    with cluster.connected():
        pass
    assert [folder.is_relative_to(shadowing) for folder in started] == [False, False]
    assert started[1] == shadowing.parent
