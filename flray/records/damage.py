"""Files that are not what was written: an error that names the file, whatever its format."""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pyarrow as pa
from yaml import YAMLError

from flray.errors import ExperimentError

# What the readers of JSON, YAML, Parquet and npz raise of bytes that changed.
_RAISED = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, EOFError),
    *(MemoryError, NotImplementedError, AttributeError, BadZipFile, zlib.error, pa.ArrowException),
    YAMLError,
)

_REMEDY = "restore it from a copy, or remove its run and start it again"


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
