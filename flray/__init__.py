"""flray: an experiment platform for clustered federated learning.

result = flray.run("mine.yaml", rounds=5)
result.summary["accuracy_mean"], result.clusters, result.model(client=3)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from flray.data.dataset import Dataset
    from flray.result import Result
    from flray.sweep.driver import SweepResult

__version__ = "0.1.0"
__all__ = ["from_tensors", "load", "report", "run", "sweep"]

# Functions import what they need when they run: torch and Lightning take seconds, and
# `flray --help` imports this file.


def run(
    experiment: str | Path | Mapping[str, Any] | None = None,  # Any: YAML
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    *,
    on_round: Callable[[dict[str, Any]], None] | None = None,  # Any: one value a column
    progress: bool = False,
    **keys: Any,  # Any: YAML and objects
) -> "Result":
    """Run an experiment and return what it found.

    Args:
        experiment: a YAML file, the name of a shipped experiment, or a mapping of keys.
        out: the folder of the run; None: a new temporary folder.
        overrides: `key=value` as on the command line, dotted keys too.
        resume: go on with the run in `out` where it stopped; what `overrides` and `keys` set may
            differ from what it had so far, if it is not what its clients and state are made from.
        on_round: called after each round with its row of rounds.parquet.
        progress: print a line for each round.
        keys: keys of an experiment, which replace those of `experiment`. Beside what YAML can say,
            `model` may be a LightningModule or a function that builds one, `dataset` a tuple
            (x_train, y_train, x_test, y_test) of tensors, and any component an instance of its
            class.
    """
    import tempfile

    import torch

    from flray.config.build import run_experiment
    from flray.config.experiment import override, parse_experiment, read_yaml
    from flray.records.run_directory import RunDirectory
    from flray.report.lines import round_line, with_merges
    from flray.result import Result

    if experiment is None or isinstance(experiment, Mapping):
        given = dict(experiment or {})
    else:
        given = read_yaml(experiment)
    parsed = parse_experiment(override(given | keys, overrides))
    folder = Path(tempfile.mkdtemp(prefix="flray-") if out is None else out)
    if resume:
        changed = [*keys, *(item.partition("=")[0] for item in overrides)]
        RunDirectory(folder).change_settings(parsed.plain, changed)

    def show(row: dict[str, Any]) -> None:
        if progress:
            shown = with_merges(row, folder, parsed.plain)
            print(round_line(shown, parsed.settings.rounds), flush=True)
        if on_round is not None:
            on_round(row)

    threads = torch.get_num_threads()
    try:
        run_experiment(parsed, folder, resume, show)
    finally:
        torch.set_num_threads(threads)  # a host fixes them, for the bits of its results
    return Result(folder, parsed)


def sweep(
    space: str | Path | Mapping[str, Any],  # Any: YAML
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    *,
    max_minutes: float | None = None,
) -> "SweepResult":
    """Run every experiment of a space: a YAML file, the name of a shipped space, or a mapping.

    The result has `table`, a data frame with a row for each configuration, `report`, what was
    best, and `path`, whose runs `flray.load` reads.
    """
    import tempfile

    from flray.sweep.driver import run_sweep
    from flray.sweep.space import read_space

    given = dict(space) if isinstance(space, Mapping) else Path(space)
    parsed = read_space(given, overrides)
    folder = Path(tempfile.mkdtemp(prefix="flray-") if out is None else out)
    return run_sweep(parsed, folder, resume, max_minutes)


def report(*runs: "str | Path | Result | SweepResult", out: str | Path | None = None) -> Path:
    """One self-contained HTML page of runs and sweeps; its path, in the first folder by default."""
    from flray.report.page import write_page

    folders = [Path(each) if isinstance(each, str | Path) else each.path for each in runs]
    path = Path(out) if out is not None else folders[0] / "report.html"
    write_page(folders, path)
    return path


def load(path: str | Path, **objects: Any) -> "Result":  # Any: components
    """The run in a folder, finished or not.

    Args:
        objects: components that were given as objects when it ran; only its models need them.
    """
    from flray.result import load as load_result

    return load_result(path, **objects)


def from_tensors(
    x_train: "ArrayLike",
    y_train: "ArrayLike",
    x_test: "ArrayLike | None" = None,
    y_test: "ArrayLike | None" = None,
    name: str = "tensors",
) -> "Dataset":
    """A dataset of images and labels that are in memory; see `flray.data.tensors`."""
    from flray.data.tensors import from_tensors as made

    return made(x_train, y_train, x_test, y_test, name)
