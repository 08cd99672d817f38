import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flray
from flray.records.environment import commit, environment

IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(directory, *arguments):
    command = ["git", "-C", str(directory), *IDENTITY, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "checkout" / "flray"
    package.mkdir(parents=True)
    (package / "code.py").write_text("x = 1\n")
    git(package.parent, "init")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-m", "start")
    return package.parent


def test_environment_names_versions_and_hardware_and_fits_json():
    found = json.loads(json.dumps(environment(), allow_nan=False))
    assert set(found) == {"versions", "commit", "hardware"}
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"python", "ray", "pytorch-lightning", "numpy", "flray"} < set(found["versions"])
    assert found["hardware"]["cpu_count"] == os.cpu_count()
    assert (found["hardware"]["cuda_device"] is None) == (not torch.cuda.is_available())


def test_environment_holds_no_path_of_this_machine():
    text = json.dumps(environment())
    for place in (Path.home(), Path.cwd(), Path(torch.__file__).parent):
        assert str(place) not in text


@needs_git
def test_commit_of_a_checkout_says_when_files_changed(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert len(head) == 40
    assert commit(checkout / "flray") == head
    git(checkout, "tag", "-a", "v1", "-m", "a tag must not stand in for the commit")
    assert commit(checkout / "flray") == head
    (checkout / "flray" / "code.py").write_text("x = 2\n")
    assert commit(checkout / "flray") == f"{head}-dirty"


@needs_git
def test_a_package_installed_inside_another_checkout_has_no_commit(checkout):
    installed = checkout / ".venv" / "site-packages" / "flray"
    installed.mkdir(parents=True)
    assert commit(installed) is None


def test_a_package_outside_any_checkout_has_no_commit(tmp_path):
    (tmp_path / "flray").mkdir()
    assert commit(tmp_path / "flray") is None


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(Path(flray.__file__).parent) is None
