"""YAML as this project reads it: in files and in `key=value` alike, true and false are booleans.

YAML 1.1, which PyYAML follows, reads the words on, off, yes, no, y and n as booleans too, so that
`on: relation` would set the key `True`. As in YAML 1.2 they are text here.
"""

import re
from typing import IO, Any

import yaml

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_REPLACED = (_BOOL, _FLOAT, "tag:yaml.org,2002:timestamp")  # a date is text
_MERGE = "<<"

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
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # Any: a name, or None
        """Refuse a key that is given twice; PyYAML would take the last."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != _MERGE:
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
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


def parse_yaml(text: str | IO[str]) -> Any:  # Any: YAML
    """The value that a text or an open file describes; raises `yaml.YAMLError` if it is not YAML.

    >>> parse_yaml("{on: relation, keep: yes, shuffle: True, lr: 1e-3}")
    {'on': 'relation', 'keep': 'yes', 'shuffle': True, 'lr': 0.001}
    """
    return yaml.load(text, _Loader)
