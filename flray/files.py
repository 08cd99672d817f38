"""Files: written in full or not at all, and read with an error that names a damaged one."""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile

import pyarrow as pa
from yaml import YAMLError

from flray.errors import ExperimentError, NoRoom

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What the readers of JSON, YAML, Parquet and npz raise of bytes that changed.
_RAISED = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, EOFError),
    *(MemoryError, NotImplementedError, AttributeError, BadZipFile, zlib.error, pa.ArrowException),
    YAMLError,
)

_REMEDY = "restore it from a copy, or remove its run and start it again"


def replace_file(path: Path, write: Callable[[Path], object], suffix: str = ".tmp") -> None:
    """Let `write` fill a file beside `path`, then put that in the place of `path`.

    A reader sees the old file or the whole new one, after a kill and after a power cut alike.

    Args:
        suffix: of the file beside `path`; one of each process's own where several write at once.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors leaves a file that only its owner can read
        _sync(temporary)
        os.replace(temporary, path)
    except FileNotFoundError as error:
        missing = error.filename if path.parent.is_dir() else path.parent
        raise ExperimentError(f"could not write {path}: {missing} is missing") from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NoRoom(
            f"could not write {path}: {error}; what was written before is intact. Make room, then "
            "--resume"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)  # the rename itself


def replace_text(path: Path, text: str) -> None:
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_output(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill the file that a user named: replaced as a whole, if it is a plain file.

    A link is followed and a device or FIFO is written to; a file in their place would remove them.
    """
    if is_plain(path):
        return replace_file(path, write)
    with TemporaryDirectory() as folder:
        write(whole := Path(folder) / "output")
        with whole.open("rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


def is_plain(path: Path) -> bool:
    """True for a file and for nothing, but not for a link, a device or a FIFO."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong in the block into an error about the file, missing files included."""
    try:
        yield
    except ExperimentError:
        raise
    except FileNotFoundError as error:
        raise ExperimentError(f"{path} is missing: {_REMEDY}") from error
    except _RAISED as error:
        raise damaged(path, str(error).strip() or type(error).__name__) from error


def damaged(path: Path, reason: str) -> ExperimentError:
    """The error about a file that is not what was written."""
    return ExperimentError(f"{path} is damaged ({reason.split(chr(10))[0]}): {_REMEDY}")


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """The object that a file holds."""
    with reading(path):
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise ValueError(f"an object was expected, got {type(held).__name__}")
        return held
