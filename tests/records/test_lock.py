"""What a lock leaves behind in the folders that it made."""

from pathlib import Path

from flray.records.lock import locked


def test_what_was_refused_leaves_no_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "fedavg" / "seed_0"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folders_stay_that_were_there_or_hold_a_record(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with locked(tmp_path / "runs" / "refused"):
        pass
    with locked(tmp_path / "runs" / "fedavg" / "seed_0"):
        (tmp_path / "runs" / "fedavg" / "note").touch()
    assert [p.name for p in (tmp_path / "runs").rglob("*")] == ["fedavg", "note"]
