"""What a user takes away from a run: numbers, clusters, figures, and the model of each client."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule

from flray.client.host import restored_torch_settings
from flray.columns import CLIENT, MODEL, PART, ROUND
from flray.config.experiment import COMPONENTS, Experiment, parse_experiment
from flray.config.objects import OBJECT
from flray.config.overrides import THRESHOLD
from flray.errors import ExperimentError
from flray.files import write_output
from flray.imports import require_own_modules
from flray.models.bank import ModelBank, load_params
from flray.records.clusterings import ClusteringRecord, read_clusterings
from flray.records.run_directory import RunDirectory
from flray.reports.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.reports.figures import accuracy_figure, clients_figure, efficiency_figure, when
from flray.reports.runs import experiment_names, holds_run, read_run
from flray.reports.sweeps import enclosing_sweep
from flray.runs.assemble import deployed_models
from flray.server.summary import checked_summary

OF_A_RUN = {"accuracy": accuracy_figure, "clients": clients_figure, "bytes": efficiency_figure}
OF_A_CLUSTERING = ("distance", "embedding", "graph")


@dataclass(frozen=True)
class Result:
    """A run directory read back, finished or not: numbers, clusters, figures and models.

    `rounds` and `clients` are data frames of all rounds so far, `summary` the numbers of the
    finished run, `clusters` a series by client, `model(client)` a LightningModule.

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
    experiment: Experiment | None = None  # None: that of config.yaml
    objects: Mapping[str, Any] | None = None  # Any: components that config.yaml cannot describe

    @property
    def summary(self) -> dict[str, Any]:  # Any: JSON
        """The numbers of summary.json; empty when the run stopped before its last round."""
        return checked_summary(self._directory) or {}

    @property
    def seed(self) -> int:
        """The seed of the experiment."""
        return int(self._directory.config()["seed"])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round so far."""
        return self._directory.rounds()

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row for each client and evaluation so far."""
        return self._directory.clients()

    @property
    def clusters(self) -> "pd.Series[int]":
        """By client: the number of the model that it used at the last evaluation.

        Clients with equal numbers share a model.
        """
        test = self.clients[self.clients[PART] == "test"]
        last = test[test[ROUND] == test[ROUND].max()]
        found: pd.Series[int] = last.set_index(CLIENT)[MODEL].rename("cluster").sort_index()
        return found

    @cached_property
    def clusterings(self) -> dict[int, ClusteringRecord]:
        """What each clustering was decided by (points, D, R, labels, tree), by round."""
        return read_clusterings(self.path)

    def model(self, client: int) -> LightningModule:
        """The module with the weights that a client uses at the end, in evaluation mode."""
        module, bank = self._deployed
        if not 0 <= client < len(bank.owner):
            raise ExperimentError(f"client must be in 0..{len(bank.owner) - 1}, got {client}")
        own = copy.deepcopy(module)
        load_params(own, bank.row(int(bank.owner[client])))
        return own.eval()

    def export(self, client: int, path: str | Path) -> Path:
        """Write the model of a client as a Lightning checkpoint.

        The module's class reads it with `load_from_checkpoint`, anybody with
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
        """A figure of the run, by name.

        Those of a run are accuracy, clients and bytes, those of a clustering are distance,
        embedding and graph.

        Args:
            round: of the clustering; None: the last one.
        """
        run = read_run(self.path, self.path.name)
        if name in OF_A_RUN:
            return OF_A_RUN[name]({run.name: [run]})
        if name not in OF_A_CLUSTERING:
            known = ", ".join((*OF_A_RUN, *OF_A_CLUSTERING))
            raise ExperimentError(f"unknown figure {name!r}; known: {known}")
        if not self.clusterings:
            raise ExperimentError(f"{self.path} holds no clustering to draw")
        t = max(self.clusterings) if round is None else round
        if t not in self.clusterings:
            there = ", ".join(map(str, self.clusterings))
            raise ExperimentError(f"no clustering after round {t}; there are: {there}")
        found, title = self.clusterings[t], f"{run.name}, {when(t)}"
        if name == "distance":
            return distance_figure(found, title, run.value(THRESHOLD))
        return embedding_figure(found, title) if name == "embedding" else graph_figure(found, title)

    @property
    def _directory(self) -> RunDirectory:
        return RunDirectory(self.path)

    @cached_property
    def _experiment(self) -> Experiment:
        if self.experiment is not None:
            return self.experiment
        plain, objects = dict(self._directory.config()), dict(self.objects or {})
        for kind in COMPONENTS:
            if OBJECT in plain.get(kind, {}) and kind not in objects:
                raise ExperimentError(
                    f"the {kind} of {self.path} was given as an object, which config.yaml does not "
                    f"hold: flray.load(path, {kind}=...)"
                )
        require_own_modules(plain, self.path)
        found = parse_experiment(plain | objects)
        held, given = plain["dataset"].get(OBJECT), found.plain["dataset"].get(OBJECT)
        if "dataset" in objects and held != given:
            raise ExperimentError(f"{self.path} ran on another dataset than the one given")
        return found

    @cached_property
    def _deployed(self) -> tuple[LightningModule, ModelBank]:
        with restored_torch_settings():
            return deployed_models(self._experiment, self._directory)

    def _arguments(self, module: LightningModule) -> dict[str, Any]:  # Any: YAML
        """What the module's class is built with again."""
        own = dict(module.hparams)
        if own or OBJECT in self._experiment.model.plain:
            return own
        dataset = self._experiment.dataset.build().load()
        component = self._experiment.model
        return component.arguments(image_shape=dataset.image_shape, num_classes=dataset.num_classes)


class Results(Mapping[str, Result]):
    """Several runs by name, as `flray.load` and `flray.run` return them: a read-only mapping.

    A name is that of the experiment in tables and pages; where an experiment has several seeds, it
    ends in the seed: `results["flhc"]`, or `results["flhc/seed_1"]`.

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
    """The run that a folder is, or else all runs below it.

    Args:
        objects: components that were given as objects when they ran.
    """
    unknown = sorted(set(objects) - set(COMPONENTS))
    if unknown:
        raise ExperimentError(f"unknown {unknown[0]!r}; known: {', '.join(COMPONENTS)}")
    folder = Path(path)
    if RunDirectory(folder).holds_run():
        checked_summary(RunDirectory(folder))
        return Result(folder, objects=objects)
    runs = [Result(run, objects=objects) for run in _runs_below(folder)]
    for run in runs:
        checked_summary(RunDirectory(run.path))
    if not runs:
        raise ExperimentError(f"{path} holds no run; expected a folder that `flray run` made")
    return Results(folder, runs)


def load_one(path: str | Path) -> Result:
    """The run in a folder, which must be one."""
    loaded = load(path)
    if isinstance(loaded, Results):
        folders = ", ".join(str(run.path) for run in loaded.values())
        raise ExperimentError(f"{path} holds {len(loaded)} runs; name the folder of one: {folders}")
    return loaded


def _runs_below(folder: Path) -> list[Path]:
    """The folders of runs; of a sweep those of its rows, without what its cache keeps."""
    folders = [file.parent for file in sorted(folder.rglob("config.yaml"))]
    sweeps = {path: enclosing_sweep(path.resolve()) for path in folders if holds_run(path)}
    return [path for path, sweep in sweeps.items() if sweep in (None, path.resolve().parent.parent)]


def _run_names(folders: Sequence[Path]) -> list[str]:
    """The name of each run: of its experiment, with the seed where an experiment has several.

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
