"""`Result` and `Results`, which `flray.run` and `flray.load` return."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule

from flray.client.host import restored_torch_settings
from flray.columns import CLIENT, MODEL
from flray.config.experiment import COMPONENTS, Experiment, parse_experiment
from flray.config.objects import OBJECT
from flray.config.overrides import THRESHOLD
from flray.errors import ExperimentError
from flray.files import write_output
from flray.imports import require_own_modules
from flray.models.bank import ModelBank, load_params
from flray.records.clusterings import ClusteringRecord, read_clusterings
from flray.records.run_directory import RunDirectory
from flray.reports.clustering_figures import CLUSTERING_FIGURES, clustering_figures, when
from flray.reports.figures import accuracy_figure, clients_figure, efficiency_figure
from flray.reports.runs import RunRecord, read_run, run_folders
from flray.reports.settings import experiment_names
from flray.runs.assemble import deployed_models

RUN_FIGURES = {"accuracy": accuracy_figure, "clients": clients_figure, "bytes": efficiency_figure}


@dataclass(frozen=True)
class Result:
    """A run directory read back, finished or not: numbers, clusters, figures and models.

    `rounds` and `clients` are data frames of all rounds so far, `summary` has the numbers of the
    finished run, `clusters` is a series by client, `model(client)` a LightningModule.

    >>> import flray, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> result = flray.run(
    ...     out=folder.name,
    ...     dataset={"name": "digits", "size": 8},
    ...     split={"name": "iid", "clients": 4},
    ...     model="mlp200",
    ...     algorithm="fedavg",
    ...     rounds=2,
    ...     execution={"threads": 1},
    ... )
    >>> len(result.rounds), result.clusters.tolist()  # FedAvg: one model for all
    (2, [0, 0, 0, 0])
    >>> result.model(client=3).training
    False
    >>> folder.cleanup()
    """

    path: Path
    experiment: Experiment | None = None  # None: the one of config.yaml
    # Components by key that config.yaml cannot describe; Any: their classes.
    objects: Mapping[str, Any] | None = None

    @property
    def summary(self) -> dict[str, Any]:  # Any: JSON
        """The numbers of summary.json; empty if the run stopped before its last round."""
        return dict(self._record.summary or {})

    @property
    def seed(self) -> int:
        """The seed of the experiment."""
        return int(self._record.config["seed"])

    @property
    def rounds(self) -> pd.DataFrame:
        """The columns of rounds.parquet, a row for each round so far."""
        return self._record.rounds

    @property
    def clients(self) -> pd.DataFrame:
        """The columns of clients.parquet, a row for each client and evaluation so far.

        With a column `name` if clients have names in the data.
        """
        return self._record.clients

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of clients 0, 1, ... in the data; empty for clients that a split made."""
        return self._record.client_names

    @property
    def clusters(self) -> "pd.Series[int]":
        """By client, the number of the model that it used at the last evaluation.

        Clients with equal numbers share a model.
        """
        models: pd.Series[int] = self._record.last_test().set_index(CLIENT)[MODEL]
        return models.rename("cluster").sort_index()

    @cached_property
    def clusterings(self) -> dict[int, ClusteringRecord]:
        """The evidence of each clustering (points, D, R, labels, tree), by round."""
        return read_clusterings(self.path)

    def model(self, client: int) -> LightningModule:
        """The module with the weights that a client uses after the last round, in evaluation mode.

        Of a mixture of models it is the one with the largest weight.

        Args:
            client: Number of the client, from 0.

        Raises:
            ExperimentError: There is no such client, or the run has no checkpoint.
        """
        module, bank = self._deployed
        if not 0 <= client < len(bank.owner):
            raise ExperimentError(f"client must be in 0..{len(bank.owner) - 1}, got {client}")
        deployed = copy.deepcopy(module)
        load_params(deployed, bank.row(int(bank.owner[client])))
        return deployed.eval()

    def mixture(self, client: int) -> tuple[float, ...]:
        """The weights of all models in a client's mixture; empty if the client uses one model."""
        (weights,) = self._deployed[1].shares_of(np.array([client]))
        return weights

    def export(self, client: int, path: str | Path) -> Path:
        """Write the model of a client as a Lightning checkpoint; returns its path.

        The module's class reads it with `load_from_checkpoint`, other programs with
        `torch.load(path, weights_only=True)["state_dict"]`.
        """
        module = self.model(client)
        checkpoint = {
            "state_dict": module.state_dict(),
            "hyper_parameters": self._arguments(module),
            "pytorch-lightning_version": version("pytorch-lightning"),
            "epoch": 0,
            "global_step": 0,
            "client": client,
            "cluster": int(self._deployed[1].owner[client]),
        }
        write_output(Path(path), lambda file: torch.save(checkpoint, file))
        return Path(path)

    def figure(self, name: str = "accuracy", round: int | None = None) -> Figure:
        """A matplotlib figure of the run.

        Args:
            name: For a run accuracy, clients or bytes; for a clustering distance, embedding or
                graph.
            round: The round of the clustering. None: that of the last one.
        """
        run = self._record
        if name in RUN_FIGURES:
            return RUN_FIGURES[name]({run.name: [run]})
        if name not in CLUSTERING_FIGURES:
            names = ", ".join((*RUN_FIGURES, *CLUSTERING_FIGURES))
            raise ExperimentError(f"unknown figure {name!r}; known: {names}")
        if not self.clusterings:
            raise ExperimentError(f"{self.path} holds no clustering to draw")
        t = max(self.clusterings) if round is None else round
        if t not in self.clusterings:
            rounds = ", ".join(map(str, self.clusterings))
            raise ExperimentError(f"no clustering after round {t}; there are: {rounds}")
        title, drawn = f"{run.name}, {when(t)}", clustering_figures(self.clusterings[t])
        if name not in drawn:
            raise ExperimentError(
                f"the clustering after round {t} was decided without D, which figure {name} shows; "
                f"it has: {', '.join(drawn)}"
            )
        return drawn[name](self.clusterings[t], title, run.value(THRESHOLD))

    @cached_property
    def _record(self) -> RunRecord:
        return read_run(self.path, self.path.name)

    @cached_property
    def _experiment(self) -> Experiment:
        if self.experiment is not None:
            return self.experiment
        plain, objects = dict(self._record.config), dict(self.objects or {})
        for kind in COMPONENTS:
            if OBJECT in plain.get(kind, {}) and kind not in objects:
                raise ExperimentError(
                    f"the {kind} of {self.path} was given as an object, which config.yaml does not "
                    f"hold: flray.load(path, {kind}=...)"
                )
        require_own_modules(plain, self.path)
        parsed = parse_experiment(plain | objects)
        digests = [config["dataset"].get(OBJECT) for config in (plain, parsed.plain)]
        if "dataset" in objects and digests[0] != digests[1]:
            raise ExperimentError(f"{self.path} ran on another dataset than the one given")
        return parsed

    @cached_property
    def _deployed(self) -> tuple[LightningModule, ModelBank]:
        with restored_torch_settings():
            return deployed_models(self._experiment, RunDirectory(self.path))

    def _arguments(self, module: LightningModule) -> dict[str, Any]:  # Any: YAML
        """The arguments that build the module again."""
        arguments = dict(module.hparams)
        if arguments or OBJECT in self._experiment.model.plain:
            return arguments
        dataset = self._experiment.dataset.build().load()
        component = self._experiment.model
        return component.arguments(**component.asked_of(dataset))


