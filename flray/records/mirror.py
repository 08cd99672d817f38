"""A folder's copy at a URL that fsspec knows (s3://, gs://, memory://, file://).

A run needs a local folder: files are replaced and rows read again. So it runs in a folder on this
machine, whose files are copied to the URL in an order in which what is there can always be resumed
(`records/changes.py`).
"""

import hashlib
import logging
import os
import shutil
from pathlib import Path
from stat import S_IMODE, S_ISDIR
from tempfile import gettempdir, mkdtemp
from time import monotonic, time_ns
from typing import Any

import fsspec

from flray.errors import ExperimentError
from flray.records.changes import LEFT_OUT, Marks, changed_names, marks_of
from flray.records.inside import path_below
from flray.records.lock import NAME, check_free

EVERY_S = 30.0  # between copies while a run goes on

_log = logging.getLogger(__name__)


class Mirror:
    """Keeps the copy of the folder `local` at a URL up to date.

    `fetch` makes the local folder what lies at the URL, `push` copies what changed since. The local
    folder is a private temporary one; the same URL and kind find it again.

    Args:
        url: any URL that fsspec knows, such as `s3://bucket/run`.
        kind: folders of different kinds are different, so that a reader does not disturb a run.
    """

    def __init__(self, url: str, kind: str = "run") -> None:
        self.url = url
        try:
            files: tuple[Any, str] = fsspec.core.url_to_fs(url)  # Any: a file system of fsspec's
        except (ValueError, ImportError) as error:
            raise ExperimentError(
                f"{url} cannot be used: {error}; s3:// needs the package s3fs, gs:// gcsfs"
            ) from error
        self.files, self.root = files
        name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
        self.local = _private_folder(f"flray-{kind}-{name}-") / "run"
        self.sent: Marks = {}
        self.next = 0.0

    def fetch(self) -> None:
        """Make the local folder what lies at the URL; nothing there is no folder.

        What the local folder has and the URL does not is put aside, with a warning.

        Raises:
            ExperimentError: A process is running in the local folder, or a file at the URL has a
                name that leads out of it.
        """
        for lock in self.local.rglob(NAME):
            check_free(lock.parent)
        self._clear()
        for name in self._remote():
            target = path_below(self.local, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(f"{self.root}/{name}", str(target))
        self.sent = marks_of(self.local)

    def _clear(self) -> None:
        """Remove the local folder; one that holds what is not at the URL is put aside."""
        remote = {name: self.files.size(f"{self.root}/{name}") for name in self._remote()}
        if any(remote.get(name) != size for name, (size, _) in marks_of(self.local).items()):
            aside = self.local.with_name(f"{self.local.name}-{time_ns()}")
            self.local.rename(aside)
            _log.warning(
                "%s holds what was never copied to %s: kept as %s", self.local, self.url, aside
            )
        shutil.rmtree(self.local, ignore_errors=True)

    def push_sometimes(self) -> None:
        """Push if EVERY_S seconds have passed since the last time; a failure is a warning."""
        if monotonic() < self.next:
            return
        try:
            self.push()
        except OSError as error:
            _log.warning("%s could not be copied to %s: %s", self.local, self.url, error)
        self.next = monotonic() + EVERY_S

    def push(self) -> None:
        """Copy what changed, then remove there what is gone here.

        Cut short at any point, what is at the URL can be resumed from.

        Raises:
            OSError: The file system of the URL does not answer.
        """
        changed, gone, marks = changed_names(self.local, self.sent)
        for name in changed:
            try:
                self._send(name)
            except FileNotFoundError:  # replaced or removed meanwhile: the next time has it
                marks.pop(name)
        for name in gone:
            if self.files.exists(f"{self.root}/{name}"):
                self.files.rm_file(f"{self.root}/{name}")
        self.sent = marks

    def _send(self, name: str) -> None:
        """Copy a file so that a reader sees the old one or the whole new one."""
        target = f"{self.root}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        temporary = f"{target}.{os.getpid()}.tmp"
        self.files.put_file(str(self.local / name), temporary)
        self.files.mv(temporary, target)

    def _remote(self) -> list[str]:
        """The names of the files at the URL, relative to it."""
        if not self.files.exists(self.root):
            return []
        names = [str(name) for name in self.files.find(self.root)]
        relative = [name.split(self.root.strip("/") + "/", 1)[-1] for name in names]
        return [name for name in relative if not name.endswith(LEFT_OUT)]


def _private_folder(prefix: str) -> Path:
    """A temporary folder that this user alone can enter: the one of an earlier start, or a new one.

    The end of its name is random, so that nobody can make that folder beforehand.
    """
    temporary = Path(gettempdir())
    for folder in sorted(temporary.glob(f"{prefix}*")):
        state = folder.lstat()
        is_private = S_ISDIR(state.st_mode) and S_IMODE(state.st_mode) == 0o700
        if is_private and state.st_uid == os.getuid():
            return folder
    temporary.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix=prefix, dir=temporary))
