"""flray: an experiment platform for clustered federated learning.

The public functions are `run`, `sweep`, `report`, `load`, and `from_tensors`, `from_clients` and
`from_frame`, which make datasets:

    result = flray.run("mine.yaml", rounds=5)
    result.summary["accuracy_mean"], result.clusters, result.model(client=3)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike

    from flray.config.experiment import Experiment
    from flray.data.dataset import Dataset
    from flray.result import Result, Results
    from flray.sweeps.driver import SweepResult

__version__ = "0.1.0"
__all__ = ["from_clients", "from_frame", "from_tensors", "load", "report", "run", "sweep"]

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
    """Run an experiment, or several, and return the results.

    Rounds are mirrored to the tracker of the experiment, if it has one (`tracking`).

    With `seeds=3`, or a list of names or mappings in the place of a component, as in
    `algorithm=["fedavg", {"name": "flhc", "rounds_before": 3}]`, several experiments run one after
    another.

    Args:
        experiment: A YAML file, the name of a shipped experiment, or a mapping of keys.
        out: The folder of the run. None: a new temporary folder.
        overrides: `key=value` as on the command line, with dotted keys.
        resume: Continue the run in `out` where it stopped. `overrides` and `keys` may then change
            any key except dataset, split, model, algorithm, events, seed, execution.precision,
            evaluate.last_trained and evaluate.scores.
        on_round: Called after each round with its row of rounds.parquet.
        progress: Print remarks on the experiment, and a line for each round.
        keys: Keys of an experiment, which replace those of `experiment`. In addition to values
            of YAML, `model` may be a LightningModule or a function that builds one, `dataset` a
            tuple (x_train, y_train, x_test, y_test) of tensors or arrays or a LightningDataModule,
            and any component an instance of its class. With `dataset=(x, y)` of any shape,
            `clients` names the owner of each example, `groups` the kind of its owner and `time` its
            time; the split is then `natural` unless another one is given.

    Returns:
        The `Result` of the run; with several experiments, `Results` by name.

    Raises:
        ExperimentError: The experiment is wrong, or `out` holds another run.
        ClientFailure: A client failed and `on_client_failure` is `raise`, or the GPU is full.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> results = run(
    ...     {"dataset": {"name": "digits", "size": 8}, "model": "mlp200"},
    ...     out=folder.name,
    ...     split={"name": "label_swap", "clients": 4, "groups": 2},
    ...     algorithm=["fedavg", "local"],
    ...     rounds=1,
    ... )
    >>> list(results), results["local"].summary["clusters"]  # a model for each client
    (['fedavg', 'local'], 4)
    >>> folder.cleanup()
    """
    import tempfile

    from flray.config.experiment import evaluated_together, read_yaml
    from flray.config.objects import with_owners
    from flray.config.overrides import override
    from flray.config.several import named_experiments
    from flray.result import Results

    if experiment is None or isinstance(experiment, Mapping):
        name, given = "experiment", dict(experiment or {})
    else:
        name, given = Path(experiment).stem, read_yaml(experiment)
    named = named_experiments({name: override(with_owners(given | keys), overrides)})
    folder = Path(tempfile.mkdtemp(prefix="flray-") if out is None else out)
    changed = [*keys, *(item.partition("=")[0] for item in overrides)] if resume else None
    if len(named) == 1:
        return _run_one(named[0].experiment, folder, changed, on_round, progress)
    together = evaluated_together([entry.experiment for entry in named])
    runs = [
        _run_one(parsed, folder / entry.folder, changed, on_round, progress)
        for entry, parsed in zip(named, together, strict=True)
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
    from flray.reports.lines import line_of_run
    from flray.result import Result
    from flray.runs.conduct import Monitor
    from flray.runs.launch import run_experiment
    from flray.runs.remarks import remarks

    if changed is not None:
        RunDirectory(folder).change_settings(parsed.plain, changed)

    def show(row: dict[str, Any]) -> None:
        if progress:
            print(line_of_run(row, folder, parsed.plain), flush=True)
        if on_round is not None:
            on_round(row)

    for remark in remarks(parsed) if progress else ():
        print(remark, flush=True)
    with restored_torch_settings():
        run_experiment(parsed, folder, changed is not None, Monitor(show))
    return Result(folder, parsed)


def sweep(
    space: str | Path | Mapping[str, Any],  # Any: YAML
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    *,
    max_minutes: float | None = None,
) -> "SweepResult":
    """Run every configuration of a space with Ray Tune; work that they share is done once.

    Args:
        space: A YAML file, the name of a shipped space, or a mapping.
        out: The folder of the sweep. None: a new temporary folder.
        overrides: `key=value` as on the command line; `space.KEY=[...]` varies one more key.
        resume: Continue the sweep in `out` where it stopped.
        max_minutes: End within this time; rounds in progress are completed and --resume goes on.

    Returns:
        A result with `table`, a data frame with one row per configuration and seed (the columns
        of rows.parquet), `report`, the content of sweep.json with the best configuration, and
        `path`, whose runs `flray.load` reads.
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
    """Write one self-contained HTML page of runs and sweeps.

    A run has its numbers, figures, clusterings, costs and settings; several runs also have a table
    with paired differences; a sweep has its best configurations, figures of its settings and all
    rows. `flray.report("runs/both")` is `flray report runs/both` on the command line.

    Args:
        runs: Folders, or what `flray.run`, `flray.load` and `flray.sweep` return.
        out: The file to write. None: report.html in the first folder.

    Returns:
        The path of the page.

    Raises:
        ExperimentError: A folder holds neither a run nor a sweep.
    """
    from flray.errors import ExperimentError
    from flray.reports.page import write_page

    if not runs:
        raise ExperimentError("expected a folder or a result, as in flray.report('runs/mine')")
    folders = [Path(run) if isinstance(run, str | Path) else run.path for run in runs]
    return write_page(folders, None if out is None else Path(out))


