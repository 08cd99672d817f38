"""The cache: an entry is computed once, by whoever lives to finish it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from flray.clustering.points import Points
from flray.columns import CLIENT_STEPS
from flray.errors import ClientFailure
from flray.records.checkpoint import CheckpointStore
from flray.sweeps import cache
from flray.sweeps.cache import Cache, OutOfTime

HOLD = """
import sys, time
from pathlib import Path
from flray.records.lock import claimed
with claimed(Path(sys.argv[1])) as is_mine:
    print(is_mine, flush=True)
    time.sleep(60)
"""


def cache_in(folder: Path, sweep: str = "mine", **more) -> Cache:
    return Cache(folder, sweep, more.pop("session", "now"), **more)


def writing(text: str, steps: int = 0):
    def write(folder: Path) -> int:
        (folder / "text").write_text(text)
        return steps

    return write


def test_an_entry_is_computed_once_and_counted_for_who_computed_it(tmp_path) -> None:
    first, second = cache_in(tmp_path), cache_in(tmp_path, "yours")
    path = first.obtain("kind", "key", writing("a", 7))
    assert second.obtain("kind", "key", lambda _: pytest.fail("computed again")) == path
    assert (path / "text").read_text() == "a"
    assert first.costs("kind") == {"key": 7}
    assert second.costs("kind") == {}


def test_who_waits_gets_what_another_computes(tmp_path) -> None:
    begun, go_on, found = threading.Event(), threading.Event(), []

    def slow(folder: Path) -> int:
        begun.set()
        assert go_on.wait(30)
        return writing("a")(folder)

    other = threading.Thread(target=lambda: cache_in(tmp_path).obtain("kind", "key", slow))
    other.start()
    assert begun.wait(30)
    waiting = threading.Thread(
        target=lambda: found.append(cache_in(tmp_path).obtain("kind", "key", writing("b")))
    )
    waiting.start()
    time.sleep(0.3)
    assert found == []
    go_on.set()
    waiting.join(30)
    other.join(30)
    assert (found[0] / "text").read_text() == "a"


def test_the_claim_of_a_process_that_was_killed_is_taken_over(tmp_path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "kind" / "key.lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "True"
    late = cache_in(tmp_path, deadline=time.time() + 0.3)
    with pytest.raises(OutOfTime):
        late.obtain("kind", "key", writing("b"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    path = cache_in(tmp_path, deadline=time.time() + 30).obtain("kind", "key", writing("b"))
    assert (path / "text").read_text() == "b"


def test_an_entry_that_fails_is_not_there_and_fails_once(tmp_path) -> None:
    def fail(folder: Path) -> int:
        (folder / "text").write_text("half")
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        cache_in(tmp_path).obtain("kind", "key", fail)
    assert not (tmp_path / "kind" / "key").exists()
    with pytest.raises(ClientFailure, match="ValueError: no luck"):
        cache_in(tmp_path).obtain("kind", "key", lambda _: pytest.fail("tried again"))
    again = cache_in(tmp_path, session="later").obtain("kind", "key", writing("a"))
    assert [file.name for file in again.iterdir()] == ["text"]


def test_what_was_stopped_is_gone_on_with_and_published_once_it_is_whole(tmp_path) -> None:
    def stop(folder: Path) -> int:
        (folder / "half").write_text("a")
        raise OutOfTime

    with pytest.raises(OutOfTime):
        cache_in(tmp_path).obtain("kind", "key", stop)
    assert not (tmp_path / "kind" / "key").exists()

    def finish(folder: Path) -> int:
        (folder / "whole").write_text((folder / "half").read_text() + "b")
        return 3

    path = cache_in(tmp_path, "yours").obtain("kind", "key", finish)
    assert (path / "whole").read_text() == "ab"
    assert cache_in(tmp_path).costs("kind") == {}
    assert cache_in(tmp_path, "yours").costs("kind") == {"key": 3}


def test_a_value_comes_back_bit_by_bit_and_as_one_object(tmp_path, monkeypatch) -> None:
    values = torch.tensor([[0.1], [float(np.nextafter(np.float32(0.1), 1))]])
    points = Points.vectors(np.array([3, 5]), values)
    found, counts = cache_in(tmp_path).counted("embed", "key", lambda: (points, {CLIENT_STEPS: 7}))
    assert cache_in(tmp_path, "yours").value("embed", "key", lambda: None) is found
    monkeypatch.setattr(cache, "_VALUES", {})  # as in another process, which has to read it
    read, read_counts = cache_in(tmp_path).counted("embed", "key", lambda: (None, {}))
    assert read is not found
    for one in (found, read):
        assert torch.equal(one.values, values)
        assert one.clients.tolist() == [3, 5]
    assert counts == read_counts == {CLIENT_STEPS: 7}
    assert cache_in(tmp_path).costs("embed") == {"key": 7}


def test_who_computes_a_value_does_not_read_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(CheckpointStore, "load_latest", None)
    transposed = torch.arange(6.0).view(2, 3).T
    found = cache_in(tmp_path).value("embed", "key", lambda: transposed)
    assert torch.equal(found, transposed)
    assert found.is_contiguous()  # as it is when it is read: sums may depend on the layout


def test_a_process_forgets_the_value_that_was_not_used_for_longest(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "_VALUES", {})
    monkeypatch.setattr(cache, "VALUES_KEPT", 2)
    for key in ("a", "b", "a", "c"):
        cache_in(tmp_path).value("embed", key, lambda: torch.zeros(1))
    assert [path.name for path in cache._VALUES] == ["a", "c"]
