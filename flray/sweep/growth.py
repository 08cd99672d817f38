"""Growing a trunk: FedAvg as far as it is needed, observations, and the branches that go on.

Everything found is a file below the sweep's folder, so growth that was cut short goes on:
trunks/<key>/states/ keeps the states of the rounds that branch, trunks/<key>/<observation>.json
says which run each row belongs to, runs/<key>/ are run directories that stand after the clustering.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Apart, Branching, Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.client.training import Gradient
from flray.clustering.pipeline import Clustering
from flray.config.build import (
    Prepared,
    assemble,
    build_federation,
    open_directory,
    prepare,
    start_executor,
)
from flray.config.experiment import Experiment, parse_experiment
from flray.data.dataset import Ids
from flray.execution.executor import CLIENT_ERRORS
from flray.execution.federation import (
    GROUND_TRUTH_READS,
    Cohort,
    Federation,
    nobody,
)
from flray.execution.ray_pool import wait_for_resources
from flray.models.bank import ModelBank
from flray.records.atomic import replace_text
from flray.records.checkpoint import Checkpoint, CheckpointStore
from flray.records.clusterings import FOLDER, write_clustering
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.records.strands import METRICS, Strands
from flray.sweep.dry_round import metrics_of_round
from flray.sweep.keys import digest, state_digest
from flray.sweep.rows import Row, canonical
from flray.sweep.stages import Stages
from flray.sweep.tree import Observation, Trunk, continuation_key, run_path

NOTHING_COUNTED = {"client_steps": 0, "distances": 0, "trees": 0, "strands": 0}
COUNTED = ("client_steps", "clients_dropped", "bytes_")  # how columns of a round's cost begin
OF_EVALUATION = "_evaluation"  # how those end that are not of the round itself


@dataclass(frozen=True)
class Growth:
    """How far a trunk has come."""

    is_done: bool
    errors: dict[int, str] = field(default_factory=dict)  # by row number


def row_folder(number: int) -> str:
    """Where a row lies that shares the run of another, relative to the sweep's folder."""
    return f"rows/{number:04d}"


def trunk_folder(key: str) -> str:
    return f"trunks/{key}"


def grow(
    trunk: Trunk, folder: Path, shared: bool, should_stop: Callable[[], bool], pool: Any = None
) -> Growth:
    """Run a trunk and branch all its rows; what goes wrong is told of the rows it concerns.

    Args:
        shared: do rows whose clusterings lead to one state go on as one run?
        pool: the dispatcher of the sweep's shared client actors, if it has them.
    """
    home = folder / trunk_folder(trunk.key)
    with locked(home):
        if is_grown(trunk, folder):
            return Growth(is_done=True)
        try:
            grower = _start(trunk, folder, shared, pool)
        except CLIENT_ERRORS as error:
            return Growth(True, {row.number: said(error) for row in trunk.rows})
        try:
            return grower.grow(should_stop)
        finally:
            grower.fed.executor.close()


def is_grown(trunk: Trunk, folder: Path) -> bool:
    """Is there nothing left to do?"""
    home = folder / trunk_folder(trunk.key)
    return all(_is_branched(home, each) for each in trunk.observations)


def branches(trunk: Trunk, folder: Path) -> list[dict[str, Any]]:
    """What is known of the rows of a trunk: one record for each observation that is done."""
    home = folder / trunk_folder(trunk.key)
    records = (_record(home, each) for each in trunk.observations)
    return [record for record in records if record is not None]


def said(error: BaseException) -> str:
    """An error in a line: what is wrong with an experiment needs no name of a class."""
    text = str(error).strip().split("\n")[-1]
    known = type(error).__module__.startswith("flray.")
    return text if known and text else f"{type(error).__name__}: {text}"


def _record(home: Path, observation: Observation) -> dict[str, Any] | None:
    path = home / f"{observation.key}.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _is_branched(home: Path, observation: Observation) -> bool:
    """Errors are tried again by the next sweep over the folder."""
    record = _record(home, observation)
    return record is not None and not record["errors"]


def _start(trunk: Trunk, folder: Path, shared: bool, pool: Any) -> "_Grower":
    experiment = parse_experiment(trunk.plain)
    parts = prepare(experiment)
    if parts.plan and pool is None:
        wait_for_resources(parts.plan)
    fed = build_federation(experiment, parts, start_executor(parts, pool))
    return _Grower(trunk, folder, shared, experiment, parts, fed)


