import os
from pathlib import Path
from threading import Thread

import pytest

from flray.files import replace_file, replace_text, write_output


def half_then(error):
    def write(path):
        path.write_text("half")
        raise error

    return write


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "summary.json"
    replace_text(path, "old")
    with pytest.raises(type(error)):
        replace_file(path, half_then(error))
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_an_interrupted_first_write_leaves_no_file(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        replace_file(tmp_path / "x", half_then(OSError("disk full")))
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_of_a_killed_write_does_no_harm(tmp_path):
    own = tmp_path / f"x.{os.getpid()}.tmp"
    other = tmp_path / "x.1.tmp"  # of a process that may still write it
    for leftover in (own, other):
        leftover.write_text("a longer leftover")
    replace_text(tmp_path / "x", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "x.1.tmp"]
    assert (tmp_path / "x").read_text() == "new"


def test_a_reader_of_the_old_file_keeps_the_old_file(tmp_path):
    path = tmp_path / "x"
    replace_text(path, "old")
    with path.open() as reader:
        replace_text(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def page(path):
    path.write_text("page")


def test_output_goes_through_a_link_into_the_file_it_names(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for _ in range(2):  # a target that is not there yet, and one that is
        write_output(tmp_path / "link", page)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_text() == "page"


def test_output_goes_into_a_fifo_and_the_fifo_stays(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    read = []
    reader = Thread(target=lambda: read.append((tmp_path / "fifo").read_text()))
    reader.start()
    write_output(tmp_path / "fifo", page)
    reader.join()
    assert read == ["page"]
    assert (tmp_path / "fifo").is_fifo()


def test_output_to_a_device_leaves_the_device():
    write_output(Path(os.devnull), page)
    assert Path(os.devnull).is_char_device()
