"""A trial: the run of one row of a sweep, which looks up before it computes.

A branching row takes the prefix, the signatures and the stages of its clustering from the cache, or
puts them there. After the clustering it goes on as one run directory `runs/<key>`, together with
the rows whose clusterings lead to the same state: it trains the components that nobody has trained
and takes the others from the cache. Any other row is an ordinary run.
"""

import copy
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Branching, Separable
from flray.algorithms.fedavg import FedAvg
from flray.clustering.pipeline import Clustering
from flray.config.build import (
    Prepared,
    assemble,
    build_federation,
    open_directory,
    prepare,
    start_executor,
)
from flray.config.experiment import parse_experiment
from flray.execution.client_actor import wait_for_resources
from flray.execution.executor import CLIENT_ERRORS, Executor, LazyExecutor
from flray.execution.federation import Federation
from flray.records.atomic import replace_text
from flray.records.clusterings import FOLDER, write_clustering
from flray.records.components import FOLDER as PARTS_OF_RUN
from flray.records.components import PartRecords
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import Row as RoundRow
from flray.server.loop import Server, ignore
from flray.sweep.branch import Branch, OwnMetrics, branches
from flray.sweep.cache import Cache, OutOfTime, one_line_message, read_value, write_value
from flray.sweep.components import (
    KIND,
    Components,
    PartialFederation,
    PartRecorder,
    clients_of,
    put_together,
    tables_of,
)
from flray.sweep.folder import (
    RowState,
    alive_file,
    fill_shared_row,
    row_path,
    run_path,
    write_state,
)
from flray.sweep.keys import (
    branch_key,
    device_of,
    digest,
    observation_key,
    prefix_key,
    run_key,
    state_digest,
)
from flray.sweep.prefix import Prefix
from flray.sweep.rows import Row, canonical
from flray.sweep.stages import Stages
from flray.tracking.mirrors import Draw, no_figures, tracked


@dataclass(frozen=True)
class Job:
    """What the trials of a sweep have in common."""

    folder: Path
    cache: Cache
    code: dict[str, str]
    has_gpu: bool
    wanted: frozenset[int]  # rounds after which rows may cluster
    is_scheduled: bool = False  # does each row run on its own, reporting its rounds?
    pool: Any = None  # Any: the dispatcher of shared client actors; None: a trial has its own
    draw: Draw = no_figures  # what W&B is shown of a run

    @property
    def runs(self) -> Cache:
        """Claims on the sweep's own runs."""
        return replace(self.cache, root=self.folder)


def run_row(row: Row, job: Job, on_round: Callable[[RoundRow], None] = ignore) -> RowState:
    """Bring a row to its end; what goes wrong is recorded with the row."""
    trial = Trial(row, job, on_round)
    try:
        trial.run()
    except OutOfTime:
        trial.note(status="unfinished")
    except CLIENT_ERRORS as error:
        trial.note(status="failed", error=one_line_message(error))
    finally:
        trial.executor.close()
    return trial.state


@lru_cache(maxsize=2)
def _prepared(text: str) -> Prepared:
    return prepare(parse_experiment(json.loads(text)))


