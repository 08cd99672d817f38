"""What a lock leaves behind in the folders that it made, and who may ask for its holder."""

import fcntl
import os
from pathlib import Path

from flray.records.lock import holder, locked


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


def test_who_asks_for_the_holder_writes_nothing_and_hides_from_others_who_ask(
    tmp_path: Path, monkeypatch
) -> None:
    modes = []
    opened = Path.open

    def open_(path: Path, mode: str = "r", *arguments, **options):
        modes.append(mode)
        return opened(path, mode, *arguments, **options)

    with locked(tmp_path):
        monkeypatch.setattr(Path, "open", open_)
        assert holder(tmp_path) == os.getpid()
    assert modes == ["r"]
    (tmp_path / "run.lock").write_text("1")  # of a process that was killed
    with (tmp_path / "run.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as long as another one asks
        assert holder(tmp_path) is None
