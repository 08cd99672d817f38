"""Numbers as the page writes them; files hold fractions, readers get percent."""

import math

from flray.report.page_elements import MISSING

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_MINUTE, _HOUR = 60, 3600


def known(value: object) -> float | None:
    """A number that is there and finite.

    >>> known(1), known(None), known(float("nan")), known("x")
    (1.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def percent(value: object, decimals: int = 2) -> str:
    """
    >>> percent(0.9489), percent(None)
    ('94.89 %', '–')
    """
    number = known(value)
    return MISSING if number is None else f"{100 * number:.{decimals}f} %"


def fixed(value: object, decimals: int = 2) -> str:
    number = known(value)
    return MISSING if number is None else f"{number:.{decimals}f}"


def count(value: object) -> str:
    """
    >>> count(3990)
    '3,990'
    """
    number = known(value)
    return MISSING if number is None else f"{number:,.0f}"


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit in which so many bytes are a number that can be read.

    >>> byte_unit(2.5e6)
    (1000000.0, 'MB')
    """
    return next(((size, name) for size, name in _UNITS if largest >= size), (1.0, "bytes"))


def megabytes(value: object) -> str:
    number = known(value)
    return MISSING if number is None else f"{number / 1e6:,.1f} MB"


def duration(value: object) -> str:
    """
    >>> duration(6.59), duration(200), duration(7260)
    ('6.6 s', '3 min 20 s', '2 h 1 min')
    """
    number = known(value)
    if number is None:
        return MISSING
    if number < _MINUTE:
        return f"{number:.1f} s"
    if number < _HOUR:
        return f"{number // _MINUTE:.0f} min {number % _MINUTE:.0f} s"
    return f"{number // _HOUR:.0f} h {number % _HOUR // _MINUTE:.0f} min"
