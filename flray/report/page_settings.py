"""Settings of a run, how to run it again, and what it ran on."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

import yaml

from flray.records.run_directory import leaves
from flray.report.page_elements import (
    MISSING,
    Html,
    command,
    element,
    fold,
    joined,
    note,
    pairs,
    table,
)
from flray.report.page_folders import PageRun
from flray.report.runs import Plain

# Says where and how a run computes, not what.
_NO_MATTER = ("seed", "execution", "tracking")


def settings(run: PageRun) -> Html:
    """The resolved configuration as a table, and as the file it is in."""
    raw = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    return joined(
        [
            element("div", *_setting_tables(run.config), class_="settings"),
            fold("config.yaml", element("pre", element("code", raw))),
        ]
    )


def rerun(run: PageRun) -> Html:
    """The command that gives the same numbers, and how to see that it did."""
    file = shlex.quote(f"{run.folder}/config.yaml")
    if run.summary is None:
        told = "It goes on where it stopped."
        typed = f"flray run {file} --out {shlex.quote(run.folder)} --resume"
    else:
        told = (
            "The same versions on the same kind of device give the same params_sha256: "
            f"{run.summary.get('params_sha256', MISSING)}."
        )
        typed = f"flray run {file} --out again"
    return joined([command(typed), note(told)])


def environment(run: PageRun) -> Html:
    """Versions, commit and hardware, of every start where the run was resumed."""
    held = run.environment
    if not held:
        return note("Nothing is recorded of what this ran on.")
    starts = [held, *held.get("resumed", [])]
    shown = [pairs(_described(start)) for start in starts[:1]]
    for number, start in enumerate(starts[1:], 1):
        differs = {k: v for k, v in _described(start).items() if _described(held).get(k) != v}
        shown.append(note(f"Resumed ({number}): {_differing(differs)}."))
    return joined(shown)


def differing_settings(experiments: Mapping[str, Sequence[PageRun]]) -> Html | None:
    """The keys in which experiments differ, a column an experiment; None if in nothing."""
    flat = {name: _telling(runs[0].config) for name, runs in experiments.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    rows = []
    for key in keys:
        values = [setting_text(flat[name][key]) if key in flat[name] else "" for name in flat]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return table(["setting", *flat], rows) if rows else None


def setting_text(value: object) -> str:
    """A value as YAML has it on one line.

    >>> setting_text(None), setting_text([1, 2]), setting_text("l2")
    ('null', '[1, 2]', 'l2')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _telling(config: Plain) -> dict[str, object]:
    kept = {key: value for key, value in config.items() if key not in _NO_MATTER}
    return leaves(kept)


def _setting_tables(config: Plain) -> Iterator[Html]:
    """A table a component, its name first; what belongs to none comes last."""
    alone = {}
    for key, value in config.items():
        if not isinstance(value, Mapping) or not value:
            alone[key] = value
            continue
        inner = leaves(value)
        title = setting_text(inner.pop("name", ""))
        yield _setting_table(f"{key}: {title}" if title else key, inner)
    if alone:
        yield _setting_table("", alone)


def _setting_table(caption: str, values: Plain) -> Html:
    rows = (
        element("tr", element("th", key, scope="row"), element("td", setting_text(value)))
        for key, value in values.items()
    )
    titled = [element("caption", caption)] if caption else []
    return element("table", *titled, element("tbody", *rows))


def _described(start: Plain) -> dict[str, str]:
    flat = leaves({key: value for key, value in start.items() if key != "resumed"})
    return {
        key.removeprefix("versions.").removeprefix("hardware."): setting_text(value)
        for key, value in flat.items()
        if value is not None
    }


def _differing(differs: Mapping[str, str]) -> str:
    if not differs:
        return "on the same versions and hardware"
    return ", ".join(f"{key} {value}" for key, value in differs.items())
