"""The keys of an experiment, read from the source of the classes that the loader binds them to.

The annotations, defaults and comments of fields are the reference. They are parsed, not imported
(`config/source.py`), so that `flray list` and `flray keys` answer at once.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from flray.config.source import Definition, Source, definition
from flray.values import FROM_DATASET

_WORDS = {
    **{"int": "whole number", "float": "number", "bool": "true, false", "str": "text"},
    **{"Seed": "whole number", "Unbounded": "number or .inf"},
}
_YAML = {"None": "null", "True": "true", "False": "false", "()": "[]", "''": '""'}
_SENTENCE = re.compile(r"(?<!al)(?<!i\.e)\. (?!\d)")  # not after an abbreviation: Alg. 1 l. 8

# The registries of components, by what a user calls their entries.
REGISTRIES: Mapping[str, str] = {
    "dataset": "flray.data:DATASETS",
    "split": "flray.data:SPLITS",
    "model": "flray.models:MODELS",
    "algorithm": "flray.algorithms:ALGORITHMS",
    "signature": "flray.clustering:SIGNATURES",
    "embed": "flray.clustering:EMBEDS",
    "distance": "flray.clustering:DISTANCES",
    "relate": "flray.clustering:RELATIONS",
    "partition": "flray.clustering:PARTITIONS",
    "optimizer": "flray.models.server_optimizers:OPTIMIZERS",
    "score": "flray.client.scores:SCORES",
    "tracking": "flray.config.tracking:TRACKING",
    "search": "flray.sweeps.space:SEARCHES",
    "scheduler": "flray.sweeps.space:SCHEDULERS",
}
COMPONENTS = ("dataset", "split", "model", "algorithm")
STAGES = ("signature", "embed", "distance", "relate", "partition")
SETTINGS = "flray.config.experiment:Settings"
ENCODER = "flray.clustering.encoder:Encoder"
OPTIONS = "flray.sweeps.space:Options"  # class of the options of a space
SEEDS = "seeds"
SEE_BELOW = "see below"  # default of a mapping

# What other tools call a key, and short names that several sections have.
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("lr", "learning_rate", "step_size", "eta"), "train.lr"),
    **dict.fromkeys(("epochs", "num_epochs", "local_epochs"), "train.epochs"),
    **dict.fromkeys(("batch_size", "batch", "bs"), "train.batch_size"),
    **dict.fromkeys(("optim", "opt"), "train.optimizer"),
    **dict.fromkeys(("clients", "num_clients", "n_clients", "num_users"), "split.clients"),
    **dict.fromkeys(("num_rounds", "n_rounds", "comm_rounds", "global_rounds"), "rounds"),
    **dict.fromkeys(("fraction", "frac", "client_fraction", "sample_rate"), "participation"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("data", "data_set"), "dataset"),
    **dict.fromkeys(("method", "algo"), "algorithm"),
    **dict.fromkeys(("network", "net"), "model"),
    **dict.fromkeys(("gpus", "num_gpus"), "execution.actors.num_gpus"),
    **dict.fromkeys(("cpus", "num_cpus"), "execution.actors.num_cpus"),
    **dict.fromkeys(("actors", "num_actors"), "execution.actors.count"),
}
# Keys that have another name now: the old ones are refused with the new one named.
RENAMED: Mapping[str, str] = dict.fromkeys(("pretrain_rounds", "rounds_joint"), "rounds_before")


@dataclass(frozen=True)
class Key:
    """One key of the YAML, as `flray keys` shows it."""

    name: str  # dotted
    values: str  # its type, or the values that are allowed
    default: str | None  # as YAML has it; None: the key must be given
    note: str  # the comment of its field
    below: Definition | None = None  # the class of the keys below it, where it is a mapping


@dataclass(frozen=True)
class ComponentEntry:
    """A registered component as `flray list` shows it: its name, what it is, and its keys."""

    name: str
    purpose: str
    keys: tuple[Key, ...]


def components(kind: str) -> list[ComponentEntry]:
    """Every registered component of a kind, by name.

    >>> next(c for c in components("algorithm") if c.name == "fedprox").keys[0].name
    'mu'
    """
    registry = _registry(kind)
    modules = Counter(cls.source.module for cls in registry.values())
    return [
        ComponentEntry(name, _purpose(cls, modules[cls.source.module] == 1), _keys(cls))
        for name, cls in sorted(registry.items())
    ]


def names(kind: str) -> list[str]:
    """The registered names of a kind of component, one of REGISTRIES, sorted.

    >>> names("tracking")
    ['mlflow', 'none', 'tensorboard', 'wandb']
    """
    return sorted(_registry(kind))


def experiment_keys() -> list[Key]:
    """The keys of every experiment, whatever its components; those of mappings follow them.

    >>> lr = next(key for key in experiment_keys() if key.name == "train.lr")
    >>> lr.values, lr.default
    ('number or mapping', '0.01')
    """
    note = "Name, or a mapping with `name` and the keys of that component"
    named = [Key(kind, ", ".join(names(kind)), None, note) for kind in COMPONENTS]
    return [*named, *_with_those_below(keys(SETTINGS))]


def keys_meant(given: str) -> list[str]:
    """The dotted keys that a name may stand for: itself, a synonym, or keys of that last name.

    >>> keys_meant("learning_rate"), keys_meant("train.learning_rate"), keys_meant("linkage")
    (['train.lr'], ['train.lr'], ['algorithm.clustering.partition.linkage'])
    """
    names = [key.name for key in every_key()]
    if given in names:
        return [given]
    section, _, last = given.rpartition(".")
    if section and section not in names:
        return []
    below = [name for name in names if not section or name.startswith(f"{section}.")]
    if SYNONYMS.get(last) in below:
        return [SYNONYMS[last]]
    last = RENAMED.get(last, last)
    return list(dict.fromkeys(name for name in below if name.rpartition(".")[2] == last))


@cache
def every_key() -> tuple[Key, ...]:
    """The keys of experiments with any registered component, with their dotted names.

    A key that several components share, such as `algorithm.rounds_before`, is repeated for each
    different default.
    """
    every = [Key(SEEDS, "whole number", "1", "Number of runs, with seeds from `seed` on")]
    every += experiment_keys()
    prefixes = {kind: kind for kind in COMPONENTS}
    prefixes["optimizer"] = "aggregate.optimizer"
    prefixes |= {stage: f"algorithm.clustering.{stage}" for stage in STAGES}
    for kind, prefix in prefixes.items():
        inner = [key for entry in components(kind) for key in component_keys(entry)]
        every += [replace(key, name=f"{prefix}.{key.name}") for key in inner]
    return tuple(dict.fromkeys(every))


def component_keys(component: ComponentEntry) -> list[Key]:
    """The keys of a component, each mapping followed by the keys below it with dotted names."""
    return list(_with_those_below(component.keys))


def _with_those_below(keys: Sequence[Key]) -> Iterator[Key]:
    """The keys, each mapping followed by the keys below it."""
    for key in keys:
        yield key
        if key.below is not None:
            inner = [replace(k, name=f"{key.name}.{k.name}") for k in _keys(key.below)]
            yield from _with_those_below(inner)


def keys(target: str) -> tuple[Key, ...]:
    """The keys of a class of the package, `package.module:Name`.

    >>> [key.name for key in keys("flray.models.mixing:Aggregation")]
    ['unheard', 'weights', 'server_lr', 'optimizer']
    """
    return _keys(definition(target))


@cache
def _keys(cls: Definition) -> tuple[Key, ...]:
    """The keys of a class, those of the classes it extends included.

    A field that only changes a default, without a comment, keeps the comment of its base class.
    """
    by_name: dict[str, Key] = {}
    for base in cls.class_node.bases:
        if parent := cls.source.find(ast.unparse(base)):
            by_name |= {key.name: key for key in _keys(parent)}
    for name, hint, default, node in _parameters(cls.class_node):
        accepted = _accepted(cls.source, hint)
        below = accepted.below
        text = None if default is None else _default(cls.source, default, accepted.kind)
        if below is not None and isinstance(default, ast.Call):
            factory = cls.source.find(ast.unparse(default.keywords[0].value))
            below, text = factory or below, SEE_BELOW
        inherited = by_name[name].note if name in by_name else ""
        note = cls.source.comment(node).replace("None:", "null:") or inherited
        by_name[name] = Key(name, accepted.text, text, note, below)
    return tuple(by_name.values())


def _parameters(
    cls: ast.ClassDef,
) -> Iterator[tuple[str, ast.expr, ast.expr | None, ast.AnnAssign | ast.arg]]:
    """Name, annotation, default and node of each field, or of each parameter of `__init__`."""
    is_dataclass = any("dataclass" in ast.unparse(node) for node in cls.decorator_list)
    for node in cls.body:
        if is_dataclass and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if "ClassVar" not in ast.unparse(node.annotation):
                yield node.target.id, node.annotation, node.value, node
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names = [*node.args.args, *node.args.kwonlyargs]
            num_required = len(node.args.args) - len(node.args.defaults)
            defaults = [*[None] * num_required, *node.args.defaults, *node.args.kw_defaults]
            for arg, default in zip(names, defaults, strict=True):
                if arg.annotation is not None and arg.arg not in FROM_DATASET:
                    yield arg.arg, arg.annotation, default, arg


@dataclass(frozen=True)
class _Accepted:
    """What an annotation accepts: in words, as keys below a mapping, as a kind of component."""

    text: str
    below: Definition | None = None
    kind: str | None = None


def _accepted(source: Source, hint: ast.expr) -> _Accepted:
    """What the annotation of a field accepts; names are looked up in the file of the field."""
    if isinstance(hint, ast.BinOp):  # X | None
        sides = [_accepted(source, side) for side in (hint.left, hint.right)]
        below = next((side.below for side in sides if side.below), None)
        return _Accepted(" or ".join(side.text for side in sides), below)
    if isinstance(hint, ast.Constant):
        return _Accepted(_YAML.get(str(hint.value), str(hint.value)))
    if isinstance(hint, ast.Subscript):
        return _subscripted(source, hint)
    if (name := ast.unparse(hint)) in _WORDS:
        return _Accepted(_WORDS[name])
    target = source.find(name)
    if target is None:
        return _Accepted("any value")
    if isinstance(target.node, ast.ClassDef):
        return _Accepted("mapping", target)
    return _accepted(target.source, target.node)


def _subscripted(source: Source, hint: ast.Subscript) -> _Accepted:
    """What `Literal[...]`, `Annotated[...]` or a sequence accepts."""
    outer = ast.unparse(hint.value)
    inner = hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]
    if outer == "Literal":
        return _Accepted(", ".join(str(ast.literal_eval(value)) for value in inner))
    if outer == "Mapping":
        return _Accepted("mapping")
    if outer == "Annotated":
        kind = str(ast.literal_eval(inner[1]))
        return _Accepted(", ".join(names(kind)), kind=kind)
    item = _accepted(source, inner[0])
    if item.below is not None:
        return _Accepted(f"list of mappings with {', '.join(k.name for k in _keys(item.below))}")
    is_word = item.text in _WORDS.values()
    return _Accepted(f"list of {item.text}s" if is_word else f"list of: {item.text}")


def _default(source: Source, value: ast.expr, kind: str | None) -> str | None:
    """A default as YAML has it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {word.arg: word.value for word in value.keywords}
        factory = given.get("default_factory")
        call = factory.body if isinstance(factory, ast.Lambda) else None
        if isinstance(call, ast.Call):
            fields = [f"{w.arg}: {_text(ast.unparse(w.value))}" for w in call.keywords]
            name = _registered(source, ast.unparse(call.func), kind)
            return f"{{name: {name}, {', '.join(fields)}}}" if fields else name
        return None if factory is None else _registered(source, ast.unparse(factory), kind)
    constant = source.find(ast.unparse(value))
    text = _text(ast.unparse(constant.node if constant else value))
    return "all" if text.startswith("get_args(") else text


