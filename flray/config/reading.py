"""YAML as this project reads it: in files and in `key=value` alike, true and false are booleans.

YAML 1.1, which PyYAML follows, reads the words on, off, yes, no, y and n as booleans too, so that
`on: relation` would set the key `True`. As in YAML 1.2 they are text here. A key given twice, a
file with too many values and one that is nested too deeply are errors.
"""

import re
from pathlib import Path
from typing import Any, cast

import yaml

from flray.config.shipped import find_file
from flray.errors import ExperimentError
from flray.values import copied, shown, texts_in

Plain = dict[str, Any]  # Any: YAML
YAML_FILES = (".yaml", ".yml")

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_REPLACED = (_BOOL, _FLOAT, "tag:yaml.org,2002:timestamp")  # a date is text
_MERGE = "<<"
MOST_VALUES, MOST_DEPTH = 100_000, 30  # values per file; nesting of lists and mappings

_RESOLVER = re.compile(r"\$\{[^}]*(:|\$\{)")  # `${name:...}`, or a name that is composed
_TRUE_OR_FALSE = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
# PyYAML's own does not know 1e-3, which has no point.
_NUMBER = re.compile(
    r"""(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with unique keys and the scalars of YAML 1.2."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # Any: a name, or None
        """Refuse a key that is given twice; PyYAML would take the last."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != _MERGE:
                if key.value in seen:
                    problem = f"the key {shown(key.value)} is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return node


# Of this class alone: other readers of the process keep PyYAML's rules.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _REPLACED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, _TRUE_OR_FALSE, list("tTfF"))
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))


def parse_yaml(text: str) -> Any:  # Any: YAML
    """The value that a text describes.

    Keys are text; values are text, numbers, true, false, null, lists and mappings. Nothing is
    executed: tags of Python objects are refused.

    Raises:
        yaml.YAMLError: if it is not YAML as above; the message is one line with the position.

    >>> parse_yaml("{on: relation, keep: yes, shuffle: True, lr: 1e-3}")
    {'on': 'relation', 'keep': 'yes', 'shuffle': True, 'lr': 0.001}
    """
    try:
        value = yaml.load(text, _Loader)
        size, depth = _measure(value, {})
        if size > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES} values")
        if depth > MOST_DEPTH:
            raise RecursionError
    except RecursionError as error:
        message = f"more than {MOST_DEPTH} lists or mappings inside each other"
        raise yaml.YAMLError(message) from error
    except (ValueError, OverflowError, AttributeError, TypeError, LookupError) as error:
        raise yaml.YAMLError(str(error)) from error  # a wrong tag, as in `!!int x`
    except yaml.MarkedYAMLError as error:
        raise yaml.YAMLError(_on_one_line(error)) from error
    return value


def _on_one_line(error: yaml.MarkedYAMLError) -> str:
    """The problem that PyYAML reports and its position, without the lines that it quotes."""
    mark = error.problem_mark or error.context_mark
    position = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    problem = error.problem or error.context or "it cannot be read"
    return f"{position}{problem}" + ("; indent with spaces, not tabs" if "\\t" in problem else "")


def read_text(path: Path) -> str:
    """The text of a file; raises `yaml.YAMLError` if it holds none."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise yaml.YAMLError(str(error)) from error


def read_mapping(path: Path, where: str) -> Plain:
    """The keys and values of a YAML file, or of a shipped one by its name.

    `${key}` stands for another key of the file. OmegaConf could also call functions, and write
    secrets of the environment into a run directory: a colon or `${` inside `${...}` is refused.

    Args:
        path: of the file, relative to the current folder.
        where: what the file is, for messages.

    Raises:
        ExperimentError: if there is no such file, or if it is not a YAML mapping.
    """
    file = find_file(path)
    if file is None:
        raise ExperimentError(
            f"{where}: there is no file {path} (looked for from {Path.cwd()}); "
            "give a path relative to the current folder"
        )
    try:
        plain = parse_yaml(read_text(file))
        if not isinstance(plain, dict | None):
            raise ExperimentError(f"{where}: {path} must hold keys and values, got {shown(plain)}")
        return _resolved(plain or {})
    except yaml.YAMLError as error:
        raise ExperimentError(f"{where}: {path} is not valid YAML: {error}") from error


def _resolved(plain: Plain) -> Plain:
    """What `${key}` stands for in its place; no two values are one object."""
    texts = [text for text in texts_in(plain) if "${" in text]
    if not texts:
        return cast(Plain, copied(plain))  # what `*name` repeats is one object
    for text in filter(_RESOLVER.search, texts):
        raise yaml.YAMLError(f"${{...}} refers to another key of the file, got {shown(text)}")
    from omegaconf import OmegaConf  # imported here, because few files need it
    from omegaconf.errors import OmegaConfBaseException

    try:
        return cast(Plain, OmegaConf.to_container(OmegaConf.create(plain), resolve=True))
    except OmegaConfBaseException as error:
        raise yaml.YAMLError(str(error)) from error


def _measure(value: Any, measured: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The number of values, and the depth to which lists and mappings are nested.

    What an alias repeats counts each time it is used: a few lines of aliases of aliases stand for
    billions of values, which copying would write out.
    """
    if id(value) in measured:
        return measured[id(value)]
    if not isinstance(value, list | dict):
        if not isinstance(value, str | int | float | None):
            raise ValueError(
                f"text, a number, true, false or null was expected, got {shown(value)}"
            )
        return 1, 0
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"keys are text, got {shown(key)}; write it in quotes")
    measured[id(value)] = MOST_VALUES, 0  # counted as too many if the value contains itself
    children = value.values() if isinstance(value, dict) else value
    measures = [_measure(child, measured) for child in children]
    sizes, depths = [size for size, _ in measures], [depth for _, depth in measures]
    measured[id(value)] = 1 + sum(sizes), 1 + max(depths, default=0)
    return measured[id(value)]
