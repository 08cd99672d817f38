"""Errors that users see: what goes wrong because of the experiment, not because of the code.

An `ExperimentError` ends a command with exit code 2 and one message, a `ClientFailure` with 1.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

CUDA_ERROR = "CUDA error"  # in every message of a failure that is not for want of memory
MOST_SHOWN = 2000  # characters of a message, whatever it repeats
# Errors of a client's module, loss or data, and of a component, that end in a message
CLIENT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Code that is not the user's own: Python's, installed packages', flray's
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(__file__),
    )
)
# torch goes on with a list of all processes on the GPU, which may have thousands of characters.
_GPU_FULL = re.compile(
    r"CUDA out of memory\. Tried to allocate (.+?)\. .* of (.+?) of which (.+?) is free\..*"
)
_FULL = (
    r"CUDA out of memory: \1 wanted, \3 of \2 free; choose a smaller execution.block, run fewer "
    "rows of a sweep at a time (concurrency), or end other programs on the GPU"
)
_LINE = "raised in "  # begins the note by which an error keeps its line when it is pickled


class ExperimentError(ValueError):
    """The experiment as described cannot be run.

    The message names the key or file, what came, what was expected and what to do. The command line
    prints it without a traceback and exits with 2.

    >>> str(ExperimentError("rounds must be >= 1, got 0"))
    'rounds must be >= 1, got 0'
    """

    def __str__(self) -> str:
        """The message, cut in the middle if a component has repeated a value of any length."""
        text, half = super().__str__(), MOST_SHOWN // 2
        return text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"


class NoRoom(ExperimentError, OSError):
    """A file could not be written because the disk is full; those that were there are intact."""


class ServerLost(RuntimeError):
    """The process that ran the rounds is gone; the run directory holds all it had done."""


class ClientFailure(RuntimeError):
    """A client's training failed and `on_client_failure` is `raise`, or the GPU is full."""


class GpuFault(RuntimeError):
    """CUDA failed in a way that a new process may recover from."""


def one_line_message(error: BaseException) -> str:
    """The last line of an error's message, with its class unless it is an error of flray.

    The first lines of CUDA's messages say what happened, the last ones how to debug kernels. Of
    torch's message about a full GPU the sizes are kept, and what to do is added.

    >>> one_line_message(ExperimentError("no data")), one_line_message(KeyError("x"))
    ('no data', "KeyError: 'x'")
    """
    lines = str(error).strip().split("\n")
    text = next((line for line in lines if CUDA_ERROR in line), lines[-1])
    text = _GPU_FULL.sub(_FULL, text)
    if not text:
        return type(error).__name__
    is_ours = type(error).__module__.startswith("flray.")
    return text if is_ours else f"{type(error).__name__}: {text}"


def line_of(error: BaseException) -> str:
    """The last line of the user's own code that raised an error; empty if none of it did.

    >>> line_of(ValueError("of nobody's code"))
    ''
    """
    notes: list[str] = getattr(error, "__notes__", [])
    for note in notes:
        if note.startswith(_LINE):
            return note.removeprefix(_LINE)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *_INSTALLED)):
            return f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return ""


def keep_line(error: BaseException) -> None:
    """Note on an error what `line_of` says, since a process that it is sent to gets no traceback.

    >>> import pickle
    >>> try:
    ...     exec(compile("1 / 0", "/home/me/mine.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     keep_line(error)
    ...     line_of(pickle.loads(pickle.dumps(error)))
    'mine.py, line 1'
    """
    line = line_of(error)
    if line:
        error.add_note(_LINE + line)


@contextmanager
def located(component: str) -> Iterator[None]:
    """Give an error of the user's own code in a component one message, with file and line.

    Other errors keep their traceback, and those of a GPU their class: it may have been full. The
    message of a ValueError, with which components refuse, stays as it is.

    >>> with located("embed Mine"):
    ...     exec(compile("1 / 0", "/home/me/mine.py", "exec"))
    Traceback (most recent call last):
    flray.errors.ExperimentError: embed Mine (mine.py, line 1): ZeroDivisionError: division by zero
    """
    try:
        yield
    except (ExperimentError, ClientFailure):
        raise
    except CLIENT_ERRORS as error:
        line = line_of(error)
        if not line or is_gpu_fault(error) or is_gpu_full(error):
            raise
        reason = str(error) if isinstance(error, ValueError) else one_line_message(error)
        raise ExperimentError(f"{component} ({line}): {reason}") from error


def is_gpu_fault(error: BaseException | None) -> bool:
    """True if CUDA failed in a way that only a new process recovers from; full memory is no such.

    >>> lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    >>> is_gpu_fault(lost), is_gpu_fault(RuntimeError("CUDA out of memory"))
    (True, False)
    """
    return _says(error, CUDA_ERROR, "MPS server")


def is_gpu_full(error: BaseException | None) -> bool:
    """True if the GPU had no memory left, which other processes may have taken.

    >>> is_gpu_full(RuntimeError("CUDA out of memory. Tried to allocate 380.00 MiB"))
    True
    """
    return _says(error, "CUDA out of memory")


@contextmanager
def plain_if_gpu_is_full() -> Iterator[None]:
    """Give what torch says about a GPU without memory left one message, as a `ClientFailure`."""
    try:
        yield
    except RuntimeError as error:
        if is_gpu_full(error) and not isinstance(error, ClientFailure):
            raise ClientFailure(one_line_message(error)) from error
        raise


def _says(error: BaseException | None, *texts: str) -> bool:
    """True if the message of an error, or of what caused it, has one of the texts."""
    if error is None:
        return False
    if any(text in str(error) for text in texts):
        return True
    cause = getattr(error, "cause", None)  # of an error that Ray brought here
    return _says(cause if isinstance(cause, BaseException) else error.__cause__, *texts)
