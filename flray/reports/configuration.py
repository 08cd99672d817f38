"""Values of a resolved configuration by dotted key. Imports nothing that delays a start."""

import json
from collections.abc import Mapping
from typing import Any


def value_at(config: Mapping[str, Any], key: str) -> Any:  # Any: YAML
    """The value of a dotted key, None without one; a component given by name alone has that `name`.

    A key whose value is null cannot be told from a key that is not there.

    >>> value_at({"split": {"name": "iid"}, "model": "mlp200"}, "model.name")
    'mlp200'
    >>> value_at({"split": {"name": "iid"}}, "split.clients.number") is None
    True
    """
    node: Any = config
    for part in key.split("."):
        if part == "name" and isinstance(node, str):
            return node
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def setting_text(value: object) -> str:
    """A value as YAML has it on one line.

    >>> setting_text(None), setting_text([1, 2]), setting_text("l2")
    ('null', '[1, 2]', 'l2')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
