"""Copies of a run directory on another machine, made from its changes."""

import os
from pathlib import Path

import torch

from flray.records.changes import changes_since
from flray.records.checkpoint import CheckpointStore


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_applying_changes_one_after_another_gives_the_folder(tmp_path) -> None:
    """Files that are new, changed and gone; a folder that is left empty goes too."""
    here, there = tmp_path / "here", tmp_path / "there"
    store, seen, sent = CheckpointStore(here / "checkpoints"), {}, []
    for t in range(4):
        store.save(t, torch.full((2, 2), float(t)))
        (here / "rounds.parquet").write_text(f"{t} rounds")
        part = here / "clients" / f"round_{t}"
        part.parent.mkdir(exist_ok=True)
        part.write_text("scores")
        if t == 3:
            for path in part.parent.iterdir():
                path.unlink()
            part.parent.rmdir()
        changes, seen = changes_since(here, seen)
        changes.apply_to(there)
        assert contents(there) == contents(here)
        sent.append([name for name, _ in changes.files])
    assert {path.name for path in there.iterdir()} == {path.name for path in here.iterdir()}
    assert sent[2][-1] == "checkpoints/round_000002.json"  # after what it refers to
    assert not any("round_000001" in name for name in sent[2])  # only what has changed
    assert CheckpointStore(there / "checkpoints").load_latest().round == 3
    again, _ = changes_since(here, seen)
    assert (again.files, again.gone) == ([], [])


def test_a_folder_may_vanish_while_it_is_looked_at(tmp_path, monkeypatch) -> None:
    """A run that finishes joins the scores of its clients and removes their folder."""
    parts = tmp_path / "checkpoints" / "clients"
    parts.mkdir(parents=True)
    for path in (parts / "scores", tmp_path / "rounds.parquet"):
        path.write_text("held")
    _, seen = changes_since(tmp_path, {})
    scandir = os.scandir

    def vanishing(path):
        if Path(path) == parts and parts.is_dir():
            (parts / "scores").unlink()
            parts.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    changes, here = changes_since(tmp_path, seen)
    assert not parts.exists()
    assert (changes.files, changes.gone) == ([], ["checkpoints/clients/scores"])
    assert list(here) == ["rounds.parquet"]


def test_what_is_of_one_machine_is_not_sent(tmp_path) -> None:
    for name in ("run.lock", "rounds.parquet.tmp", "stop.wish"):
        (tmp_path / name).touch()
    assert changes_since(tmp_path, {})[0].files == []
