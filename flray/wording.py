"""Words of messages: numbers with their nouns, names that were misspelt."""

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """The number with its noun.

    >>> counted(1, "row"), counted(1200, "client step"), counted(2, "prefix", "prefixes")
    ('1 row', '1,200 client steps', '2 prefixes')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that a misspelt one resembles most; None: none is close."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def suggestion(name: str, names: Iterable[str]) -> str:
    """ " (did you mean 'lr'?)" if one of the names is close, else nothing.

    >>> suggestion("flch", ["fedavg", "flhc"]), suggestion("x", ["fedavg", "flhc"])
    (" (did you mean 'flhc'?)", '')
    """
    close = closest(name, names)
    return f" (did you mean {close!r}?)" if close else ""


def capitalised(text: str) -> str:
    """A text with a capital first letter, as titles have it.

    >>> capitalised("test MAE")
    'Test MAE'
    """
    return text[:1].upper() + text[1:]
