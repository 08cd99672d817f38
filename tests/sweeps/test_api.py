"""Sweeps from Python, and spaces that are reached through a link."""

from pathlib import Path

import pytest
import yaml

import flray
from flray.sweeps.rows import expand
from flray.sweeps.space import read_space

from scenarios import TINY

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster", "no_figures")
def test_a_sweep_of_a_mapping_gives_its_table_its_best_and_its_runs(tmp_path, capsys) -> None:
    space = {
        "experiment": {**TINY, "rounds": 2, "split": {"name": "iid", "clients": 4}},
        "space": {"train.lr": [0.1, 0.01]},
        "metric": "accuracy_mean",
        "concurrency": 1,  # one process with torch instead of two
    }
    found = flray.sweep(space, tmp_path / "sweep", ["seed=3"])
    assert capsys.readouterr().out == ""  # silent, as everything from Python
    assert found.table["status"].tolist() == ["done", "done"]
    best = found.table.sort_values("accuracy_mean", ascending=False).iloc[0]
    assert found.report["best"]["sets"]["train.lr"] == best["train.lr"]
    loaded = flray.load(found.path / best["folder"])
    assert loaded.summary["seed"] == 3
    rows = flray.load(found.path)
    assert len(rows) == 2
    assert rows[Path(best["folder"]).name].summary == loaded.summary
    alone = flray.run(space["experiment"], overrides=["seed=3", f"train.lr={best['train.lr']}"])
    assert loaded.summary["params_sha256"] == alone.summary["params_sha256"]
    again = flray.sweep(space, tmp_path / "sweep", ["seed=3"], resume=True)
    assert again.table["params_sha256"].tolist() == found.table["params_sha256"].tolist()
    page = flray.report(found, out=tmp_path / "page.html")
    assert "train.lr" in page.read_text()


def test_a_space_behind_a_link_finds_its_experiments(tmp_path, monkeypatch) -> None:
    """They are named relative to where the file really is."""
    (tmp_path / "tune_spaces").symlink_to(ROOT / "tune_spaces", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    linked = read_space(Path("tune_spaces/flhc_digits.yaml"))
    plain = yaml.safe_load((ROOT / "tune_spaces/flhc_digits.yaml").read_text())
    assert str(plain["experiment"]).startswith("../")
    assert linked.plain == read_space(ROOT / "tune_spaces/flhc_digits.yaml").plain
    assert expand(linked)
