"""Which files of a folder have changed, and in which order a copy of them stays resumable.

A checkpoint's data and the records come before its manifest, and nothing is removed before that.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flray.files import TEMPORARY, replace_file

MANIFESTS = "checkpoints/round_*.json"
LEFT_OUT = (TEMPORARY, ".lock", ".alive", ".wish")  # files that only mean something on one machine

Marks = dict[str, tuple[int, int]]  # size and time of change by relative path


def marks_of(folder: Path) -> Marks:
    """The files of a folder with their marks.

    Manifests are looked at first: what they refer to is there by then.
    """
    manifests = [path for path in _files(folder) if path.match(MANIFESTS)]
    others = [path for path in _files(folder) if not path.match(MANIFESTS)]
    marks = {}
    for path in [*manifests, *others]:
        if not path.name.endswith(LEFT_OUT):
            with suppress(FileNotFoundError):  # a run puts new files in the place of old ones
                stat = path.stat()
                marks[path.relative_to(folder).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return marks


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder; `os.walk` passes over folders that a run has just removed."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def in_turn(names: Iterable[str]) -> list[str]:
    """Manifests of checkpoints after what they refer to, a summary last.

    >>> in_turn(["summary.json", "checkpoints/round_1.json", "rounds.parquet"])
    ['rounds.parquet', 'checkpoints/round_1.json', 'summary.json']
    """

    def turn(name: str) -> tuple[int, str]:
        return (2 if name.endswith("summary.json") else int(Path(name).match(MANIFESTS)), name)

    return sorted(names, key=turn)


def changed_names(folder: Path, seen: Marks) -> tuple[list[str], list[str], Marks]:
    """Files that changed since they had the marks `seen`, files that are gone, and the marks now.

    The files are in the order in which a copy of the folder stays resumable.
    """
    marks = marks_of(folder)
    changed = in_turn(name for name, mark in marks.items() if seen.get(name) != mark)
    gone = [name for name in sorted(seen.keys() - marks.keys()) if not (folder / name).exists()]
    return changed, gone, marks


@dataclass(frozen=True)
class Changes:
    """New contents of files, in turn, and the names of those that are gone.

    The server actor sends them to the machine that has the run's folder.

    >>> from tempfile import mkdtemp
    >>> here, there = Path(mkdtemp()), Path(mkdtemp())
    >>> _ = (here / "rounds.parquet").write_text("1")
    >>> changes, marks = changes_since(here, {})
    >>> changes.apply_to(there)
    >>> (there / "rounds.parquet").read_text(), changes_since(here, marks)[0].files
    ('1', [])
    """

    files: list[tuple[str, bytes]]
    gone: list[str]

    def apply_to(self, folder: Path) -> None:
        """Make the folder a copy of the one that changed; cut short, it stays resumable."""
        for name, content in self.files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, partial(Path.write_bytes, data=content))
        for name in self.gone:
            (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # fails for a folder that still holds files
                (folder / name).parent.rmdir()


def changes_since(folder: Path, seen: Marks) -> tuple[Changes, Marks]:
    """What has changed since the files had these marks, and their marks now.

    Reads the contents of all changed files into memory. Files that a run replaces meanwhile are
    left to the next call.
    """
    names, gone, marks = changed_names(folder, seen)
    files = []
    for name in names:
        try:
            files.append((name, (folder / name).read_bytes()))
        except FileNotFoundError:  # replaced or removed meanwhile: the next time has it
            marks.pop(name)
    return Changes(files, gone), marks