def load(path: str | Path, **objects: Any) -> "Result | Results":  # Any: components
    """Read the run in a folder, finished or not, or all runs below it.

    `flray.load("runs/both")["flhc"]` is the run of flhc.yaml; with several seeds it is
    `flray.load("runs/both")["flhc/seed_1"]`. `flray.load("runs/both").table` is a data frame with
    one row per run. The runs of a sweep's folder are named by the numbers of their rows.

    Args:
        path: The folder of a run, or a folder that contains runs.
        objects: Components that were passed to `flray.run` as objects, as in `model=MyModule()`.
            Only the models of the run need them.

    Returns:
        The `Result` of a run; of a folder with several runs, `Results` by name.
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
    """Make a dataset of images and labels in memory.

    Args:
        x_train: Images of shape (N, channels, height, width), (N, height, width) or (N, features),
            as a tensor or an array. Bytes are divided by 255; floats reach the model as they are.
        y_train: Labels 0, 1, ... of shape (N,).
        x_test: Test images. None: the split must cut test parts off (`split.test=own_split`).
        y_test: Labels of the test images. None if and only if x_test is.
        name: The name that summaries show.

    Returns:
        A dataset for `flray.run(dataset=...)`, or for `load()` of a dataset class of your own.

    >>> import numpy as np
    >>> data = from_tensors(np.zeros((6, 8, 8), np.uint8), [0, 1, 2, 0, 1, 2], name="mine")
    >>> data.name, data.image_shape, data.num_classes
    ('mine', (1, 8, 8), 3)
    """
    from flray.data.tensors import from_tensors as made

    return made(x_train, y_train, x_test, y_test, name)


def from_clients(
    clients: Sequence[Any], name: str = "clients"
) -> "Dataset":  # Any: pairs, datasets
    """Make a dataset of what each client has; `flray.run` splits it by its clients.

    Args:
        clients: For each client a pair (x, y) of tensors or arrays, or a torch Dataset of pairs.
            Examples may have any shape. Whole numbers in y are classes from 0, floats are numbers
            to predict.
        name: The name that summaries show.

    >>> import numpy as np
    >>> data = from_clients([(np.zeros((5, 3)), np.ones(5)), (np.zeros((8, 3)), np.ones(8))])
    >>> data.input_shape, data.source.tolist()[3:7]
    ((3,), [0, 0, 1, 1])
    """
    from flray.data.owned import join_clients

    return join_clients(clients, name)


def from_frame(
    frame: "pd.DataFrame", name: str = "frame", **columns: Any
) -> "Dataset":  # Any: YAML
    """Make a dataset of a data frame, one row for each example; `flray.run` splits it by clients.

    Args:
        frame: Columns of numbers, and of text, which become one-hot.
        name: The name that summaries show.
        columns: `client` and `target` name the columns with the owner of a row and with what is
            predicted; `group`, `time`, `features` and `task` are options as of `dataset: table`.

    >>> import pandas as pd
    >>> visits = pd.DataFrame({"hospital": ["a", "b"], "age": [41.0, 67.0], "days": [2.5, 4.0]})
    >>> from_frame(visits, client="hospital", target="days").client_names
    ('a', 'b')
    """
    from flray.data.datasets.tables import Table

    return Table(file=name, **columns).of(frame, name)
