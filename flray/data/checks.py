"""Checks of configured values and of data; each message says what was expected and what came."""

import functools
import os
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from flray.errors import ExperimentError
from flray.wording import counted


@functools.lru_cache(maxsize=1024)
def _hints(options: type) -> dict[str, Any]:  # Any: annotations
    return get_type_hints(options)


def check_literals(options: object) -> None:
    """Refuse a value that the `Literal` of its field, or of a tuple's items, does not allow.

    Called in `__post_init__` of options, because Python itself does not check annotations.
    """
    kind: type = type(options)
    for field, hint in _hints(kind).items():
        value = getattr(options, field)
        is_tuple = get_origin(hint) is tuple
        item = get_args(hint)[0] if is_tuple else hint
        choices = get_args(item) if get_origin(item) is Literal else ()
        for choice in value if is_tuple else (value,):
            if choices and choice not in choices:
                raise ValueError(f"unknown {field} {choice!r}; known: {', '.join(choices)}")


def check_memory(num_images: int, size: int) -> None:
    """Refuse images that could never lie in this machine's memory, before they are drawn.

    Args:
        num_images: Number of one-channel images of bytes.
        size: Their height and width.
    """
    needed = num_images * size * size  # bytes of uint8
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ExperimentError(
            f"{num_images} images of {size}x{size} need {needed / 2**30:,.0f} GiB, this machine "
            f"has {available / 2**30:,.0f}; lower their number or size"
        )


def refuse_rows(is_wrong: NDArray[np.bool_], what: str, advice: str) -> None:
    """Refuse data with wrong rows; the message names the first one, counted from 0.

    >>> refuse_rows(np.array([False, True, True]), "age has no value", "fill or remove them")
    Traceback (most recent call last):
    flray.errors.ExperimentError: age has no value in row 1 (2 such rows); fill or remove them
    """
    if is_wrong.any():
        num = counted(int(is_wrong.sum()), "such row")
        raise ExperimentError(f"{what} in row {int(is_wrong.argmax())} ({num}); {advice}")


def refuse_values(array: NDArray[Any], is_wrong: NDArray[np.bool_], what: str, advice: str) -> None:
    """Refuse an array (N, ...) with wrong values; names the first one as well as its row."""
    if is_wrong.any():
        wrong_rows: NDArray[np.bool_] = np.any(is_wrong.reshape(len(array), -1), axis=1)
        refuse_rows(wrong_rows, f"{what}, got {array[is_wrong][0]}", advice)


def check_finite(what: str, array: NDArray[Any]) -> None:
    """Refuse an array (N, ...) of examples with NaN or infinity.

    >>> check_finite("inputs", np.array([[1.0, 2.0], [3.0, np.inf]]))
    Traceback (most recent call last):
    flray.errors.ExperimentError: inputs must be finite numbers, got inf in row 1 (1 such row); ...
    """
    advice = "correct or remove them"
    refuse_values(array, ~np.isfinite(array), f"{what} must be finite numbers", advice)