def _registered(source: Source, name: str, kind: str | None) -> str:
    """The registered name of a class of a kind."""
    cls, registry = source.find(name), _registry(kind) if kind else {}
    return next((entry for entry, target in registry.items() if target == cls), name)


def _text(value: str) -> str:
    """A Python literal as YAML has it.

    >>> _text("None"), _text("'sgd'"), _text("(1, 2)"), _text("0.1")
    ('null', 'sgd', '[1, 2]', '0.1')
    """
    if value in _YAML:
        return _YAML[value]
    if value.startswith("("):
        return f"[{value[1:-1].rstrip(',')}]".replace("'", "")
    return value.strip("'\"")


def _purpose(cls: Definition, is_alone: bool) -> str:
    """First sentence of a file about its only class; where it has several, of the class."""
    of_class, of_file = ast.get_docstring(cls.class_node), ast.get_docstring(cls.source.tree)
    text = of_file if of_file and (is_alone or not of_class) else of_class
    first = (text or "").split("\n\n")[0].replace("\n", " ")
    return _SENTENCE.split(first)[0].rstrip(".")


@cache
def _registry(kind: str) -> dict[str, Definition]:
    """The registered classes of a kind by name."""
    table = definition(REGISTRIES[kind])
    assert isinstance(table.node, ast.Dict)
    pairs = zip(table.node.keys, table.node.values, strict=True)
    classes = {
        str(ast.literal_eval(key)): table.source.find(ast.unparse(cls)) for key, cls in pairs if key
    }
    return {name: cls for name, cls in classes.items() if cls}
