"""Values of keys: which numbers are allowed beside the usual ones, and how messages show them."""

import hashlib
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

UNBOUNDED = "unbounded"
Unbounded = Annotated[float, UNBOUNDED]  # a number that may be infinite, such as a threshold
Seed = Annotated[int, UNBOUNDED]  # a whole number that counts nothing, so that any will do
FROM_IMAGES = ("image_shape", "num_classes")  # parameters of models that no YAML names
FROM_DATASET = (*FROM_IMAGES, "input_shape", "num_outputs")
LARGEST_COUNT = 10**10  # of rounds, clients, examples, units: more than any machine holds
LARGEST_WHOLE = 2**63 - 1  # largest whole number that an array holds
ROUNDING = 1e-12  # relative difference of numbers that are equal but for their last digits
LONGEST_NAME = 120  # bytes of a file whose name is made of others; file systems take 255 bytes

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """A value as messages repeat it: as Python writes it, cut where it is long.

    >>> shown("l2"), len(shown("x" * 100_000))
    ("'l2'", 80)
    """
    return _short.repr(value)


def texts_in(plain: object) -> Iterator[str]:
    """Every text among the values of nested mappings and lists.

    >>> list(texts_in({"dataset": "digits", "algorithm": [{"name": "flhc"}, 3]}))
    ['digits', 'flhc']
    """
    if isinstance(plain, dict | list):
        for child in plain.values() if isinstance(plain, dict) else plain:
            yield from texts_in(child)
    elif isinstance(plain, str):
        yield plain


def copied(plain: Any) -> Any:  # Any: YAML
    """Mappings and lists anew, each of its own; objects from Python stay the same objects.

    >>> shared = {"lr": 0.1}
    >>> first, second = copied([shared, shared])
    >>> first is second
    False
    """
    if isinstance(plain, dict):
        return {key: copied(value) for key, value in plain.items()}
    return [copied(value) for value in plain] if isinstance(plain, list) else plain


def file_name(text: str) -> str:
    """A text as far as a name of a file can hold it: letters, digits and -+=._, at most 120 bytes.

    A long text ends in its hash, and one without letters and digits is its hash.

    >>> file_name("flhc/mnist seed=0"), len(file_name("x" * 1000))
    ('flhc_mnist_seed=0', 120)
    """
    name = re.sub(r"[^\w.=+-]+", "_", text).strip("_")
    if name and len(name.encode()) <= LONGEST_NAME:
        return name
    begin = name.encode()[: LONGEST_NAME // 2].decode(errors="ignore")
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return (f"{begin}-{digest}" if begin else digest).encode()[:LONGEST_NAME].decode()


def highest_equal(number: float) -> float:
    """The largest number that counts as equal to one >= 0, since last digits depend on the way.

    >>> 1 - 0.7 <= 0.3, 1 - 0.7 <= highest_equal(0.3)
    (False, True)
    """
    return number * (1 + ROUNDING)


def require_at_least(component: object, **least: float) -> None:
    """Refuse fields of a component that are smaller than their least value, or not a number.

    None, and words such as auto, are allowed where a field may be one.

    >>> from types import SimpleNamespace
    >>> require_at_least(SimpleNamespace(mu=-1.0, rounds="auto"), rounds=0, mu=0)
    Traceback (most recent call last):
    ValueError: mu must be >= 0, got -1.0
    """
    for name, smallest in least.items():
        value = getattr(component, name)
        if isinstance(value, int | float) and not value >= smallest:
            or_null = " or null" if getattr(type(component), name, value) is None else ""
            raise ValueError(f"{name} must be >= {smallest}{or_null}, got {value}")


def require_above_zero(component: object, *names: str) -> None:
    """Refuse fields of a component that are not above 0.

    >>> from types import SimpleNamespace
    >>> require_above_zero(SimpleNamespace(lr=0.0), "lr")
    Traceback (most recent call last):
    ValueError: lr must be > 0, got 0.0
    """
    for name in names:
        if not getattr(component, name) > 0:
            raise ValueError(f"{name} must be > 0, got {getattr(component, name)}")


def require_share(component: object, *names: str) -> None:
    """Refuse fields of a component that are not in [0, 1).

    >>> from types import SimpleNamespace
    >>> require_share(SimpleNamespace(validation=2.0), "validation")
    Traceback (most recent call last):
    ValueError: validation must be in [0, 1), got 2.0
    """
    for name in names:
        if not 0 <= getattr(component, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(component, name)}")


def require_sizes(**sizes: int | Sequence[int]) -> None:
    """Refuse sizes of layers below 1, which torch takes and then fails to train.

    >>> require_sizes(channels=32, hidden=(64, 0))
    Traceback (most recent call last):
    ValueError: hidden must be >= 1, got (64, 0)
    """
    for name, size in sizes.items():
        if min([size] if isinstance(size, int) else size, default=1) < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
