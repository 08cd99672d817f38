"""A trial: the run of one row of a sweep, which looks up before it computes.

A branching row takes the prefix, the signatures and the stages of its clustering from the cache, or
puts them there. After the clustering it trains the components that nobody has trained and takes
the others from the cache. Any other row is an ordinary run. The records of a run are an entry of
the cache too: rows whose clusterings lead to the same state copy them.
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
from flray.errors import one_line_message
from flray.execution.client_actor import wait_for_resources
from flray.execution.executor import CLIENT_ERRORS, Executor, LazyExecutor
from flray.execution.federation import Federation
from flray.execution.partial import PartialFederation
from flray.records.columns import CLIENT_STEPS
from flray.records.components import FOLDER as PARTS_OF_RUN
from flray.records.components import PartRecords
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow
from flray.server.loop import Server, ignore
from flray.sweep.branch import Branch, OwnMetrics, branches
from flray.sweep.cache import Cache, OutOfTime, read_value, write_value
from flray.sweep.components import (
    KIND,
    ComponentRecorder,
    Components,
    clients_of,
    put_together,
    tables_of,
)
from flray.sweep.folder import (
    RowState,
    alive_file,
    new_state,
    read_states,
    run_path,
    write_state,
)
from flray.sweep.keys import (
    branch_key,
    canonical,
    device_of,
    digest,
    observation_key,
    prefix_key,
    run_key,
    state_digest,
)
from flray.sweep.prefix import Prefix
from flray.sweep.rows import SweepRow
from flray.sweep.stages import with_stored_stages
from flray.tracking.mirrors import Draw, no_figures, tracked

OWNER = "owner"  # in the entry of a run: the sweep and the row that computed it


@dataclass(frozen=True)
class Job:
    """What the trials of a sweep have in common."""

    folder: Path
    cache: Cache
    code: dict[str, str]
    has_gpu: bool
    wanted: frozenset[int]  # rounds after which rows may cluster
    is_scheduled: bool = False  # each row runs on its own and reports its rounds
    pool: Any = None  # Any: the dispatcher of shared client actors; None: a trial has its own
    draw: Draw = no_figures  # what W&B is shown of a run


def run_row(row: SweepRow, job: Job, on_round: Callable[[RoundRow], None] = ignore) -> RowState:
    """Run a row to its end; an error is recorded with the row."""
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

    def __init__(self, row: SweepRow, job: Job, on_round: Callable[[RoundRow], None]) -> None:
        job = replace(job, cache=replace(job.cache, alive=alive_file(job.folder, row.number)))
        self.row, self.job, self.on_round = row, job, on_round
        fresh = new_state(row)
        before = read_states(job.folder, row.number).get(row.number, fresh)
        self.state = replace(fresh, run=before.run, is_whole=before.is_whole)
        self.experiment = parse_experiment(row.plain)
        self.executor = LazyExecutor(self._start_executor)
        self.directory = RunDirectory(job.folder / run_path(row.number))

    def note(self, **changes: Any) -> None:  # Any: fields of RowState
        """Record what has become of the row."""
        self.state = replace(self.state, **changes)
        write_state(self.job.folder, self.state)

    def run(self) -> None:
        self.note(status="unfinished")
        if self.job.cache.is_over():
            raise OutOfTime
        if branches(self.experiment) and not self.state.is_whole:
            try:
                return self._run_branch()
            except OwnMetrics:
                self.note(is_whole=True)
        self._run_whole()

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

    def _run_whole(self) -> None:
        """Run from round 1; FedAvg begins with as much of the prefix as others need."""
        is_fedavg = type(self.experiment.algorithm.build()) is FedAvg
        rounds = self.experiment.settings.rounds
        begin = max((n for n in self.job.wanted if is_fedavg and n < rounds), default=0)
        if begin:
            self.prefix.after(begin)
        self.note(begin=begin, components=[], steps_placed=0, steps_found=0)

        def fill(directory: RunDirectory) -> None:
            if begin:
                self.prefix.begin(directory, begin, begin)

        def make() -> None:
            directory = self._opened(self.directory.path, fill)
            self._train(assemble(self.experiment, self.parts, self.fed, directory))

        self._settle(run_key(self.prefix.key, self.state.plain), make)

    def _run_branch(self) -> None:
        n = self.experiment.algorithm.build().rounds_before
        if n:
            self.prefix.after(n)
        branch, steps_observed = self._decide(n)
        start = [state_digest(branch.state), dict(branch.counts)]
        own = self.row.number if self.job.is_scheduled else None
        key = branch_key(self.prefix.key, self.state.plain, branch.algorithm, [*start, own])
        components = self._components(branch)
        steps = branch.counts[CLIENT_STEPS]
        self.note(
            begin=None if components else n,
            components=list(components),
            steps_placed=steps - steps_observed,
            steps_found=0 if n else steps,  # a clustering before round 1 is in its row
        )

        def make() -> None:
            if components:
                return self._train_components(branch, components)
            directory = self._opened(self.directory.path, self._start_of(n))
            server = assemble(self.experiment, self.parts, self.fed, directory)
            return self._train(replace(server, algorithm=branch))

        self._settle(key, make, branch.clustering)

    def _decide(self, n: int) -> tuple[Branch, int]:
        """The state after the clustering, and the client steps that the signatures took."""
        algorithm: Branching[Any] = self.experiment.algorithm.build()
        fed = self.fed.during(self.parts.payload.timeline, n) if n else self.fed
        bank = self.prefix.bank(n, n)
        key = observation_key(self.prefix.key, self.row.plain, algorithm)

        def observe(folder: Path) -> int:
            fed.meter.read_and_reset()
            observed = algorithm.observe(bank, n, fed)
            counts = dict(fed.meter.counts)
            write_value(folder, observed, {"counts": counts})
            return int(counts.get(CLIENT_STEPS, 0))

        found = read_value(self.job.cache.obtain("observation", key, observe))
        observed, counts = found.state, Counter(found.extra["counts"])

        def decide() -> Clustering:
            fed.meter.read_and_reset()
            plain = self.state.plain["algorithm"]["clustering"]
            pipeline = self.experiment.algorithm.build().clustering
            stored = with_stored_stages(pipeline, plain, self.job.cache, key)
            return stored.decide(observed[0], fed, n)

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
        steps_observed = counts[CLIENT_STEPS]
        counts.update(fed.meter.counts)  # not +, which drops what is 0
        fed.meter.read_and_reset()
        row_of_prefix = self.prefix.row(n) if n else {}
        # Without rounds before, a run that trains everybody loses no metric.
        are_known = n > 0 or self._may_be_divided(algorithm)
        branch = Branch(algorithm, state, clustering, counts, row_of_prefix, are_known)
        return branch, steps_observed

    def _may_be_divided(self, algorithm: Branching[Any]) -> bool:
        """True if components may be trained once for several rows: nobody comes or goes."""
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

        def key(clients: Any, beside: object) -> str:  # Any: ids
            start = [clients.tolist(), beside, bank.digests(clients)]
            return branch_key(self.prefix.key, plain, algorithm, start)

        found = algorithm.components(branch.state, self.fed)
        return {key(clients, beside): clients for clients, beside in found}

    def _settle(
        self, key: str, make: Callable[[], None], clustering: Clustering | None = None
    ) -> None:
        """Fill the row's folder: by its own run, or with the records of a row that goes on alike.

        Args:
            make: brings the run in the row's folder to its end.
        """
        if self.state.run != key:  # what is in the folder led elsewhere
            shutil.rmtree(self.directory.path, ignore_errors=True)
            shutil.rmtree(self._part_folder, ignore_errors=True)
        self.note(run=key)
        mine = f"{self.job.cache.sweep} {self.row.number}"

        def compute(entry: Path) -> int:
            if self.directory.summary() is None:
                make()
            self.directory.copy_records_to(entry)
            (entry / OWNER).write_text(mine, encoding="utf-8")
            return 0  # what a row trains is counted by its rounds, finished or not

        entry = self.job.cache.obtain("run", key, compute)
        is_own = (entry / OWNER).read_text(encoding="utf-8") == mine
        if not is_own:
            self._copy(entry, clustering)
        self.note(status="done" if is_own else "shared", error=None)

    def _copy(self, entry: Path, clustering: Clustering | None) -> None:
        """Copy the records of a run; the configuration and the first clustering are the row's."""

        def fill(directory: RunDirectory) -> None:
            RunDirectory(entry).copy_records_to(directory.path)
            if clustering is not None:
                n = self.experiment.algorithm.build().rounds_before
                evidence = clustering.evidence()
                groups = self.parts.payload.timeline.at(max(n, 1)).groups
                if groups is not None:
                    evidence |= {"groups": groups[clustering.clients]}
                directory.append_clustering(n, evidence)

        shutil.rmtree(self.directory.path, ignore_errors=True)
        self._opened(self.directory.path, fill)

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

    def _start_of(self, n: int) -> Callable[[RunDirectory], None]:
        """What brings a new run directory to the start of round n, the one of the clustering."""
        return lambda directory: self.prefix.begin(directory, n, n - 1) if n else None

    def _train(self, server: Server) -> None:
        """Run everything that is left of a run."""
        directory, group = server.directory, self.job.folder.name
        following = tracked(self.experiment, directory.path, self.on_round, self.job.draw, group)
        self.fed.meter.read_and_reset()
        with following as on_round:
            should_stop = self.job.cache.is_over
            if not replace(server, on_round=on_round, should_stop=should_stop).run():
                raise OutOfTime
        # Many runs with a model for each cluster fill a disk; config.yaml gives these bits again.
        shutil.rmtree(directory.checkpoints, ignore_errors=True)

    @property
    def _part_folder(self) -> Path:
        return self.job.folder / "parts" / self.directory.path.name

    def _train_components(self, branch: Branch, components: Components) -> None:
        """Train the components that nobody has, wait for the others, put the records together."""
        cache = self.job.cache

        def is_missing(key: str) -> bool:
            return not cache.path(KIND, key).exists()

        made: RunDirectory | None = None
        while made is None or any(map(is_missing, components)):
            with ExitStack() as claims:
                mine = {
                    key: clients
                    for key, clients in components.items()
                    if is_missing(key)
                    and claims.enter_context(cache.claim(KIND, key))
                    and is_missing(key)
                }
                if mine or made is None:
                    made = self._train_part(branch, mine)
            if any(map(is_missing, components)):
                cache.wait()
        put_together(made, self.experiment, self.parts, tables_of(cache, components))
        shutil.rmtree(made.checkpoints, ignore_errors=True)
        os.replace(made.path, self.directory.path)
        shutil.rmtree(self.directory.path / PARTS_OF_RUN)
        shutil.rmtree(self._part_folder)

    def _train_part(self, branch: Branch, mine: Components) -> RunDirectory:
        """A run of the row that trains these components and no other client."""
        n = branch.algorithm.rounds_before

        def fill(directory: RunDirectory) -> None:
            self._start_of(n)(directory)
            PartRecords(directory.path).start(mine)

        directory = self._opened(self._part_folder / digest(sorted(mine)), fill)
        if directory.summary() is not None:
            return directory  # killed before it was moved
        fed = PartialFederation.of(self.fed, clients_of(mine), begin=n)
        server = assemble(self.experiment, self.parts, fed, directory)
        recorder = ComponentRecorder(fed, directory, self.job.cache)
        self.fed.meter.read_and_reset()
        is_done = replace(
            server, algorithm=branch, recorder=recorder, should_stop=self.job.cache.is_over
        ).run()
        if not is_done:
            raise OutOfTime
        return directory
