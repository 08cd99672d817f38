"""What a user takes away from a run: numbers, clusters, figures, and the model of each client."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule

from flray.config.build import deployed_models
from flray.config.experiment import COMPONENTS, Experiment, parse_experiment
from flray.config.objects import OBJECT
from flray.errors import ExperimentError
from flray.models.bank import ModelBank, load_params
from flray.records.atomic import replace_file
from flray.records.clusterings import ClusteringRecord, read_clusterings
from flray.records.columns import CLIENT, MODEL, PART, ROUND
from flray.records.run_directory import RunDirectory
from flray.report.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.report.configuration import THRESHOLD
from flray.report.figures import accuracy_figure, clients_figure, efficiency_figure, when
from flray.report.runs import read_run
from flray.server.summary import checked_summary

OF_A_RUN = {"accuracy": accuracy_figure, "clients": clients_figure, "bytes": efficiency_figure}
OF_A_CLUSTERING = ("distance", "embedding", "graph")


@dataclass(frozen=True)
class Result:
    """A run directory read back, finished or not."""

    path: Path
    experiment: Experiment | None = None  # None: of config.yaml
    objects: Mapping[str, Any] | None = None  # Any: components that config.yaml cannot describe

    @property
    def summary(self) -> dict[str, Any]:  # Any: JSON
        """The numbers of summary.json; empty when the run stopped before its last round."""
        return checked_summary(self._directory) or {}

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
        replace_file(Path(path), lambda file: torch.save(checkpoint, file))
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
            if OBJECT in plain[kind] and kind not in objects:
                raise ExperimentError(
                    f"the {kind} of {self.path} was given as an object, which config.yaml does not "
                    f"hold: flray.load(path, {kind}=...)"
                )
        found = parse_experiment(plain | objects)
        held, given = plain["dataset"].get(OBJECT), found.plain["dataset"].get(OBJECT)
        if "dataset" in objects and held != given:
            raise ExperimentError(f"{self.path} ran on another dataset than the one given")
        return found

    @cached_property
    def _deployed(self) -> tuple[LightningModule, ModelBank]:
        threads = torch.get_num_threads()
        try:
            return deployed_models(self._experiment, self._directory)
        finally:
            torch.set_num_threads(threads)

    def _arguments(self, module: LightningModule) -> dict[str, Any]:  # Any: YAML
        """What the module's class is built with again."""
        own = dict(module.hparams)
        if own or OBJECT in self._experiment.model.plain:
            return own
        dataset = self._experiment.dataset.build().load()
        component = self._experiment.model
        return component.arguments(image_shape=dataset.image_shape, num_classes=dataset.num_classes)


def load(path: str | Path, **objects: Any) -> Result:  # Any: components
    """The run in a folder; components that were given as objects are given again."""
    if not RunDirectory(path).holds_run():
        raise ExperimentError(f"{path} holds no run; expected a folder that `flray run` made")
    unknown = sorted(set(objects) - set(COMPONENTS))
    if unknown:
        raise ExperimentError(f"unknown {unknown[0]!r}; known: {', '.join(COMPONENTS)}")
    checked_summary(RunDirectory(path))
    return Result(Path(path), objects=objects)
