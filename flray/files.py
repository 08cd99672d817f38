"""Files: written in full or not at all, and read with an error that names a damaged one.

Everything that a run writes goes through `replace_file`, so that a kill, a full disk or a power cut
leaves the old file or the new one, never half of it.
"""

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
from yaml import YAMLError

from flray.errors import ExperimentError, NoRoom

TEMPORARY = ".tmp"  # ends the names of files that are being written

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
# What the readers of JSON, YAML, Parquet and npz raise of bytes that changed.
_RAISED = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, EOFError),
    *(MemoryError, NotImplementedError, AttributeError, BadZipFile, zlib.error, pa.ArrowException),
    YAMLError,
)

_REMEDY = "restore it from a copy, or remove its run and start it again"


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put that in the place of `path`.

    A reader sees the old file or the whole new one, after a kill and after a power cut alike.
    Several processes may write the same file: the last one wins.

    Args:
        write: is called with the path of the temporary file.

    Raises:
        NoRoom: if the disk is full.
        ExperimentError: if the folder is missing.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "note.txt"
    >>> replace_file(path, lambda file: file.write_text("whole"))
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('whole', 1)
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
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
    """Put a text, in UTF-8, in the place of `path`, as `replace_file` does."""
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


def is_forbidden(error: OSError) -> bool:
    """True if the error says that the user may only read: by permissions or the file system.

    >>> is_forbidden(PermissionError(errno.EACCES, "Permission denied"))
    True
    """
    return error.errno in _FORBIDDEN


def is_plain(path: Path) -> bool:
    """True for a file and for nothing, but not for a link, a device or a FIFO."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _sync(path: Path) -> None:
    """Let the disk write what the system still buffers of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong in the block into an error about the file, missing files included.

    >>> with reading(Path("rounds.parquet")):
    ...     raise ValueError("there is no column 'round'")
    Traceback (most recent call last):
    flray.errors.ExperimentError: rounds.parquet is damaged (there is no column 'round'): restore...
    """
    try:
        yield
    except ExperimentError:
        raise
    except FileNotFoundError as error:
        raise ExperimentError(f"{path} is missing: {_REMEDY}") from error
    except _RAISED as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ExperimentError(f"{path} is damaged ({reason}): {_REMEDY}") from error


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """The JSON object of a file; a missing or damaged file is an ExperimentError."""
    with reading(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"an object was expected, got {type(value).__name__}")
        return value


def to_json(value: object) -> str:
    """A JSON document, indented: numpy scalars as numbers, NaN and infinities as null.

    >>> print(to_json({"loss": float("nan"), "rounds": np.int64(3)}), end="")
    {
      "loss": null,
      "rounds": 3
    }
    """
    return json.dumps(_json_value(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _json_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _json_value(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(child) for child in value]
    if isinstance(value, np.generic):
        return _json_value(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