@dataclass(frozen=True)
class _Grower:
    trunk: Trunk
    folder: Path
    shared: bool
    experiment: Experiment  # the trunk's
    parts: Prepared
    fed: Federation  # the same for every row

    @property
    def home(self) -> Path:
        return self.folder / trunk_folder(self.trunk.key)

    @property
    def device(self) -> str:
        return "cpu" if self.parts.plan else self.parts.payload.settings.device

    def grow(self, should_stop: Callable[[], bool]) -> Growth:
        try:
            if not self._run_trunk(should_stop):
                return Growth(is_done=False)
        except CLIENT_ERRORS as error:
            return Growth(True, {row.number: said(error) for row in self.trunk.rows})
        for observation in self.trunk.observations:
            if _is_branched(self.home, observation):
                continue
            if should_stop():
                return Growth(is_done=False)
            record = self._branch_all(observation)
            replace_text(self.home / f"{observation.key}.json", json.dumps(record, indent=1))
        return Growth(is_done=True)

    def _run_trunk(self, should_stop: Callable[[], bool]) -> bool:
        """FedAvg up to the last clustering, keeping the states it is branched from."""
        directory = RunDirectory(self.folder / self.trunk.run)
        wanted, last = self.trunk.rounds_kept, self.trunk.last_round
        newest = CheckpointStore(directory.checkpoints).load_latest()
        if newest is not None and newest.round in wanted:
            self._keep(directory, newest.round)  # killed before it was
        if all(self._kept(t) is not None for t in wanted):
            return True
        seen = [0]

        def keep(row: dict[str, Any]) -> None:
            seen[0] = row["round"]
            if row["round"] in wanted:
                self._keep(directory, row["round"])

        open_directory(self.experiment, self.parts, directory)
        server = assemble(self.experiment, self.parts, self.fed, directory)
        enough = replace(
            server, on_round=keep, should_stop=lambda: seen[0] >= last or should_stop()
        )
        enough.run()
        return seen[0] >= last

    def _keep(self, directory: RunDirectory, t: int) -> None:
        """Put the newest checkpoint, of round t, aside: a run keeps only its last two."""
        found = CheckpointStore(directory.checkpoints).load_latest()
        if found is None or found.round != t or self._kept(t) is not None:
            return
        row = next(row for row in directory.rows() if row["round"] == t)
        self._store(t).save(t, found.state, {"row": row})

    def _kept(self, t: int) -> Checkpoint | None:
        return self._store(t).load_latest(self.device)

    def _store(self, t: int) -> CheckpointStore:
        return CheckpointStore(self.home / "states" / f"round_{t:06d}")

    def _bank(self, t: int) -> ModelBank:
        if t == 0:
            return self.fed.initial_bank()
        kept = self._kept(t)
        assert kept is not None, t
        bank: ModelBank = kept.state.bank
        return bank

    def _branch_all(self, observation: Observation) -> dict[str, Any]:
        """Observe, decide for every row, and write the run directories that go on."""
        n = observation.round
        fed = self.fed.during(self.parts.payload.timeline, n) if n else self.fed
        bank = self._bank(n)
        first: Branching[Any] = parse_experiment(observation.rows[0].plain).algorithm.build()
        self._forget()
        try:
            observed = first.observe(bank, n, fed)
        except CLIENT_ERRORS as error:
            errors = {str(row.number): said(error) for row in observation.rows}
            return {"round": n, "rows": {}, "errors": errors} | NOTHING_COUNTED
        splits = self._may_split(observation)
        seen = _Seen(n, fed, bank, observed, self._counts(), Stages(observed[0], fed, n), splits)
        found: dict[str, Any] = {}
        errors = {}
        for row in observation.rows:
            try:
                found[str(row.number)] = self._branch(row, seen, found)
            except CLIENT_ERRORS as error:
                errors[str(row.number)] = said(error)
        return {
            "round": n,
            "rows": found,
            "errors": errors,
            "client_steps": seen.counts["client_steps"],
            "distances": seen.stages.number("distance"),
            "trees": seen.stages.number("tree"),
            "strands": len(seen.trained_by),
        }

    def _branch(self, row: Row, seen: "_Seen", found: dict[str, Any]) -> dict[str, Any]:
        self._forget()  # what a row that failed has counted
        row, clustering = self._decided(row, seen)
        experiment = parse_experiment(row.plain)
        algorithm: Branching[Any] = experiment.algorithm.build()
        state = algorithm.branch(seen.bank, seen.observed, clustering, seen.fed)
        own_counts = self._counts()  # of the decision, and of placing who is not clustered
        counts = seen.counts.copy()
        counts.update(own_counts)  # not +, which drops what is 0
        # A run is marked if ground truth was read, so rows share it only if both or neither did.
        start = digest([state_digest(state), counts[GROUND_TRUTH_READS]])
        whole = self._runs_whole(row, algorithm, state, seen)
        key = continuation_key(self.trunk, row, seen.round, start, self.shared and not whole)
        graft = Graft(algorithm, state, clustering, counts)
        path = self.folder / run_path(key)
        strands = {} if whole else self._strands(row, algorithm, state, seen)
        new = [clients for name, clients in strands.items() if name not in seen.trained_by]
        if not path.exists():
            only = np.sort(np.concatenate([nobody(), *new])) if strands else None
            self._make_run(experiment, None if whole else graft, seen.round, path, only)
        sources: dict[str, list[int]] = {}
        for name, clients in strands.items():
            trainer = seen.trained_by.setdefault(name, key)
            sources[trainer] = sorted([*sources.get(trainer, []), *map(int, clients)])
        owners = {each["run"] for each in found.values() if each["own"]}
        own = key not in owners and canonical(RunDirectory(path).config()) == canonical(row.plain)
        if not own:
            self._write_row(row, experiment, seen.round, clustering)
        return {
            "run": key,
            "own": own,
            "overrides": row.overrides,
            "plain": row.plain,
            "client_steps": own_counts["client_steps"],
            "sources": sources,  # the clients that other runs train too, by run; {}: none
            "strands": len(strands),
            "whole": whole,  # the run begins with round 1, not after the clustering
        }

    def _may_split(self, observation: Observation) -> bool:
        """May clusters that several rows have be trained once? Not if anybody comes or goes."""
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(1)
        everybody = len(split.clients) == split.num_clients and not settings.events
        is_worth_it = self.shared and len(observation.rows) > 1
        return is_worth_it and everybody and settings.on_client_failure == "raise"

    def _runs_whole(self, row: Row, algorithm: Branching[Any], state: Any, seen: "_Seen") -> bool:
        """True if rounds return metrics that neither the trunk nor strands record."""
        n, timeline = seen.round, self.parts.payload.timeline
        own = {key: value for key, value in row.plain["algorithm"].items() if key != "clustering"}
        if (key := canonical([own, row.plain["rounds"]])) not in seen.own_metrics:
            found: frozenset[str] = frozenset()
            if row.plain["rounds"] > n:
                after = self.fed.during(timeline, n + 1)
                found |= metrics_of_round(algorithm, after, n + 1, state)
            if n > 1:  # round 1 is not yet that of the clustering
                found |= metrics_of_round(algorithm, self.fed.during(timeline, 1), 1)
            seen.own_metrics[key] = bool(found - METRICS)
        return seen.own_metrics[key]

    def _strands(
        self, row: Row, algorithm: Branching[Any], state: Any, seen: "_Seen"
    ) -> dict[str, Ids]:
        """Clients that never hear others after the branch, by a name for all that decides them."""
        ends_here = row.plain["rounds"] <= seen.round
        if not seen.splits or ends_here or not isinstance(algorithm, Apart):
            return {}
        bank = algorithm.deploy(state, np.arange(seen.fed.num_clients), seen.fed)
        own = row.plain["algorithm"]["name"] if algorithm.state_decides else row.plain["algorithm"]
        decided = [seen.round, own, row.plain["rounds"]]
        return {
            digest([*decided, clients.tolist(), beside, bank.digests(clients)]): clients
            for clients, beside in algorithm.strands(state, seen.fed)
        }

    def _decided(self, row: Row, seen: "_Seen") -> tuple[Row, Clustering]:
        clustering = seen.decide(row)
        if row.merge_point is None:
            return row, clustering
        tree = clustering.partition.linkage
        assert tree is not None  # of hierarchical, which between_merges requires
        row = row.at(row.merge_point.threshold(tree))
        self._forget()
        return row, seen.decide(row)

    def _make_run(
        self, experiment: Experiment, graft: "Graft | None", n: int, path: Path, only: Ids | None
    ) -> None:
        """Make a run directory; it appears in full or not at all.

        Args:
            graft: what the run goes on with after round n; None: it begins with round 1.
        """
        temporary = path.with_name(f".{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        directory = RunDirectory(temporary)
        open_directory(experiment, self.parts, directory)
        if graft is not None:
            self._graft(experiment, graft, n, directory)
        if only is not None:
            Strands(temporary).start(only)
        os.replace(temporary, path)

    def _graft(
        self, experiment: Experiment, graft: "Graft", n: int, directory: RunDirectory
    ) -> None:
        """Bring a new run directory to where it stands after round n and the clustering."""
        store = CheckpointStore(directory.checkpoints)
        server = assemble(experiment, self.parts, self.fed, directory)
        if n == 0:
            replace(server, algorithm=graft).begin(store)
        else:
            directory.adopt(RunDirectory(self.folder / self.trunk.run), n - 1)
            store.save(n - 1, FedAvgState(self._bank(n - 1)))
            kept = self._kept(n)
            assert kept is not None, n
            graft = replace(graft, row=kept.extra["row"])
            replace(server, algorithm=graft, should_stop=lambda: True).run()
        self._forget()

    def _write_row(self, row: Row, experiment: Experiment, n: int, found: Clustering) -> None:
        """The folder of a row that shares a run: its configuration, and its own clustering."""
        path = self.folder / row_folder(row.number)
        shutil.rmtree(path, ignore_errors=True)
        open_directory(experiment, self.parts, RunDirectory(path))
        evidence = found.evidence()
        groups = self.parts.payload.timeline.at(max(n, 1)).groups
        if groups is not None:
            evidence |= {"groups": groups[found.clients]}
        write_clustering(path / FOLDER, n, evidence)

    def _counts(self) -> Counter[str]:
        counts = Counter(self.fed.meter.counts)
        self._forget()
        return counts

    def _forget(self) -> None:
        self.fed.meter.read_and_reset()


@dataclass(frozen=True)
class _Seen:
    """What the rows of one observation look at."""

    round: int
    fed: Federation  # as it is in that round
    bank: ModelBank
    observed: Any  # points of the clients, and the signature's memory
    counts: Counter[str]
    stages: Stages
    splits: bool  # may rows share some of their clusters?
    trained_by: dict[str, str] = field(default_factory=dict)  # strand -> run
    # By the fields of an algorithm: do its rounds return metrics of their own?
    own_metrics: dict[str, bool] = field(default_factory=dict)

    def decide(self, row: Row) -> Clustering:
        algorithm = parse_experiment(row.plain).algorithm.build()
        return self.stages.decide(algorithm.clustering, row.plain["algorithm"]["clustering"])


@dataclass(frozen=True)
class Graft:
    """An algorithm in the round of its clustering, of which everything is known already.

    The server's own loop records and evaluates it, so a branch begins as the run of a row would be.
    """

    algorithm: Branching[Any]  # Any: the state is the algorithm's own
    state: Any
    clustering: Clustering
    counts: Counter[str]  # of the observation
    row: dict[str, Any] = field(default_factory=dict)  # the trunk's, of this round

    @property
    def gradient(self) -> Gradient:
        return self.algorithm.gradient

    def init(self, fed: Federation) -> Outcome[Any]:
        fed.meter.counts.update(self.counts)
        return Outcome(self.state, clusterings=(self.clustering,))

    def cohort(self, state: FedAvgState, t: int, fed: Federation) -> Cohort:
        return FedAvg().cohort(state, t, fed)

    def round(self, state: FedAvgState, cohort: Cohort, fed: Federation) -> Outcome[Any]:
        # A branch is evaluated anew, so what the trunk's evaluation cost is not its own.
        costs = {
            key: value
            for key, value in self.row.items()
            if key.startswith(COUNTED) and not key.endswith(OF_EVALUATION)
        }
        fed.meter.counts.update(costs)
        fed.meter.counts.update(self.counts)
        metrics = {k: v for k, v in self.row.items() if k == "train_loss"}
        return Outcome(self.state, metrics, (self.clustering,))

    def deploy(self, state: Any, clients: Ids, fed: Federation) -> ModelBank:
        if isinstance(state, FedAvgState):  # as it was before the clustering
            return state.bank
        return self.algorithm.deploy(state, clients, fed)

    def partition(self, state: Any) -> Ids:
        return self.algorithm.partition(state)

    @property
    def assign(self) -> Any:  # Any: a method that only some algorithms have
        return self.algorithm.assign  # type: ignore[attr-defined]  # raised where it has none
