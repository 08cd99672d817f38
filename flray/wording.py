"""Words of messages that depend on numbers."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """The number with its noun.

    >>> counted(1, "row"), counted(1200, "client step"), counted(2, "prefix", "prefixes")
    ('1 row', '1,200 client steps', '2 prefixes')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