class Results(Mapping[str, Result]):
    """A read-only mapping of several runs by name, as `flray.run` and `flray.load` return it.

    The name of a run is that of its experiment, as in tables and pages. If an experiment has
    several seeds, it ends in the seed: `results["flhc"]`, or `results["flhc/seed_1"]`.

    >>> folders = [Path("both/fedavg/seed_0"), Path("both/flhc/seed_0")]
    >>> results = Results(Path("both"), [Result(folder) for folder in folders])
    >>> list(results), results["flhc"].path.name
    (['fedavg', 'flhc'], 'seed_0')
    """

    def __init__(self, path: Path, runs: Sequence[Result]) -> None:
        self.path = path
        self._runs = dict(zip(_run_names([run.path for run in runs]), runs, strict=True))

    @property
    def table(self) -> pd.DataFrame:
        """A row for each run: its name, its seed and the numbers of its summary."""
        rows = [{"name": name, "seed": run.seed, **run.summary} for name, run in self.items()]
        return pd.DataFrame(rows).set_index("name")

    def __getitem__(self, name: str) -> Result:
        if name not in self._runs:
            raise KeyError(f"no run {name!r} in {self.path}; there are: {', '.join(self)}")
        return self._runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Results({str(self.path)!r}: {', '.join(self)})"


def load(path: str | Path, **objects: Any) -> Result | Results:  # Any: components
    """The run in a folder, or all runs below it; their summaries are checked.

    Args:
        path: The folder of a run, or one that contains runs.
        objects: Components that were given as objects when they ran.
    """
    unknown = sorted(set(objects) - set(COMPONENTS))
    if unknown:
        raise ExperimentError(f"unknown {unknown[0]!r}; known: {', '.join(COMPONENTS)}")
    folder = Path(path)
    is_run = RunDirectory(folder).holds_run()
    runs = [Result(run, objects=objects) for run in ([folder] if is_run else run_folders(folder))]
    if not runs:
        raise ExperimentError(f"{path} holds no run; expected a folder that `flray run` made")
    for run in runs:
        read_run(run.path)
    return runs[0] if is_run else Results(folder, runs)


def load_one(path: str | Path) -> Result:
    """The run whose directory is `path`; otherwise an error that names the runs below it."""
    loaded = load(path)
    if isinstance(loaded, Results):
        folders = ", ".join(str(run.path) for run in loaded.values())
        raise ExperimentError(f"{path} holds {len(loaded)} runs; name the folder of one: {folders}")
    return loaded


def _run_names(folders: Sequence[Path]) -> list[str]:
    """The name of each run: its experiment, with the seed if an experiment has several.

    >>> _run_names([Path("x/a/seed_0"), Path("x/b/seed_0")])
    ['a', 'b']
    >>> _run_names([Path("x/a/seed_0"), Path("x/a/seed_1"), Path("x/b/seed_0"), Path("x/c")])
    ['a/seed_0', 'a/seed_1', 'b/seed_0', 'c']
    """
    names = experiment_names(folders)
    if len(set(names)) == len(names):
        return names
    return [
        name if Path(name).name == folder.name else f"{name}/{folder.name}"
        for name, folder in zip(names, folders, strict=True)
    ]
