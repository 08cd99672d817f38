"""What the guides show works as it stands there, from a folder outside the package."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flray.cli import concluding, main
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```(python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)


def unpack(guide: str, folder: Path) -> list[str]:
    """Write the files a guide shows into a folder: each block that opens with its file's name."""
    names = []
    for _, name, text in BLOCK.findall((DOCS / guide).read_text()):
        (folder / name).write_text(text)
        names.append(name)
    return names


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., RunDirectory]:
    """The command of a guide, given in the folder of its files; figures take seconds."""
    monkeypatch.setattr(concluding, "write_figures", lambda *_: [])

    def run_here(*arguments: str) -> RunDirectory:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["flray", "run", *arguments, "--out", "out"])
        main()
        return RunDirectory(tmp_path / "out")

    return run_here


@pytest.mark.slow
def test_stages_of_ones_own(run, tmp_path) -> None:
    assert unpack("adding_a_stage.md", tmp_path) == ["mine.py", "mine.yaml"]
    found = run("mine.yaml", "rounds=6")
    assert found.summary()["ari"] == 1.0
    assert read_clusterings(found.path)[5].D.max() <= 2.0
    config = found.config()["algorithm"]["clustering"]
    assert config["distance"] == {"name": "mine:LargestMoves", "number": 1000}
    assert config["signature"]["name"] == "update"  # the algorithm's own, as nothing was said


@pytest.mark.slow
def test_an_algorithm_of_ones_own(run, tmp_path) -> None:
    assert unpack("adding_an_algorithm.md", tmp_path) == ["ring.py", "ring.yaml"]
    summary = run("ring.yaml", "algorithm.reach=3").summary()
    assert summary["clusters"] == 20  # everybody hears others
    assert summary["accuracy_mean"] > 0.5
