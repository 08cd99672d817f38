"""A trial: the run of one row of a sweep, which takes from the cache what others have computed.

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
from flray.columns import CLIENT_STEPS
from flray.config.experiment import parse_experiment
from flray.data.dataset import Ids
from flray.errors import one_line_message
from flray.execution.client_actor import wait_for_resources
from flray.execution.executor import CLIENT_ERRORS, Executor, LazyExecutor
from flray.execution.federation import Federation
from flray.execution.partial import PartialFederation
from flray.records.components import FOLDER as PARTS_OF_RUN
from flray.records.components import PartRecords
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import assemble, build_federation, open_directory, start_executor
from flray.runs.conduct import Monitor, OnRound, ShouldStop, conduct
from flray.runs.preparing import Prepared, prepare
from flray.server.clusterings import record_clusterings
from flray.server.evaluation import RoundRow
from flray.server.loop import Server, ignore
from flray.sweeps.branching import Branch, OwnMetrics, Prefix, branches
from flray.sweeps.cache import Cache, OutOfTime, read_value, write_value
from flray.sweeps.components import (
    KIND,
    Assembly,
    ComponentRecorder,
    Components,
    clients_of,
    tables_of,
)
from flray.sweeps.folder import alive_file, read_rows, run_path, write_row
from flray.sweeps.keys import (
    branch_key,
    canonical,
    digest,
    observation_key,
    prefix_key,
    run_key,
    state_digest,
)
from flray.sweeps.rows import SweepRow
from flray.sweeps.stages import with_stored_stages
from flray.tracking.mirrors import Draw, no_figures

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
    draw: Draw = no_figures  # what W&B is shown of a run


def run_row(row: SweepRow, job: Job, on_round: Callable[[RoundRow], None] = ignore) -> SweepRow:
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
    return trial.row


@lru_cache(maxsize=2)
def _prepared(text: str) -> Prepared:
    return prepare(parse_experiment(json.loads(text)))


class Trial:
    """The run of one row; `row` is its current state."""

    def __init__(self, row: SweepRow, job: Job, on_round: Callable[[RoundRow], None]) -> None:
        cache = replace(job.cache, alive=alive_file(job.folder, row.number))
        self.job, self.cache, self.on_round = job, cache, on_round
        self.row = read_rows(job.folder, row.number).get(row.number, row)
        self.experiment = parse_experiment(self.row.plain)
        self.executor = LazyExecutor(self._start_executor)
        self.directory = RunDirectory(job.folder / run_path(row.number))
        self.part_folder = job.folder / "parts" / self.directory.path.name

    def note(self, **changes: Any) -> None:  # Any: fields of SweepRow
        """Change the state of the row and write it."""
        self.row = replace(self.row, **changes)
        write_row(self.job.folder, self.row)

    def run(self) -> None:
        self.note(status="unfinished", error=None)
        if self.cache.is_over():
            raise OutOfTime
        if branches(self.experiment) and not self.row.is_whole:
            try:
                return self._run_branch()
            except OwnMetrics:
                self.note(is_whole=True)
        self._run_whole()

    @cached_property
    def parts(self) -> Prepared:
        """Data and module; the module is a copy, since training changes it."""
        found = _prepared(canonical(self.row.plain | {"algorithm": "fedavg", "tracking": "none"}))
        module = copy.deepcopy(found.payload.module)
        return replace(found, payload=replace(found.payload, module=module))

    @cached_property
    def fed(self) -> Federation:
        return build_federation(self.experiment, self.parts, self.executor)

    @cached_property
    def prefix(self) -> Prefix:
        key = prefix_key(self.experiment, self.job.code, self.job.has_gpu)
        return Prefix(key, self.cache, self.parts, self.fed, self.row.plain, self.job.wanted)

    def _start_executor(self) -> Executor:
        if self.parts.plan:
            wait_for_resources(self.parts.plan)
        return start_executor(self.parts)

    def _run_whole(self) -> None:
        """Run from round 1; FedAvg starts with as many rounds of the prefix as other rows need."""
        is_fedavg = type(self.experiment.algorithm.build()) is FedAvg
        rounds = self.experiment.settings.rounds
        n = max((n for n in self.job.wanted if is_fedavg and n < rounds), default=0)
        self.prefix.require(n)
        self.note(components=[], steps_placed=0, steps_found=self.prefix.steps(n))

        def make() -> None:
            directory = self._opened(self.directory.path, lambda new: self.prefix.begin(new, n, n))
            self._train(assemble(self.experiment, self.parts, self.fed, directory))

        self._settle(run_key(self.prefix.key, self.row.plain), make)

    def _run_branch(self) -> None:
        n = self.experiment.algorithm.build().rounds_before
        self.prefix.require(n)
        branch, steps_observed = self._decide(n)
        own = self.row.number if self.job.is_scheduled else None
        start = [state_digest(branch.state), dict(branch.counts), own]
        key = branch_key(self.prefix.key, self.row.plain, branch.algorithm, start)
        components = self._components(branch)
        self.note(
            components=list(components),
            steps_placed=branch.counts[CLIENT_STEPS] - steps_observed,
            steps_found=self.prefix.steps(n) + steps_observed,
        )

        def make() -> None:
            if components:
                return self._train_components(branch, components)
            directory = self._opened(
                self.directory.path, lambda new: self.prefix.begin(new, n, n - 1)
            )
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

        found = read_value(self.cache.obtain("observation", key, observe))
        observed, counts = found.state, Counter(found.extra["counts"])

        def decide() -> Clustering:
            fed.meter.read_and_reset()
            plain = self.row.plain["algorithm"]["clustering"]
            pipeline = self.experiment.algorithm.build().clustering
            stored = with_stored_stages(pipeline, plain, self.cache, key)
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
        # Without rounds before, a run that trains everybody loses no metric.
        are_known = n > 0 or self._may_be_divided(algorithm)
        branch = Branch(algorithm, state, clustering, counts, self.prefix.row(n), are_known)
        return branch, steps_observed

    def _may_be_divided(self, algorithm: Branching[Any]) -> bool:
        """True if rows may share components: no client joins, leaves or may be dropped."""
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(1)
        everybody = len(split.clients) == split.num_clients and not settings.events
        # Components do not record what `last_trained` scores.
        everybody = everybody and not settings.evaluate.last_trained
        goes_on = settings.rounds > algorithm.rounds_before
        is_shared = not self.job.is_scheduled and isinstance(algorithm, Separable)
        return is_shared and goes_on and everybody and settings.on_client_failure == "raise"

    def _components(self, branch: Branch) -> Components:
        """Clients that hear nobody else after the clustering, by a key of all that decides them."""
        algorithm = branch.algorithm
        if not self._may_be_divided(algorithm) or not isinstance(algorithm, Separable):
            return {}
        bank = algorithm.deploy(branch.state, np.arange(self.fed.num_clients), self.fed)

        def key(clients: Ids, beside: object) -> str:
            start = [clients.tolist(), beside, bank.digests(clients)]
            return branch_key(self.prefix.key, self.row.plain, algorithm, start)

        found = algorithm.components(branch.state, self.fed)
        return {key(clients, beside): clients for clients, beside in found}

    def _settle(
        self, key: str, make: Callable[[], None], clustering: Clustering | None = None
    ) -> None:
        """Fill the row's folder: by its own run, or with the records of a row with the same key.

        Args:
            make: completes the run in the row's folder.
            clustering: the row's own, whose evidence may differ from that of the other row.
        """
        if self.row.run != key:  # the folder holds another run
            shutil.rmtree(self.directory.path, ignore_errors=True)
            shutil.rmtree(self.part_folder, ignore_errors=True)
        self.note(run=key)
        mine = f"{self.cache.sweep} {self.row.number}"

        def compute(entry: Path) -> int:
            if self.directory.summary() is None:
                make()
            self.directory.copy_records_to(entry)
            (entry / OWNER).write_text(mine, encoding="utf-8")
            return 0  # what a row trains is counted by its rounds, finished or not

        entry = self.cache.obtain("run", key, compute)

        def copy_records(new: RunDirectory) -> None:
            RunDirectory(entry).copy_records_to(new.path)
            if clustering is not None:
                n = self.experiment.algorithm.build().rounds_before
                record_clusterings(new, self.parts.payload.timeline, n, [clustering])

        is_own = (entry / OWNER).read_text(encoding="utf-8") == mine
        if not is_own:
            shutil.rmtree(self.directory.path, ignore_errors=True)
            self._opened(self.directory.path, copy_records)
        self.note(status="done" if is_own else "shared")

    def _opened(self, path: Path, fill: Callable[[RunDirectory], None]) -> RunDirectory:
        """A run directory; a new one appears complete or not at all."""
        if not path.exists():
            temporary = path.with_name(f".{path.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.parent.mkdir(parents=True, exist_ok=True)
            open_directory(self.experiment, self.parts, RunDirectory(temporary))
            fill(RunDirectory(temporary))
            os.replace(temporary, path)
        return RunDirectory(path)

    def _train(self, server: Server) -> None:
        """Run the remaining rounds of a run that trains all clients."""
        directory = server.directory
        # A scheduler may end the process as soon as it has heard of a round.
        server = replace(server, is_written_first=self.job.is_scheduled)
        monitor = Monitor(self.on_round, self.cache.is_over, self.job.draw, self.job.folder.name)

        def play(on_round: OnRound, should_stop: ShouldStop) -> bool:
            self.fed.meter.read_and_reset()
            return replace(server, on_round=on_round, should_stop=should_stop).run()

        if not conduct(play, directory.path, monitor, self.experiment):
            raise OutOfTime
        # Many runs with a model for each cluster fill a disk; config.yaml gives these bits again.
        shutil.rmtree(directory.checkpoints, ignore_errors=True)

    def _run_rounds(self, server: Server) -> None:
        self.fed.meter.read_and_reset()
        if not replace(server, should_stop=self.cache.is_over).run():
            raise OutOfTime

    def _train_components(self, branch: Branch, components: Components) -> None:
        """Train the components that no other row trains, wait for the others, join the records."""

        def is_missing(key: str) -> bool:
            return not self.cache.path(KIND, key).exists()

        made: RunDirectory | None = None
        while made is None or any(map(is_missing, components)):
            with ExitStack() as claims:
                mine = {
                    key: clients
                    for key, clients in components.items()
                    if is_missing(key)
                    and claims.enter_context(self.cache.claim(KIND, key))
                    and is_missing(key)
                }
                if mine or made is None:
                    made = self._train_part(branch, mine)
            if any(map(is_missing, components)):
                self.cache.wait()
        self._put_together(made, branch, components)
        shutil.rmtree(made.checkpoints, ignore_errors=True)
        os.replace(made.path, self.directory.path)
        shutil.rmtree(self.directory.path / PARTS_OF_RUN)
        shutil.rmtree(self.part_folder)

    def _train_part(self, branch: Branch, mine: Components) -> RunDirectory:
        """A run of the row that trains these components and no other client."""
        n = branch.algorithm.rounds_before

        def fill(new: RunDirectory) -> None:
            self.prefix.begin(new, n, n - 1)
            PartRecords(new.path).start(mine)

        directory = self._opened(self.part_folder / digest(sorted(mine)), fill)
        if directory.summary() is None:  # else it was killed before it was moved
            fed = PartialFederation.of(self.fed, clients_of(mine), begin=n)
            server = assemble(self.experiment, self.parts, fed, directory)
            recorder = ComponentRecorder(fed, directory, self.cache)
            self._run_rounds(replace(server, algorithm=branch, recorder=recorder))
        return directory

    def _put_together(self, made: RunDirectory, branch: Branch, components: Components) -> None:
        algorithm, everybody = branch.algorithm, np.arange(self.fed.num_clients)
        Assembly(
            made,
            self.experiment,
            self.parts,
            begin=algorithm.rounds_before,
            partition=algorithm.partition(branch.state),
            owner=algorithm.deploy(branch.state, everybody, self.fed).owner,
        ).put_together(tables_of(self.cache, components))
