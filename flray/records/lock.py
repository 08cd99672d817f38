"""One process at a time runs a run directory; the lock goes with the process, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flray.errors import ExperimentError

NAME = "run.lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, which is made where it does not exist."""
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            check_free(directory)
            raise
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if not existed and directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()  # refused before anything was written


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold the lock file `path`, which stays; True if nobody else holds it now.

    It is given back at the end of the block or of the process, whichever comes first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def check_free(directory: Path) -> None:
    """Refuse a directory that another process is running."""
    if (pid := holder(directory)) is not None:
        raise ExperimentError(
            f"{directory} is being run by another process (pid {pid}): "
            "watch it with `flray attach`, or choose another --out"
        )


def holder(directory: Path) -> int | None:
    """The process that is running this directory now, None if none is."""
    try:
        with (directory / NAME).open("r+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = handle.read()
                return int(text) if text.isdecimal() else -1
    except FileNotFoundError:
        pass
    return None
