import errno
import json
import resource
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flray.errors import ExperimentError
from flray.records import checkpoint, row_sources
from flray.records.checkpoint import CheckpointStore
from flray.records.row_sources import MAX_FILES

from mutations import damaged


def store_at(directory: Path) -> CheckpointStore:
    """One that may hold the classes of this file."""
    return CheckpointStore(directory, [__name__.partition(".")[0]])


@dataclass(frozen=True)
class State:
    bank: dict
    table: torch.Tensor
    heard: tuple


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def data_size(directory, t):
    return (Path(directory) / f"round_{t:06d}.safetensors").stat().st_size


def manifest(directory, t):
    return json.loads((Path(directory) / f"round_{t:06d}.json").read_text())


def rewrite(path: Path, old: str, new: str) -> None:
    """Change a manifest as one who knows how it is written would."""
    held = json.loads(path.read_text())
    del held["crc32"]
    path.write_text(checkpoint.sealed(json.dumps(held).replace(old, new)))


def replace_rows(table, rows, value):
    changed = table.clone()
    changed[rows] = value
    return changed


@contextmanager
def largest_file(num_bytes):
    """The operating system itself refuses to write more, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_state_comes_back_in_another_process(tmp_path):
    state = State({"w": torch.randn(2, 3), "b": torch.tensor(1.5)}, torch.ones(4, 2), (1, None))
    store_at(tmp_path / "new").save(3, state, {"seconds": float("inf"), "seen": [1, 2]})
    loaded = store_at(tmp_path / "new").load_latest()
    assert loaded.round == 3
    assert loaded.extra == {"seconds": float("inf"), "seen": [1, 2]}
    assert type(loaded.state) is State
    assert loaded.state.heard == (1, None)
    assert torch.equal(loaded.state.bank["w"], state.bank["w"])
    assert torch.equal(loaded.state.bank["b"], state.bank["b"])
    assert torch.equal(loaded.state.table, state.table)


def test_tensors_are_loaded_onto_the_device_asked_for_and_arrays_are_not(tmp_path):
    state = {"w": (torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16)), "ids": np.arange(3)}
    store_at(tmp_path).save(0, state)
    loaded = store_at(tmp_path).load_latest("meta").state
    assert [w.device.type for w in loaded["w"]] == ["meta", "meta"]
    assert loaded["ids"].tolist() == [0, 1, 2]


def test_a_state_may_be_a_single_tensor_or_hold_none(tmp_path):
    for t, state in enumerate([torch.arange(3), None, {"k": 1}, torch.zeros(0, 4)]):
        store = store_at(tmp_path / str(t))
        store.save(0, state)
        back = store_at(tmp_path / str(t)).load_latest().state
        same = torch.equal(back, state) if isinstance(state, torch.Tensor) else back == state
        assert same


def test_an_empty_or_absent_directory_has_no_checkpoint(tmp_path):
    assert store_at(tmp_path).load_latest() is None
    assert store_at(tmp_path / "absent").load_latest() is None


def test_only_changed_and_appended_rows_are_written(tmp_path):
    """A row is 1000 float32 = 4000 bytes; 3 of 500 rows change, then 2 are appended."""
    store = store_at(tmp_path)
    table = torch.randn(500, 1000)
    store.save(0, {"table": table})
    table = replace_rows(table, [3, 99, 100], 7.0)
    store.save(1, {"table": table})
    table = torch.cat([table, torch.ones(2, 1000)])
    store.save(2, {"table": table})
    assert 2_000_000 < data_size(tmp_path, 0) < 2_001_000
    assert 12_000 < data_size(tmp_path, 1) < 13_000
    assert 8_000 < data_size(tmp_path, 2) < 9_000
    pieces = manifest(tmp_path, 2)["tensors"]["state/table"]["pieces"]
    assert pieces == [[0, 0, 3], [1, 0, 1], [0, 4, 95], [1, 1, 2], [0, 101, 399], [2, 0, 2]]
    assert torch.equal(store_at(tmp_path).load_latest().state["table"], table)


def test_an_unchanged_state_writes_no_data(tmp_path):
    store = store_at(tmp_path)
    state = {"table": torch.full((3, 2), float("nan")), "owner": torch.arange(5)}
    store.save(0, state)
    store.save(1, {name: tensor.clone() for name, tensor in state.items()})
    assert names(tmp_path) == ["round_000000.json", "round_000000.safetensors", "round_000001.json"]
    assert store_at(tmp_path).load_latest().round == 1


@pytest.mark.parametrize(
    "other",
    [torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 3), torch.zeros(4), np.zeros((2, 2))],
    ids=["dtype", "row", "dimensions", "numpy"],
)
def test_a_tensor_of_another_kind_replaces_the_one_before(tmp_path, other):
    store = store_at(tmp_path)
    store.save(0, {"x": torch.zeros(4, 2)})
    store.save(1, {"x": other})
    back = store_at(tmp_path).load_latest().state["x"]
    assert type(back) is type(other)
    assert (back.dtype, back.shape) == (other.dtype, other.shape)


def test_a_resumed_store_goes_on_with_changed_rows(tmp_path):
    table = torch.randn(500, 1000)
    store_at(tmp_path).save(0, {"table": table})
    store = store_at(tmp_path)
    resumed = store.load_latest().state["table"]
    store.save(1, {"table": replace_rows(resumed, [5], 1.0)})
    assert data_size(tmp_path, 1) < 5_000
    expected = replace_rows(table, [5], 1.0)
    assert torch.equal(store_at(tmp_path).load_latest().state["table"], expected)


def test_the_last_two_checkpoints_and_their_files_are_kept(tmp_path):
    store = store_at(tmp_path)
    for t in range(5):
        store.save(t, {"w": torch.full((2, 2), float(t))})  # every row changes
        kept = range(max(0, t - 1), t + 1)
        expected = [f"round_{r:06d}.{end}" for r in kept for end in ("json", "safetensors")]
        assert names(tmp_path) == expected


def test_files_of_others_are_left_alone(tmp_path):
    for name in ("notes.json", "round_x.json", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "clients").mkdir()
    store = store_at(tmp_path)
    for t in range(4):
        store.save(t, {"w": torch.full((2, 2), float(t))})
    assert {"notes.json", "round_x.json", "model.safetensors", "clients"} <= set(names(tmp_path))


def test_rows_lie_in_few_files_and_seldom_move(tmp_path):
    """20 of 400 rows change each round: files stay few, what is written far below the whole."""
    generator = np.random.default_rng(0)
    store = store_at(tmp_path)
    table = torch.zeros(400, 50)
    written = []
    for t in range(60):
        rows = generator.choice(400, 20, replace=False)
        table = replace_rows(table, torch.from_numpy(rows), float(t + 1))
        store.save(t, {"table": table})
        written.append(data_size(tmp_path, t))
        assert len(manifest(tmp_path, t)["files"]) <= MAX_FILES
    assert torch.equal(store_at(tmp_path).load_latest().state["table"], table)
    whole, cohort = 400 * 50 * 4, 20 * 50 * 4
    assert sum(size < cohort + 500 for size in written) > 40  # mostly no more than what changed
    assert sum(written[1:]) / 59 < whole / 4


def test_a_file_that_mostly_holds_an_old_bank_does_not_stay_for_a_few_rows(tmp_path):
    """The bank changes as a whole each round, one table row too: 4 KB of rows, 400 KB of bank."""
    store = store_at(tmp_path)
    table = torch.zeros(50, 100)
    for t in range(20):
        table = replace_rows(table, [t], float(t + 1))
        store.save(t, {"bank": torch.full((1, 100_000), float(t)), "table": table})
    assert sum(data_size(tmp_path, r) for r in (18, 19)) < 900_000
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, damage, caplog):
    store = store_at(tmp_path)
    tables = [torch.full((4, 8), 1.0), replace_rows(torch.full((4, 8), 1.0), [2], 2.0)]
    for t, table in enumerate(tables):
        store.save(t, {"table": table}, {"t": t})
    data = tmp_path / "round_000001.safetensors"
    content = data.read_bytes()
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    store = store_at(tmp_path)
    loaded = store.load_latest()
    assert (loaded.round, loaded.extra) == (0, {"t": 0})
    assert torch.equal(loaded.state["table"], tables[0])
    assert "checkpoint of round 1 is damaged" in caplog.text
    store.save(1, {"table": tables[1]})
    again = store_at(tmp_path).load_latest()
    assert again.round == 1
    assert torch.equal(again.state["table"], tables[1])


def test_when_every_checkpoint_is_damaged_the_run_does_not_silently_start_again(tmp_path):
    store_at(tmp_path).save(0, torch.ones(2, 2))
    (tmp_path / "round_000000.safetensors").unlink()
    with pytest.raises(ExperimentError, match=r"every checkpoint in .* is damaged"):
        store_at(tmp_path).load_latest()


def test_a_changed_class_is_an_error_and_no_damage(tmp_path):
    """Falling back would not help: the checkpoint before was written by the same code."""
    store = store_at(tmp_path)
    for t in range(2):
        store.save(t, State({}, torch.zeros(1), ()))
    rewrite(tmp_path / "round_000001.json", '"heard"', '"seen"')
    with pytest.raises(ExperimentError, match="written by other code"):
        store_at(tmp_path).load_latest()


def test_a_kill_between_data_and_manifest_leaves_the_older_checkpoint(tmp_path):
    store = store_at(tmp_path)
    old, new = torch.zeros(3, 2), torch.ones(3, 2)
    store.save(0, old)
    killed = patch.object(checkpoint, "replace_text", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        store.save(1, new)
    assert "round_000001.safetensors" in names(tmp_path)
    store = store_at(tmp_path)
    loaded = store.load_latest()
    assert loaded.round == 0
    assert torch.equal(loaded.state, old)
    store.save(1, new)
    assert torch.equal(store_at(tmp_path).load_latest().state, new)


def test_a_manifest_never_meets_the_data_of_another_attempt(tmp_path):
    """Round 1 was computed again from round 0 and killed before its new manifest was there."""
    store = store_at(tmp_path)
    store.save(0, torch.zeros(3, 2))
    store.save(1, torch.ones(3, 2))
    shutil.copy(tmp_path / "round_000000.safetensors", tmp_path / "round_000001.safetensors")
    assert store_at(tmp_path).load_latest().round == 0


def test_leftover_temporary_files_are_ignored_and_removed(tmp_path):
    store_at(tmp_path).save(0, torch.zeros(2, 2))
    for name in ("round_000001.json.tmp", "round_000001.safetensors.tmp", ".tmpAbC123"):
        (tmp_path / name).write_bytes(b"half")
    assert store_at(tmp_path).load_latest().round == 0
    assert names(tmp_path) == ["round_000000.json", "round_000000.safetensors"]


def test_a_full_disk_leaves_the_checkpoint_before_intact_and_says_what_was_needed(tmp_path):
    store = store_at(tmp_path)
    small, large = torch.zeros(3, 2), torch.ones(300, 1000)
    store.save(0, small)
    before = names(tmp_path)
    with (
        largest_file(100_000),
        pytest.raises(ExperimentError, match=r"round 1 to .*: 1200000 bytes .* round 0 is intact"),
    ):
        store.save(1, large)
    assert names(tmp_path) == before
    assert torch.equal(store_at(tmp_path).load_latest().state, small)
    store.save(1, large)
    assert torch.equal(store_at(tmp_path).load_latest().state, large)


def test_a_disk_that_fills_before_the_manifest_leaves_no_data_behind(tmp_path):
    store = store_at(tmp_path)
    store.save(0, torch.zeros(3, 2))
    before = names(tmp_path)
    error = OSError(errno.ENOSPC, "No space left on device")
    full = patch.object(checkpoint, "replace_text", side_effect=error)
    with full, pytest.raises(ExperimentError, match="No space left on device"):
        store.save(1, torch.ones(3, 2))
    assert names(tmp_path) == before
    assert store_at(tmp_path).load_latest().round == 0


def test_rounds_are_saved_in_order(tmp_path):
    store = store_at(tmp_path)
    store.save(4, None)
    with pytest.raises(ValueError, match="got 4 after 4"):
        store.save(4, None)
    with pytest.raises(ValueError, match="got -1 after none yet"):
        store_at(tmp_path).save(-1, None)


def test_others_may_read_a_checkpoint_as_far_as_the_umask_allows(tmp_path):
    store_at(tmp_path).save(0, torch.zeros(2, 2))
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode}


step = st.fixed_dictionaries(
    {
        "change": st.sets(st.integers(0, 9), max_size=4),
        "append": st.integers(0, 3),
        "drop": st.integers(0, 2),
        "bits": st.integers(0, 2**32 - 1),  # NaNs of every kind among them
        "owner": st.booleans(),
        "restart": st.booleans(),
    }
)


def next_state(state, step):
    """New bits in some rows, rows gone at the end, rows appended."""
    table = state["table"][: max(0, len(state["table"]) - step["drop"])]
    appended = np.full((step["append"], 3), step["bits"], dtype=np.uint32)
    table = np.concatenate([table.view(np.uint32), appended])
    table[[row for row in step["change"] if row < len(table)], 1] = step["bits"]
    owner = torch.arange(len(table)) if step["owner"] else state["owner"]
    return {"table": table.view(np.float32), "owner": owner}


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(step, min_size=1, max_size=15), st.sampled_from([2, 3, 8]))
def test_any_sequence_of_changes_comes_back_bit_by_bit(steps, max_files):
    state = {"table": np.zeros((4, 3), dtype=np.float32), "owner": torch.zeros(2)}
    with TemporaryDirectory() as directory, patch.object(row_sources, "MAX_FILES", max_files):
        store = CheckpointStore(Path(directory))
        for t, now in enumerate(steps):
            state = next_state(state, now)
            store.save(t, state)
            if now["restart"]:
                store = CheckpointStore(Path(directory))
            back = (store if now["restart"] else CheckpointStore(Path(directory))).load_latest()
            assert back.round == t
            assert back.state["table"].shape == state["table"].shape
            assert back.state["table"].tobytes() == state["table"].tobytes()
            assert torch.equal(back.state["owner"], state["owner"])
            files = [manifest(directory, r)["files"] for r in range(max(0, t - 1), t + 1)]
            referenced = {f"round_{int(r):06d}.safetensors" for kept in files for r in kept}
            assert {n for n in names(directory) if n.endswith("safetensors")} == referenced
            assert max(len(kept) for kept in files) <= max_files


def test_a_foreign_checkpoint_imports_nothing(tmp_path, monkeypatch):
    """Importing a module runs it: a manifest that names one is refused before that."""
    (tmp_path / "planted.py").write_text("raise SystemExit('the planted module ran')")
    monkeypatch.syspath_prepend(tmp_path)
    store_at(tmp_path / "run").save(0, State({}, torch.zeros(1), ()))
    manifest = tmp_path / "run" / "round_000000.json"
    own = f"{State.__module__}:State"
    assert own in manifest.read_text()
    rewrite(manifest, own, "planted:Payload")
    with pytest.raises(ExperimentError, match=r"planted:Payload, which belongs to none"):
        store_at(tmp_path / "run").load_latest()


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path):
    with pytest.raises(ExperimentError, match="define a state in the package of its algorithm"):
        CheckpointStore(tmp_path).save(0, State({}, torch.zeros(1), ()))
    assert not list(tmp_path.glob("round_*"))


@settings(max_examples=80)
@given(st.data())
def test_bytes_that_changed_are_noticed_and_the_checkpoint_before_is_taken(data):
    """Whatever is cut off, flipped or overwritten, the state is one that was saved."""
    with TemporaryDirectory() as directory:
        store = store_at(directory)
        tables = [torch.full((4, 3), 1.0), replace_rows(torch.full((4, 3), 1.0), [2], 2.0)]
        for t, table in enumerate(tables):
            store.save(t, State({"lr": 0.1, "t": t}, table, (t,)))
        file = data.draw(st.sampled_from([n for n in names(directory) if "000001" in n]))
        before = (Path(directory) / file).read_bytes()
        after = data.draw(damaged(before))
        (Path(directory) / file).write_bytes(after)
        loaded = store_at(directory).load_latest()
        assert loaded.round == int(after == before)
        assert loaded.state.bank == {"lr": 0.1, "t": loaded.round}
        assert torch.equal(loaded.state.table, tables[loaded.round])
