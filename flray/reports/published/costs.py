"""What it takes to run a table: client SGD steps, from costs.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    steps: int | None  # client SGD steps of the whole table, None where the note says why
    note: str


def cost_of(raw: Mapping[str, Any], entries: Mapping[str, Any]) -> Cost:  # Any: YAML
    """The cost of a table.

    Args:
        raw: the content of its file; `cost` names an entry of costs.yaml and the total in it, which
            is a number or one for each dataset or model.
        entries: those of costs.yaml.
    """
    said = raw.get("cost", {})
    if "total" not in said:
        return Cost(None, said.get("note", ""))
    total = entries[said["entry"]][said["total"]]
    return Cost(sum(total.values()) if isinstance(total, dict) else total, said.get("note", ""))
