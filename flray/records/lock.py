"""One process at a time runs a run directory; the lock goes with the process, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flray.errors import ExperimentError

NAME = "run.lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, which is made if it does not exist.

    Raises:
        ExperimentError: if another process holds it; the message names the process.

    >>> from tempfile import mkdtemp
    >>> directory = Path(mkdtemp())
    >>> with locked(directory):
    ...     holder(directory) == os.getpid()
    True
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    with path.open("a+") as handle:
        if not _try_lock(handle):
            raise _in_use(directory, _pid_in(handle))
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # one has a file: the run was not refused
                for path in made:
                    path.rmdir()


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold the lock file `path`, which stays; True if nobody else holds it now.

    It is given back at the end of the block or of the process, whichever comes first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        yield _try_lock(handle)


def check_free(directory: Path) -> None:
    """Refuse a directory that another process is running.

    Raises:
        ExperimentError: The message names the process and how to watch it.
    """
    if (pid := holder(directory)) is not None:
        raise _in_use(directory, pid)


def holder(directory: Path) -> int | None:
    """The id of the process that is running this directory now, -1 if unknown; None: nobody.

    Asks the lock, not the file: the file of a process that was killed counts for nothing. Who may
    read the folder may ask; nothing is written.
    """
    try:
        with (directory / NAME).open() as handle:
            # Shared: several may ask at once, and NFS allows it without the right to write.
            return None if _try_lock(handle, fcntl.LOCK_SH) else _pid_in(handle)
    except FileNotFoundError:
        return None


def _try_lock(handle: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_in(handle: IO[str]) -> int:
    handle.seek(0)
    text = handle.read()
    return int(text) if text.isdecimal() else -1


def _in_use(directory: Path, pid: int) -> ExperimentError:
    return ExperimentError(
        f"{directory} is being run by another process (pid {pid}): "
        "watch it with `flray attach`, or choose another --out"
    )