class Trial:
    """The run of one row; `state` is what has become of it so far."""

    def __init__(self, row: Row, job: Job, on_round: Callable[[RoundRow], None]) -> None:
        point = row.merge_point
        alive = alive_file(job.folder, row.number)
        job = replace(job, cache=replace(job.cache, alive=alive))
        self.row, self.job, self.on_round = row, job, on_round
        self.state = RowState(
            row.number, row.overrides, row.plain, merge_place=point.place if point else None
        )
        self.experiment = parse_experiment(row.plain)
        self.executor = LazyExecutor(self._start_executor)

    def note(self, **changes: Any) -> None:  # Any: fields of RowState
        """Record what has become of the row."""
        self.state = replace(self.state, **changes)
        write_state(self.job.folder, self.state)

    def run(self) -> None:
        self.note(status="unfinished")
        if self.job.cache.is_over():
            raise OutOfTime
        algorithm = self.experiment.algorithm.build()
        if branches(self.experiment):
            self._run_branch(algorithm)
        else:
            self._run_alone(begins_with_prefix=type(algorithm) is FedAvg)

    @cached_property
    def parts(self) -> Prepared:
        """Data and module; the module is a copy, for whoever trains changes it."""
        found = _prepared(canonical(self.row.plain | {"algorithm": "fedavg", "tracking": "none"}))
        module = copy.deepcopy(found.payload.module)
        return replace(found, payload=replace(found.payload, module=module))

    @cached_property
    def fed(self) -> Federation:
        return build_federation(self.experiment, self.parts, self.executor)

    @cached_property
    def prefix(self) -> Prefix:
        device = device_of(self.experiment, self.job.has_gpu)
        key = prefix_key(self.row.plain, self.job.code, device)
        wanted = self.job.wanted
        return Prefix(key, self.job.cache, self.parts, self.fed, self.row.plain, wanted)

    def _start_executor(self) -> Executor:
        if self.parts.plan and self.job.pool is None:
            wait_for_resources(self.parts.plan)
        return start_executor(self.parts, self.job.pool)

    def _run_alone(self, begins_with_prefix: bool = False) -> None:
        """A run from round 1; FedAvg begins with as much of the prefix as others need."""
        rounds = self.experiment.settings.rounds
        shared = [n for n in self.job.wanted if n < rounds] if begins_with_prefix else []
        begin = max(shared, default=0)
        self.prefix.reach(begin)
        self.note(begin=begin, steps_added=0, components=[])

        def make(path: Path) -> None:
            directory = self._opened(path, self._start_of(begin or -1))
            self._train(assemble(self.experiment, self.parts, self.fed, directory))

        self._settle(run_key(self.prefix.key, self.state.plain), make)

    def _run_branch(self, algorithm: Branching[Any]) -> None:
        n = algorithm.rounds_before
        self.prefix.reach(n)
        branch, steps_observed = self._decide(n)
        mine = branch.algorithm
        start = [state_digest(branch.state), dict(branch.counts)]
        own = self.row.number if self.job.is_scheduled else None
        key = branch_key(self.prefix.key, self.state.plain, mine, [*start, own])
        components = self._components(branch)
        placing = branch.counts["client_steps"] - steps_observed
        added = placing if n or components else -steps_observed
        begin = None if components else n
        self.note(begin=begin, steps_added=added, components=list(components))

        def make(path: Path) -> None:
            if components:
                self._make_of_components(path, branch, components)
            else:
                directory = self._opened(path, self._start_of(n - 1))
                server = assemble(self.experiment, self.parts, self.fed, directory)
                self._train(replace(server, algorithm=branch))

        try:
            self._settle(key, make, branch.clustering)
        except OwnMetrics:
            shutil.rmtree(self.job.folder / run_path(key), ignore_errors=True)
            shutil.rmtree(self._part_folder(key), ignore_errors=True)
            self._run_alone()

    def _decide(self, n: int) -> tuple[Branch, int]:
        """The state after the clustering, and the client steps that the signatures took."""
        algorithm: Branching[Any] = self.experiment.algorithm.build()
        fed = self.fed.during(self.parts.payload.timeline, n) if n else self.fed
        bank = self.prefix.bank(n)
        key = observation_key(self.prefix.key, self.row.plain, algorithm)

        def observe(folder: Path) -> int:
            self._forget()
            observed = algorithm.observe(bank, n, fed)
            counts = dict(fed.meter.counts)
            write_value(folder, observed, {"counts": counts})
            return int(counts.get("client_steps", 0))

        found = read_value(self.job.cache.obtain("observation", key, observe))
        observed, counts = found.state, Counter(found.extra["counts"])
        stages = Stages(self.job.cache, observed[0], key)

        def decide() -> Clustering:
            self._forget()
            plain = self.state.plain["algorithm"]["clustering"]
            pipeline = self.experiment.algorithm.build().clustering
            return stages.decide(pipeline, plain, fed, n)

        clustering = decide()
        if self.row.merge_point is not None:
            tree = clustering.partition.linkage
            assert tree is not None  # of hierarchical, which between_merges requires
            row = self.row.at(self.row.merge_point.threshold(tree))
            self.experiment = parse_experiment(row.plain)
            self.note(overrides=row.overrides, plain=row.plain)
            clustering = decide()
        algorithm = self.experiment.algorithm.build()
        state = algorithm.branch(bank, observed, clustering, fed)
        steps_observed = counts["client_steps"]
        counts.update(fed.meter.counts)  # not +, which drops what is 0
        self._forget()
        row_of_prefix = self.prefix.row(n) if n else {}
        # Without rounds before, a run that trains everybody loses no metric.
        are_known = n > 0 or self._may_be_divided(algorithm)
        branch = Branch(algorithm, state, clustering, counts, row_of_prefix, are_known)
        return branch, steps_observed

    def _may_be_divided(self, algorithm: Branching[Any]) -> bool:
        """May components be trained once for several rows? Not if anybody comes or goes."""
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(1)
        everybody = len(split.clients) == split.num_clients and not settings.events
        everybody = everybody and not settings.evaluate.last_trained  # components keep no such part
        goes_on = settings.rounds > algorithm.rounds_before
        is_shared = not self.job.is_scheduled and isinstance(algorithm, Separable)
        return is_shared and goes_on and everybody and settings.on_client_failure == "raise"

    def _components(self, branch: Branch) -> Components:
        """Clients that hear nobody else after the clustering, by all that decides them."""
        algorithm, plain = branch.algorithm, self.state.plain
        if not self._may_be_divided(algorithm) or not isinstance(algorithm, Separable):
            return {}
        bank = algorithm.deploy(branch.state, np.arange(self.fed.num_clients), self.fed)
        return {
            branch_key(
                self.prefix.key,
                plain,
                algorithm,
                [clients.tolist(), beside, bank.digests(clients)],
            ): clients
            for clients, beside in algorithm.components(branch.state, self.fed)
        }

    def _settle(
        self, key: str, make: Callable[[Path], None], clustering: Clustering | None = None
    ) -> None:
        """Have the row's run: made here, or by another row that goes on alike."""
        job, runs = self.job, self.job.runs
        directory = RunDirectory(job.folder / run_path(key))
        self.note(run=key)
        while directory.summary() is None:
            with runs.claim("claims", key) as is_mine:
                if is_mine and directory.summary() is None:
                    with runs.failing_once("claims", key):
                        self._become_owner(key)
                        make(directory.path)
            if directory.summary() is None:
                runs.wait()
        is_own = self._owner(key) == self.row.number
        self.note(status="done" if is_own else "shared", is_own=is_own, error=None)
        if not is_own:
            self._fill_row(clustering)

    def _owner(self, key: str) -> int:
        """The row whose configuration the run has."""
        file = self.job.folder / "claims" / f"{key}.owner"
        return int(file.read_text(encoding="utf-8")) if file.is_file() else -1

    def _become_owner(self, key: str) -> None:
        """Go on with what this row left of a run; what another one left is begun anew."""
        if self._owner(key) != self.row.number:
            shutil.rmtree(self.job.folder / run_path(key), ignore_errors=True)
            shutil.rmtree(self._part_folder(key), ignore_errors=True)
            replace_text(self.job.folder / "claims" / f"{key}.owner", str(self.row.number))

    def _fill_row(self, clustering: Clustering | None) -> None:
        """The folder of a row that shares a run: its configuration and clustering are its own."""
        path = self.job.folder / row_path(self.row.number)
        shutil.rmtree(path, ignore_errors=True)
        open_directory(self.experiment, self.parts, RunDirectory(path))
        if clustering is not None:
            n = self.experiment.algorithm.build().rounds_before
            evidence = clustering.evidence()
            groups = self.parts.payload.timeline.at(max(n, 1)).groups
            if groups is not None:
                evidence |= {"groups": groups[clustering.clients]}
            write_clustering(path / FOLDER, n, evidence)
        fill_shared_row(self.job.folder, self.state)

    def _opened(self, path: Path, fill: Callable[[RunDirectory], None]) -> RunDirectory:
        """A run directory, made in full or not at all where there is none yet."""
        if not path.exists():
            temporary = path.with_name(f".{path.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.parent.mkdir(parents=True, exist_ok=True)
            open_directory(self.experiment, self.parts, RunDirectory(temporary))
            fill(RunDirectory(temporary))
            os.replace(temporary, path)
        return RunDirectory(path)

    def _start_of(self, t: int) -> Callable[[RunDirectory], None]:
        """What brings a new run directory to where it stands after round t; -1: nothing."""
        return lambda directory: self.prefix.begin(directory, t) if t >= 0 else None

    def _train(self, server: Server) -> None:
        """Run everything that is left of a run."""
        directory, group = server.directory, self.job.folder.name
        following = tracked(self.experiment, directory.path, self.on_round, self.job.draw, group)
        self._forget()
        with following as on_round:
            should_stop = self.job.cache.is_over
            if not replace(server, on_round=on_round, should_stop=should_stop).run():
                raise OutOfTime
        # Many runs with a model for each cluster fill a disk; config.yaml gives these bits again.
        shutil.rmtree(directory.checkpoints, ignore_errors=True)

    def _part_folder(self, key: str) -> Path:
        return self.job.folder / "parts" / key

    def _make_of_components(self, path: Path, branch: Branch, components: Components) -> None:
        """Train the components that nobody has, wait for the others, put the records together."""
        cache, home = self.job.cache, self._part_folder(path.name)

        def is_there(key: str) -> bool:
            return cache.path(KIND, key).exists()

        made: RunDirectory | None = None
        while made is None or not all(map(is_there, components)):
            with ExitStack() as claims:
                mine = {
                    key: clients
                    for key, clients in components.items()
                    if not is_there(key)
                    and claims.enter_context(cache.claim(KIND, key))
                    and not is_there(key)
                }
                if mine or made is None:
                    made = self._train_part(home, branch, mine)
            if not all(map(is_there, components)):
                cache.wait()
        put_together(made, self.experiment, self.parts, tables_of(cache, components))
        shutil.rmtree(made.checkpoints, ignore_errors=True)
        os.replace(made.path, path)
        shutil.rmtree(path / PARTS_OF_RUN)
        shutil.rmtree(home)

    def _train_part(self, home: Path, branch: Branch, mine: Components) -> RunDirectory:
        """A run of the row that trains these components and no other client."""
        n = branch.algorithm.rounds_before

        def fill(directory: RunDirectory) -> None:
            self._start_of(n - 1)(directory)
            PartRecords(directory.path).start(mine)

        directory = self._opened(home / digest(sorted(mine)), fill)
        if directory.summary() is not None:
            return directory  # killed before it was moved
        fed = PartialFederation.of(self.fed, clients_of(mine), begin=n)
        server = assemble(self.experiment, self.parts, fed, directory)
        recorder = PartRecorder(fed, directory, self.job.cache)
        self._forget()
        is_done = replace(
            server, algorithm=branch, recorder=recorder, should_stop=self.job.cache.is_over
        ).run()
        if not is_done:
            raise OutOfTime
        return directory

    def _forget(self) -> None:
        self.fed.meter.read_and_reset()
