"""The keys of an experiment, read from the source of the classes that the loader binds them to.

The annotations, defaults and comments of fields are the reference. They are parsed, not imported:
torch and Lightning take seconds to import, and `flray list` and `flray keys` answer at once.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from flray.values import FROM_DATASET

_PACKAGE = Path(__file__).parents[1]
_WORDS = {
    **{"int": "whole number", "float": "number", "bool": "true, false", "str": "text"},
    **{"Seed": "whole number", "Unbounded": "number or .inf"},
}
_YAML = {"None": "null", "True": "true", "False": "false", "()": "[]"}
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
    "tracking": "flray.config.tracking:TRACKING",
    "search": "flray.sweeps.space:SEARCHES",
    "scheduler": "flray.sweeps.space:SCHEDULERS",
}
COMPONENTS = ("dataset", "split", "model", "algorithm")
STAGES = ("signature", "embed", "distance", "relate", "partition")
SETTINGS = "flray.config.experiment:Settings"
ENCODER = "flray.clustering.encoder:Encoder"
OPTIONS = "flray.sweeps.space:Options"  # of a space
SEEDS = "seeds"

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
    """One key of the YAML."""

    name: str  # dotted
    values: str  # its type, or the values that are allowed
    default: str | None  # as YAML has it; None: the key must be given
    note: str  # the comment of its field
    below: str | None = None  # the class of the keys below it, where it is a mapping
    kind: str | None = None  # the kind of component it names


@dataclass(frozen=True)
class Described:
    """A component: its name, what it is, and its keys."""

    name: str
    purpose: str
    keys: tuple[Key, ...]


def components(kind: str) -> list[Described]:
    """Every registered component of a kind, by name."""
    registry = _registry(REGISTRIES[kind])
    modules = [target.partition(":")[0] for target in registry.values()]
    return [
        Described(
            name, _purpose(target, modules.count(target.partition(":")[0]) == 1), keys(target)
        )
        for name, target in sorted(registry.items())
    ]


def names(kind: str) -> list[str]:
    """The registered names of a kind of component."""
    return sorted(_registry(REGISTRIES[kind]))


def experiment_keys() -> list[Key]:
    """The keys of every experiment, whatever its components; those of mappings follow them."""
    note = "Name, or a mapping with `name` and the keys of that component"
    named = [Key(kind, _component_values(kind), None, note, kind=kind) for kind in COMPONENTS]
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
    """The keys of experiments with any registered component; one with several defaults repeats."""
    found = [Key(SEEDS, "whole number", "1", "Number of runs, with seeds from `seed` on")]
    found += experiment_keys()
    prefixes = {kind: kind for kind in COMPONENTS}
    prefixes |= {stage: f"algorithm.clustering.{stage}" for stage in STAGES}
    for kind, prefix in prefixes.items():
        inner = [key for described in components(kind) for key in component_keys(described)]
        found += [replace(key, name=f"{prefix}.{key.name}") for key in inner]
    return tuple(dict.fromkeys(found))


def component_keys(described: Described) -> list[Key]:
    """The keys of a component, with those of its mappings."""
    return list(_with_those_below(described.keys))


def _with_those_below(found: Sequence[Key]) -> Iterator[Key]:
    for key in found:
        yield key
        if key.below is not None:
            inner = [replace(k, name=f"{key.name}.{k.name}") for k in keys(key.below)]
            yield from _with_those_below(inner)


@cache
def keys(target: str) -> tuple[Key, ...]:
    """The keys of a class, `package.module:Name`, those of the classes it extends included.

    A field that only changes a default, without a comment, keeps the comment of its base class.
    """
    source, node = _class(target)
    by_name: dict[str, Key] = {}
    for base in node.bases:
        parent = source.resolve(ast.unparse(base))
        if parent is not None:
            by_name |= {key.name: key for key in keys(parent)}
    fields = _of_fields(source, node) if _is_dataclass(node) else _of_init(source, node)
    for key in fields:
        inherited = by_name[key.name].note if key.name in by_name else ""
        by_name[key.name] = replace(key, note=key.note or inherited)
    return tuple(by_name.values())


def _of_fields(source: "_Source", node: ast.ClassDef) -> Iterator[Key]:
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
            continue
        if isinstance(field.target, ast.Name):
            yield _key(source, field.target.id, field.annotation, field.value, field)


def _of_init(source: "_Source", node: ast.ClassDef) -> Iterator[Key]:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            none: list[ast.expr | None] = [None]
            defaults = none * (len(given.args) - len(given.defaults)) + [*given.defaults]
            pairs = [*zip(given.args, defaults, strict=True)]
            pairs += [*zip(given.kwonlyargs, given.kw_defaults, strict=True)]
            for argument, default in pairs:
                if argument.arg not in ("self", *FROM_DATASET) and argument.annotation is not None:
                    yield _key(source, argument.arg, argument.annotation, default, argument)


def _key(
    source: "_Source",
    name: str,
    hint: ast.expr,
    value: ast.expr | None,
    at: ast.AnnAssign | ast.arg,
) -> Key:
    values, below, kind = _values(source, hint)
    default = None if value is None else _default(source, value, kind)
    if below is not None and default is not None and default != "null":
        default = "see below"
        factory = source.resolve(_factory(value)) if value is not None else None
        below = factory or below
    return Key(name, values, default, source.comment(at).replace("None:", "null:"), below, kind)


def _values(source: "_Source", hint: ast.expr) -> tuple[str, str | None, str | None]:
    """What a key accepts, the class of the keys below it, and the kind of component it names."""
    if isinstance(hint, ast.BinOp):  # X | None
        sides = [_values(source, side) for side in (hint.left, hint.right)]
        below = next((below for _, below, _ in sides if below), None)
        return " or ".join(text for text, _, _ in sides), below, None
    if isinstance(hint, ast.Constant):
        return _YAML.get(str(hint.value), str(hint.value)), None, None
    if isinstance(hint, ast.Subscript):
        return _subscripted(source, hint)
    text = ast.unparse(hint)
    if text in _WORDS:
        return _WORDS[text], None, None
    alias = source.alias(text)
    if alias is not None:
        return _values(*alias)
    target = source.resolve(text)
    return ("mapping" if target else "any value"), target, None


def _subscripted(source: "_Source", hint: ast.Subscript) -> tuple[str, str | None, str | None]:
    outer = ast.unparse(hint.value)
    inner = hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]
    if outer == "Literal":
        return ", ".join(str(ast.literal_eval(each)) for each in inner), None, None
    if outer == "Annotated":
        kind = str(ast.literal_eval(inner[1]))
        return _component_values(kind), None, kind
    item, below, _ = _values(source, inner[0])
    if below is not None:
        inside = ", ".join(key.name for key in keys(below))
        return f"list of mappings with {inside}", None, None
    return f"list of {item}s" if item in _WORDS.values() else f"list of: {item}", None, None


def _component_values(kind: str) -> str:
    return ", ".join(names(kind))


def _default(source: "_Source", value: ast.expr, kind: str | None) -> str | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {word.arg: word.value for word in value.keywords}
        if "default" in given:
            return _text(ast.unparse(given["default"]))
        made = given.get("default_factory")
        if isinstance(made, ast.Lambda) and isinstance(made.body, ast.Call):
            call = made.body
            fields = [f"{w.arg}: {_text(ast.unparse(w.value))}" for w in call.keywords]
            name = _registered(source, ast.unparse(call.func), kind)
            return f"{{name: {name}, {', '.join(fields)}}}" if fields else name
        return None if made is None else _registered(source, ast.unparse(made), kind)
    constant = source.alias(ast.unparse(value))
    text = _text(ast.unparse(constant[1] if constant else value))
    return "all" if text.startswith("get_args(") else text


def _factory(value: ast.expr) -> str:
    if isinstance(value, ast.Call) and value.keywords:
        return ast.unparse(value.keywords[0].value)
    return ""


def _registered(source: "_Source", name: str, kind: str | None) -> str:
    """The registered name of a class of a kind."""
    target = source.resolve(name)
    found = _registry(REGISTRIES[kind]) if kind else {}
    return next((known for known, each in found.items() if each == target), name)


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


def _purpose(target: str, alone: bool) -> str:
    """What the file of a class says it is; where a file holds several, what the class says."""
    source, node = _class(target)
    own, module = ast.get_docstring(node), ast.get_docstring(source.tree)
    text = module if module and (alone or not own) else own
    first = (text or "").split("\n\n")[0].replace("\n", " ")
    return _SENTENCE.split(first)[0].rstrip(".")


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


@cache
def _registry(target: str) -> dict[str, str]:
    module, _, name = target.partition(":")
    source = _source(module)
    value = source.assigned[name]
    assert isinstance(value, ast.Dict)
    found = {}
    for key, each in zip(value.keys, value.values, strict=True):
        resolved = source.resolve(ast.unparse(each))
        assert isinstance(key, ast.Constant)
        assert resolved is not None
        found[str(key.value)] = resolved
    return found


@cache
def _class(target: str) -> tuple["_Source", ast.ClassDef]:
    module, _, name = target.partition(":")
    source = _source(module)
    return source, source.classes[name]


@cache
def _source(module: str) -> "_Source":
    path = _PACKAGE.parent / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    return _Source(module, text, ast.parse(text))


@dataclass(frozen=True, eq=False)
class _Source:
    """A file of the package, parsed."""

    module: str
    text: str
    tree: ast.Module

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def assigned(self) -> dict[str, ast.expr]:
        found: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found[ast.unparse(node.target)] = node.value
        return found

    @cached_property
    def imported(self) -> dict[str, str]:
        """Names that come from files of the package, by what they are called here."""
        return {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flray")
            for alias in node.names
        }

    @cached_property
    def _comments(self) -> dict[int, tuple[int, str]]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        found = (t for t in tokens if t.type == tokenize.COMMENT)
        return {t.start[0]: (t.start[1], t.string.lstrip("# ").strip()) for t in found}

    def resolve(self, name: str) -> str | None:
        """The class of the package that a name stands for here, as `module:Name`."""
        if name in self.classes:
            return f"{self.module}:{name}"
        target = self.imported.get(name)
        if target is None:
            return None
        module, _, own = target.partition(":")
        return _source(module).resolve(own)

    def alias(self, name: str) -> tuple["_Source", ast.expr] | None:
        """What a name that is assigned, here or where it was imported from, stands for."""
        if name in self.assigned:
            return self, self.assigned[name]
        target = self.imported.get(name)
        if target is None:
            return None
        module, _, own = target.partition(":")
        return _source(module).alias(own)

    def comment(self, at: ast.AnnAssign | ast.arg) -> str:
        """The comment at the end of a field's line, or those on lines of their own above it."""
        for line in (at.end_lineno or at.lineno, at.lineno):
            if line in self._comments:
                return self._comments[line][1]
        lines: list[str] = []
        line = at.lineno - 1
        while line in self._comments and self._comments[line][0] == at.col_offset:
            lines.insert(0, self._comments[line][1])
            line -= 1
        text = " ".join(lines)
        return "" if text.startswith("Any:") else text
