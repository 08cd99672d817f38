"""Copies at a URL: whatever moment a run ends at, the copy can be resumed."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from flray.errors import ExperimentError
from flray.records.checkpoint import CheckpointStore
from flray.records.lock import locked
from flray.records.mirror import Mirror


@pytest.fixture(params=["memory://bucket/run", "file"])
def mirror(request, tmp_path, monkeypatch) -> Mirror:
    monkeypatch.setattr("flray.records.mirror.gettempdir", lambda: str(tmp_path / "machine"))
    url = request.param
    found = Mirror((tmp_path / "store").as_uri() if url == "file" else url)
    yield found
    if found.files.exists(found.root):
        found.files.rm(found.root, recursive=True)


def other_machine(mirror: Mirror, folder: Path) -> Mirror:
    other = Mirror(mirror.url)
    other.local = folder
    other.fetch()
    return other


def test_what_is_pushed_is_fetched_and_what_is_gone_is_removed(mirror, tmp_path) -> None:
    store = CheckpointStore(mirror.local / "checkpoints")
    for t in range(5):
        store.save(t, torch.full((2, 2), float(t)))
        mirror.push()
    (mirror.local / "run.lock").write_text("1")
    (mirror.local / "rounds.parquet.tmp").write_text("half")
    mirror.push()
    other = other_machine(mirror, tmp_path / "other")
    names = sorted(path.name for path in (other.local / "checkpoints").iterdir())
    assert names == [f"round_00000{t}.{end}" for t in (3, 4) for end in ("json", "safetensors")]
    assert [path.name for path in other.local.iterdir()] == ["checkpoints"]
    loaded = CheckpointStore(other.local / "checkpoints").load_latest()
    assert torch.equal(loaded.state, torch.full((2, 2), 4.0))


def test_a_push_that_is_cut_short_leaves_a_checkpoint(mirror, tmp_path, monkeypatch) -> None:
    """After each number of files that may have been sent, the copy is the old state or the new."""
    store = CheckpointStore(mirror.local / "checkpoints")
    for t in range(2):
        store.save(t, torch.full((2, 2), float(t)))
        (mirror.local / "rounds.parquet").write_text(f"rounds up to {t}")
    mirror.push()
    for t in range(2, 4):
        store.save(t, torch.full((2, 2), float(t)))
        (mirror.local / "rounds.parquet").write_text(f"rounds up to {t}, and more")
    send, seen = mirror._send, []
    for num_sent in range(6):
        left = iter(range(num_sent))

        def cut(name, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            send(name)

        monkeypatch.setattr(mirror, "_send", cut)
        with suppress(KeyboardInterrupt):
            mirror.push()
        other = other_machine(mirror, tmp_path / f"other_{num_sent}")
        loaded = CheckpointStore(other.local / "checkpoints").load_latest()
        records = (other.local / "rounds.parquet").read_text()
        assert torch.equal(loaded.state, torch.full((2, 2), float(loaded.round)))
        assert int(records.split()[3].strip(",")) >= loaded.round
        seen.append(loaded.round)
    assert (seen[0], seen[-1]) == (1, 3)


def test_nothing_there_is_no_folder(mirror) -> None:
    mirror.fetch()
    assert not mirror.local.exists()


def test_what_was_never_copied_is_put_aside(mirror, caplog) -> None:
    mirror.local.mkdir(parents=True)
    (mirror.local / "summary.json").write_text("precious")
    mirror.fetch()
    (aside,) = mirror.local.parent.iterdir()
    assert (aside / "summary.json").read_text() == "precious"
    assert str(aside) in caplog.text


def test_a_store_that_is_away_for_a_moment_does_not_end_a_run(mirror, monkeypatch) -> None:
    mirror.local.mkdir(parents=True)
    (mirror.local / "summary.json").write_text("{}")
    with monkeypatch.context() as away:
        away.setattr(mirror, "push", lambda: (_ for _ in ()).throw(OSError("no network")))
        mirror.push_sometimes()
    mirror.next = 0.0
    mirror.push_sometimes()
    assert mirror.files.cat_file(f"{mirror.root}/summary.json") == b"{}"


def test_a_folder_that_is_being_run_is_not_fetched_over(mirror) -> None:
    with (
        locked(mirror.local / "fedavg" / "seed_0"),
        pytest.raises(ExperimentError, match="is being run by another process"),
    ):
        mirror.fetch()
    assert Mirror(mirror.url, "read").local != mirror.local


@pytest.mark.parametrize("planted", ["folder", "link", "file"])
def test_a_copy_is_for_this_user_alone_and_nobody_can_plant_it(planted, tmp_path, monkeypatch):
    monkeypatch.setattr("flray.records.mirror.gettempdir", lambda: str(tmp_path / "machine"))
    first = Mirror("memory://bucket/private")
    private = first.local.parent
    assert private.stat().st_mode & 0o777 == 0o700
    assert Mirror(first.url).local == first.local  # a later start finds what was never copied
    private.rmdir()
    if planted == "folder":
        private.mkdir()
        private.chmod(0o755)  # as others leave theirs, if they want us to use it
    elif planted == "link":
        (tmp_path / "theirs").mkdir(0o700)
        private.symlink_to(tmp_path / "theirs")
    else:
        private.touch(0o700)
    second = Mirror(first.url)
    assert second.local != first.local
    assert second.local.parent.parent == tmp_path / "machine"


def test_names_at_a_url_that_lead_out_of_the_folder_are_refused(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_remote", lambda: ["config.yaml", "../../victim"])
    monkeypatch.setattr(mirror, "_clear", lambda: None)
    monkeypatch.setattr(mirror.files, "get_file", lambda _, target: Path(target).touch())
    with pytest.raises(ExperimentError, match=r"names '../../victim', which lies outside of it"):
        mirror.fetch()
    assert not list(tmp_path.rglob("victim"))
