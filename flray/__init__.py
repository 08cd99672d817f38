"""flray: an experiment platform for clustered federated learning.

result = flray.run("mine.yaml", rounds=5)
result.summary["accuracy_mean"], result.clusters, result.model(client=3)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from flray.config.experiment import Experiment
    from flray.data.dataset import Dataset
    from flray.result import Result, Results
    from flray.sweeps.driver import SweepResult

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
) -> "Result | Results":
    """Run an experiment and return what it found.

    With `seeds=3`, or a list of names or mappings in the place of a component, as in
    `algorithm=["fedavg", {"name": "flhc", "rounds_before": 3}]`, several experiments run, one after
    another, and their results come by name, as `flray.load` gives those of a folder.

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

    from flray.config.experiment import evaluated_together, read_yaml
    from flray.config.overrides import override
    from flray.config.several import named_experiments
    from flray.result import Results

    if experiment is None or isinstance(experiment, Mapping):
        name, given = "experiment", dict(experiment or {})
    else:
        name, given = Path(experiment).stem, read_yaml(experiment)
    named = named_experiments({name: override(given | keys, overrides)})
    folder = Path(tempfile.mkdtemp(prefix="flray-") if out is None else out)
    changed = [*keys, *(item.partition("=")[0] for item in overrides)] if resume else None
    if len(named) == 1:
        return _run_one(named[0].experiment, folder, changed, on_round, progress)
    together = evaluated_together([each.experiment for each in named])
    runs = [
        _run_one(parsed, folder / each.folder, changed, on_round, progress)
        for each, parsed in zip(named, together, strict=True)
    ]
    return Results(folder, runs)


def _run_one(
    parsed: "Experiment",
    folder: Path,
    changed: Sequence[str] | None,
    on_round: Callable[[dict[str, Any]], None] | None,
    progress: bool,
) -> "Result":
    """Start a run, or go on with one.

    Args:
        changed: keys whose values may differ from those of the run to go on with; None: a new run.
    """
    from flray.client.host import restored_torch_settings
    from flray.records.run_directory import RunDirectory
    from flray.reports.lines import round_line, with_merges
    from flray.result import Result
    from flray.runs.launch import run_experiment

    if changed is not None:
        RunDirectory(folder).change_settings(parsed.plain, changed)

    def show(row: dict[str, Any]) -> None:
        if progress:
            shown = with_merges(row, folder, parsed.plain)
            print(round_line(shown, parsed.settings.rounds), flush=True)
        if on_round is not None:
            on_round(row)

    with restored_torch_settings():
        run_experiment(parsed, folder, changed is not None, show)
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

    from flray.sweeps.driver import run_sweep
    from flray.sweeps.space import read_space

    given = dict(space) if isinstance(space, Mapping) else Path(space)
    parsed = read_space(given, overrides)
    folder = Path(tempfile.mkdtemp(prefix="flray-") if out is None else out)
    return run_sweep(parsed, folder, resume, max_minutes)


def report(
    *runs: "str | Path | Result | Results | SweepResult", out: str | Path | None = None
) -> Path:
    """One self-contained HTML page of runs and sweeps; its path, in the first folder by default."""
    from flray.errors import ExperimentError
    from flray.reports.page import write_page

    if not runs:
        raise ExperimentError("expected a folder or a result, as in flray.report('runs/mine')")
    folders = [Path(each) if isinstance(each, str | Path) else each.path for each in runs]
    return write_page(folders, None if out is None else Path(out))


def load(path: str | Path, **objects: Any) -> "Result | Results":  # Any: components
    """The run in a folder, finished or not; of a folder with several runs a mapping of them.

    `flray.load("runs/both")["flhc"]` is the run of flhc.yaml and, where there are several seeds,
    `flray.load("runs/both")["flhc/seed_1"]` that of seed 1; `flray.load("runs/both").table` is a
    data frame with a row for each run. A sweep's folder gives the runs of its rows by number.

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
