"""Labels of settings in tables and figures: short names of keys, readable values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flray.config.deciding import leaves
from flray.reports.configuration import setting_text


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The name of each dotted key: its end, as long as it takes to distinguish the keys.

    A trailing `.name` is dropped. Keys that end alike are named by their last two parts, whether or
    not that distinguishes them.

    >>> short_names(["algorithm.clustering.distance.name", "train.lr", "pretrain.lr"]).values()
    dict_values(['distance', 'train.lr', 'pretrain.lr'])
    """
    parts = {key: key.removesuffix(".name").split(".") for key in keys}
    ends = [path[-1] for path in parts.values()]
    return {
        key: path[-1] if ends.count(path[-1]) == 1 else ".".join(path[-2:])
        for key, path in parts.items()
    }


def component_name(value: Any) -> str:  # Any: YAML
    """The name of a component that is given by its name or as a mapping.

    >>> component_name({"name": "fedprox", "mu": 1}), component_name("cfl")
    ('fedprox', 'cfl')
    """
    return str(value.get("name")) if isinstance(value, dict) else str(value)


def readable_settings(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """A column of rows.parquet for people: numbers if all of its values are, else texts.

    Mappings and lists are recorded as JSON; mappings become `component_labels`. Missing values stay
    missing.

    >>> readable_settings(pd.Series(["0.1", "10"])).tolist()
    [0.1, 10.0]
    >>> readable_settings(pd.Series(["cfl", '{"name": "flt", "k": 4}'])).tolist()
    ['cfl', 'flt']
    """
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        return column
    text = column.map(setting_text, na_action="ignore").astype(object)
    distinct = text.dropna().unique().tolist()
    if any(value.startswith("{") for value in distinct):
        labels = dict(zip(distinct, component_labels(distinct), strict=True))
        text = text.map(labels, na_action="ignore")
    numbers = pd.to_numeric(text, errors="coerce")
    is_numeric = numbers.notna().sum() == text.notna().sum() > 0
    return numbers if is_numeric else text.where(text.notna(), None)


def component_labels(texts: Sequence[str]) -> list[str]:
    """The label of each component, given by name or as a mapping in JSON.

    It is the name, and in brackets the keys that other components of this name do not have or have
    with another value.

    >>> component_labels(['{"name": "fedprox", "mu": 1}', '{"name": "fedprox", "mu": 2}', "cfl"])
    ['fedprox (mu 1)', 'fedprox (mu 2)', 'cfl']
    >>> component_labels(['{"epochs": 5}', '{"epochs": 5, "lr": 0.01}'])
    ['{"epochs": 5}', '(lr 0.01)']
    """
    components = [_fields(text) for text in texts]
    names = short_names(list(dict.fromkeys(key for fields in components for key in fields)))
    labels = []
    for text, fields in zip(texts, components, strict=True):
        alike = [other for other in components if other.get("name") == fields.get("name")]
        differing = [k for k in fields if any(k not in o or o[k] != fields[k] for o in alike)]
        settings = ", ".join(f"{names[key]} {fields[key]}" for key in differing)
        name = str(fields.get("name", ""))  # settings of no component, such as fine_tune, have none
        labels.append(" ".join(filter(None, (name, f"({settings})" if settings else ""))) or text)
    return labels


def _fields(text: str) -> Mapping[str, Any]:  # Any: JSON
    """The keys and values of a component; any other text is its name."""
    try:
        content = json.loads(text)
    except ValueError:  # a name, or a message that begins with a bracket
        content = text
    return leaves(content) if isinstance(content, dict) else {"name": text}
