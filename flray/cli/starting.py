"""`flray init`: an experiment file to start from.

The file runs as it is: on embedded data, or with the data of a shipped experiment.
"""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from flray.config.reference import SEE_BELOW, ComponentEntry, component_keys, components
from flray.config.shipped import EXPERIMENTS, find_file, names
from flray.errors import ExperimentError
from flray.values import shown
from flray.wording import suggestion

# Keys that a method needs in addition to its defaults to run on embedded data.
NEEDS = {
    "flt": "  clustering: {signature: {encoder: experiments/encoders/digits.yaml}}\n",
    "repa": "  rounds_before: 5\n  clustering: {partition: {number: 4}}\n",
    "wd": "  rounds_before: 5\n  clustering: {partition: {number: 4}}\n",
}
MODELS = {"repa": "repa_net", "wd": "{name: repa_net, encoder: clf}"}
SPLITS = dict.fromkeys(("flis_dc", "flis_hc"), "{name: label_groups, clients: 20, server: 100}")

TEMPLATE = """\
# flray run {file}
# Omitted keys use defaults. `flray keys` shows every key, `flray keys {algorithm}` those of a
# component, `flray list` what there is to choose from; any key can be set as train.lr=0.05.
dataset: digits # embedded, nothing to download
split: {split}
model: {model}
algorithm:
  name: {algorithm}{about}
{keys}train: {{lr: 0.1, epochs: 3}}
participation: 0.5 # the share of clients that train in a round
rounds: 20
seed: 0
evaluate: {{target: 0.9}}
"""


def write_start(name: str | None, out: Path | None, console: Console) -> None:
    """Write an experiment file to start from and print the command that runs it.

    Args:
        name: Name of a method or of a shipped experiment; None: a blank experiment.
        out: The file, which must not exist; None: one of that name in the current folder.

    Raises:
        ExperimentError: The file exists, or there is no such method or experiment.
    """
    text, file = _start(name, out)
    if file.exists():
        raise ExperimentError(f"{file} exists; choose another with --out")
    file.write_text(text, encoding="utf-8")
    console.out(f"{file}: flray run {file}")


def _start(name: str | None, out: Path | None) -> tuple[str, Path]:
    """The text of the experiment and the file to write it to."""
    shipped = None if name is None else find_file(name)
    if shipped is not None:
        return shipped.read_text(encoding="utf-8"), out or Path(shipped.name)
    methods = {method.name: method for method in components("algorithm")}
    if name is not None and name not in methods:
        raise ExperimentError(_unknown(name, list(methods)))
    file = out or Path(f"{name or 'experiment'}.yaml")
    return experiment_text(methods[name or "fedavg"], file), file


def experiment_text(method: ComponentEntry, file: Path) -> str:
    """The text of an experiment file: a method on embedded data, its keys as comments.

    Args:
        method: The method as `flray.config.reference` describes it.
        file: The name that the first line tells to run.
    """
    needed = NEEDS.get(method.name, "")
    lines = "".join(f"  # {line}\n" for line in _default_lines(method, needed))
    return TEMPLATE.format(
        file=file,
        algorithm=method.name,
        about=f" # {method.purpose}",
        split=SPLITS.get(method.name, "{name: label_swap, clients: 20, groups: 4}"),
        model=MODELS.get(method.name, "mlp200"),
        keys=needed + lines,
    )


def _default_lines(method: ComponentEntry, needed: str) -> Iterator[str]:
    """The keys that `needed` does not set, each with its default, indented below its mapping."""
    for key in component_keys(method):
        parts = key.name.split(".")
        if f"  {parts[0]}:" in needed:
            continue
        value = "" if key.default == SEE_BELOW else f" {key.default}"
        note = f" # {key.note}" if key.note else ""
        yield f"{'  ' * (len(parts) - 1)}{parts[-1]}:{value}{note}"


def _unknown(name: str, methods: list[str]) -> str:
    """The message for a name that is neither a method nor an experiment."""
    of_paper = [path for path in names(EXPERIMENTS) if path.startswith(f"{name}/")]
    if of_paper:
        return f"{name} has several experiments; choose one: {', '.join(of_paper)}"
    meant = suggestion(name, [*methods, *names(EXPERIMENTS)])
    return (
        f"unknown experiment or method {shown(name)}{meant}; methods: {', '.join(methods)}; "
        "`flray list experiments` names the experiments of the papers"
    )
