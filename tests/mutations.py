"""Bad input: random trees of keys and values, changed experiments, damaged bytes."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[Any, ...]

NAMES = (
    *(
        "",
        ".",
        "..",
        ":",
        "..:x",
        "a:",
        ":b",
        "builtins:dict",
        "ray:init",
        "flray:run",
        "os:system",
    ),
    *(
        "os.path:join",
        "__main__:x",
        "flray.models:MODELS",
        "torch.nn:Linear",
        "fedavg",
        "flt",
        "name",
    ),
    *("digits", "synthetic", "iid", "pathological", "mlp200", "hierarchical", "kmeans", "module"),
    *("${seed}", "${", "${nowhere.at.all}", "???", "x.yaml", "/dev/null", "a\0b", "é\ud7ff", "1e3"),
    *("auto", "cuda:99", "cuda:x", "per_client", "null", "=", "a=b", "{", "[red]", "[/]", "%s"),
)
NUMBERS = (0, 1, 2, 3, 7, -1, 10**12, -(10**12), 2**63, 10**30, 10**400)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))

# Quantities that are valid and take for ever are left out: rounds of a billion epochs are no fault.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(NAMES),
    st.text(max_size=5),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), inner, max_size=3),
        st.dictionaries(st.one_of(st.integers(), st.none(), st.booleans()), inner, max_size=2),
    ),
    max_leaves=5,
)


def paths(tree: Any, prefix: Path = ()) -> Iterator[Path]:
    """The places of a tree, inner ones too.

    >>> list(paths({"a": [1, {"b": 2}]}))
    [('a',), ('a', 0), ('a', 1), ('a', 1, 'b')]
    """
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in children:
        yield (*prefix, key)
        if isinstance(child, dict | list):
            yield from paths(child, (*prefix, key))


def parent_of(tree: Any, path: Path) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


@st.composite
def mutated(draw: st.DrawFn, tree: dict[str, Any], most: int = 3) -> dict[str, Any]:
    """A copy of a tree in which up to `most` things were changed."""
    changed = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        places = list(paths(changed))
        if not places:
            break
        path = draw(st.sampled_from(places))
        parent, key = parent_of(changed, path), path[-1]
        how = draw(st.sampled_from(["value", "value", "value", "swap", "delete", "add", "rename"]))
        if how == "value":
            parent[key] = draw(values)
        elif how == "swap":
            other = draw(st.sampled_from(places))
            parent[key] = copy.deepcopy(parent_of(changed, other)[other[-1]])
        elif how == "delete":
            del parent[key]
        elif isinstance(parent, dict):
            new = draw(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)))
            parent[new] = draw(values) if how == "add" else parent.pop(key)
    return changed


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content cut off, with flipped bits, or with a stretch overwritten."""
    how = draw(st.sampled_from(["cut", "flip", "overwrite", "empty"]))
    if how == "empty" or not content:
        return b""
    place = draw(st.integers(0, len(content) - 1))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return (
            content[:place]
            + bytes([content[place] ^ draw(st.integers(1, 255))])
            + content[place + 1 :]
        )
    junk = draw(st.binary(min_size=1, max_size=20))
    return content[:place] + junk + content[place + len(junk) :]
