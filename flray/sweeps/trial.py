"""A trial: the run of one row of a sweep, which takes from the cache what others have computed.

A row whose algorithm branches takes FedAvg's rounds (`branching.py`), signatures and stages of its
clustering (`stages.py`) from the cache, or puts them there. After the clustering it trains the
groups of clients that nobody has trained and joins the records of all groups (`groups.py`). Any
other row is an ordinary run. The records of a run are an entry of the cache too: rows whose
clusterings lead to the same state copy them.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Branching, Outcome
from flray.algorithms.clustered import cluster
from flray.algorithms.fedavg import FedAvg
from flray.clustering.pipeline import Clustering
from flray.columns import CLIENT_STEPS
from flray.config.experiment import parse_experiment
from flray.errors import CLIENT_ERRORS, GpuFault, is_gpu_fault, is_gpu_full, one_line_message
from flray.execution.executor import Executor, LazyExecutor
from flray.execution.federation import Federation, Meter, Share, nobody
from flray.execution.nodes import wait_for_resources
from flray.execution.ray_pool import start_pool
from flray.measures.settings import Evaluation
from flray.models.bank import ModelBank
from flray.records.recorded import PART_FOLDER
from flray.records.run_directory import RunDirectory
from flray.records.writer import RoundWriter
from flray.runs.assemble import assemble, build_federation, open_directory
from flray.runs.conduct import Monitor, OnRound, ShouldStop, conduct
from flray.runs.preparing import Prepared
from flray.server.clusterings import record_clusterings
from flray.server.evaluation import RoundRow
from flray.server.loop import Callbacks, Server, ignore
from flray.sweeps.branching import NEVER_ENDS, WRITE_EVERY_S, Branch, OwnMetrics, Prefix, branches
from flray.sweeps.cache import Cache, OutOfTime
from flray.sweeps.folder import alive_file, read_row, run_path, write_row
from flray.sweeps.groups import (
    KIND,
    Assembly,
    GroupRecorder,
    Groups,
    independent_groups,
    records_of,
)
from flray.sweeps.keys import (
    branch_key,
    canonical,
    digest,
    prefix_key,
    run_key,
    signature_key,
    state_digest,
)
from flray.sweeps.process import host_of, prepared
from flray.sweeps.rows import SweepRow
from flray.sweeps.stages import with_stored_stages
from flray.tracking.mirrors import Draw, no_figures

OWNER = "owner"  # in the entry of a run: the sweep and the row that computed it


@dataclass(frozen=True)
class TrialContext:
    """What the trials of a sweep have in common; Tune pickles it and sends it to each of them."""

    folder: Path  # folder of the sweep
    cache: Cache
    code: dict[str, str]  # versions of code and libraries
    has_gpu: bool  # True if the cluster has a GPU
    wanted: frozenset[int]  # rounds after which rows may cluster
    # Keys of those that several rows cluster by; None: rows are not known before
    signatures: frozenset[str] | None = None
    is_scheduled: bool = False  # each row runs on its own and reports its rounds
    draw: Draw = no_figures  # draws the figures of a run for W&B


def run_row(
    row: SweepRow, context: TrialContext, on_round: Callable[[RoundRow], None] = ignore
) -> SweepRow:
    """Run a row to its end and return its state, which is also in the sweep's folder.

    An error is recorded with the row. A row that is out of time stays unfinished, and the next call
    continues it. The run directory equals that of the same configuration run alone.

    Args:
        row: The row as the driver knows it; if its folder has a later state, that one counts.
        context: What trials share.
        on_round: Called with the row of each round that is trained for this row alone.

    Raises:
        GpuFault: The GPU failed or was full of other rows; this one stays unfinished.
    """
    trial = Trial(row, context, on_round)
    try:
        trial.run()
    except OutOfTime:
        trial.note(status="unfinished")
    except CLIENT_ERRORS as error:
        if is_gpu_fault(error) or is_gpu_full(error):
            raise GpuFault(one_line_message(error)) from error  # a new process runs the row
        trial.note(status="failed", error=one_line_message(error))
    finally:
        trial.executor.close()
    return trial.row


def _clocks() -> dict[str, float]:
    """What the clock says, and how long all threads of this process have computed."""
    return {"total": perf_counter(), "cpu": process_time()}


class Trial:
    """The run of one row; `row` is its current state.

    Attributes:
        row: The state of the row, as last written to the sweep's folder.
        experiment: The experiment of the row, once its threshold is known with that threshold.
        executor: Starts hosts when the first client is asked; a shared row needs none.
        directory: Run directory of the row.
        part_folder: Run directories in which the row trains some of its groups.
    """

    def __init__(
        self, row: SweepRow, context: TrialContext, on_round: Callable[[RoundRow], None]
    ) -> None:
        alive, self.meter = alive_file(context.folder, row.number), Meter()
        waiting = Meter(spent=self.meter.spent)  # no part of a round
        cache = replace(context.cache, alive=alive, meter=waiting)
        self.context, self.cache, self.report = context, cache, on_round
        self.row = read_row(context.folder, row.number) or row
        self.begin, self.seconds_before = Counter(_clocks()), Counter(self.row.seconds)
        self.experiment = parse_experiment(self.row.plain)
        self.executor = LazyExecutor(self._start_executor)
        self.directory = RunDirectory(context.folder / run_path(row.number))
        self.part_folder = context.folder / "parts" / self.directory.path.name

    def note(self, **changes: Any) -> None:  # Any: fields of SweepRow
        """Change the state of the row and write it, with the seconds that it took so far."""
        seconds = self.seconds_before + self.meter.spent + (Counter(_clocks()) - self.begin)
        self.row = replace(self.row, seconds=dict(seconds), **changes)
        write_row(self.context.folder, self.row)

    def on_round(self, row: RoundRow) -> None:
        """Show that the trial goes on, and report the round to who asked for it."""
        self.cache.note_round(row)
        self.report(row)

    def run(self) -> None:
        """Complete the row's run directory, by as little training as possible."""
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
    def dealt(self) -> str:
        """The row's configuration without what decides neither its data nor its host, as a text."""
        regular = self.row.plain["evaluate"] | {"every": 1, "also": []}
        same = {"algorithm": "fedavg", "rounds": NEVER_ENDS, "stop": None, "tracking": "none"}
        return canonical(self.row.plain | same | {"evaluate": regular})

    @property
    def parts(self) -> Prepared:
        """Data and module, which rows share and do not change."""
        return prepared(self.dealt)

    @cached_property
    def fed(self) -> Federation:
        """The federation that prefix, clustering and rounds of this row share."""
        fed = build_federation(self.experiment, self.parts, self.executor)
        return replace(fed, meter=self.meter)

    @cached_property
    def prefix(self) -> Prefix:
        """FedAvg's rounds before the clustering, which other rows have too."""
        key = prefix_key(self.experiment, self.context.code, self.context.has_gpu)
        return Prefix(key, self.cache, self.parts, self.fed, self.row.plain, self.context.wanted)

    def _start_executor(self) -> Executor:
        if self.parts.plan is None:
            return replace(host_of(self.dealt), on_answer=self.cache.show_life)
        wait_for_resources(self.parts.plan)
        pool = start_pool(self.parts.payload, self.parts.plan)
        return replace(pool, on_answer=self.cache.show_life)

    def _run_whole(self) -> None:
        """Run from round 1; FedAvg starts with as many rounds of the prefix as other rows need."""
        settings = self.experiment.settings
        # A run that may stop looks at all of its rounds, the prefix stops for nothing.
        is_prefix = type(self.experiment.algorithm.build()) is FedAvg and settings.stop is None
        rounds = [n for n in self.context.wanted if is_prefix and n < settings.rounds]
        n = max(rounds, default=0)
        self.note(groups=[], steps_found=self.prefix.steps(n))

        def make() -> None:
            directory = self._opened(self.directory.path, lambda new: self.prefix.begin(new, n, n))
            self._train(assemble(self.experiment, self.parts, self.fed, directory))

        self._settle(run_key(self.prefix.key, self.row.plain), make)

    def _run_branch(self) -> None:
        """Run from the row's clustering on."""
        n = self.experiment.algorithm.build().rounds_before
        branch = self._branch(n)
        groups = self._groups(branch)
        steps = self.prefix.steps(n) + branch.counts[CLIENT_STEPS]
        self.note(groups=list(groups), steps_found=steps)

        def make() -> None:
            if groups:
                return self._train_groups(branch, groups)
            path = self.directory.path
            directory = self._opened(path, lambda new: self.prefix.begin(new, n, n - 1))
            server = assemble(self.experiment, self.parts, self.fed, directory)
            return self._train(replace(server, algorithm=branch))

        alone = self.row.number if self.context.is_scheduled else None
        # Clients without a cluster are placed later, by stages of the row's clustering.
        is_complete = (branch.partition(branch.state) >= 0).all()
        placing = None if is_complete else self.row.plain["algorithm"]
        measured = self._measured(branch.clustering)
        start = [state_digest(branch.state), dict(branch.counts), placing, measured, alone]
        self._settle(self._branch_key(branch, start), make, branch.clustering)

    def _measured(self, clustering: Clustering) -> object:
        """Digests of what the numbers of a clustering depend on, beside the state after it.

        Measures that are always on look at labels, and at who is together; others at all of it.
        """
        if self.experiment.settings.evaluate.measures != Evaluation().measures:
            return state_digest(clustering)
        overlaps, has_pairs = clustering.partition.overlapping, clustering.distance is not None
        return [has_pairs, state_digest(clustering.together) if overlaps else None]

    def _branch_key(self, branch: Branch, start: object) -> str:
        return branch_key(self.prefix.key, self.row.plain, branch.algorithm, start)

    def _branch(self, n: int) -> Branch:
        """The row's clustering after round n; finds its threshold, if its own tree decides it."""
        outcome, meter = self._cluster(n)
        if self.row.merge_point is not None:
            tree = outcome.clusterings[0].partition.linkage
            assert tree is not None  # between_merges requires hierarchical, which has a tree
            row = self.row.at(self.row.merge_point.threshold(tree))
            self.experiment = parse_experiment(row.plain)
            self.note(overrides=row.overrides, plain=row.plain)
            outcome, meter = self._cluster(n)
        (clustering,) = outcome.clusterings
        algorithm = self.experiment.algorithm.build()
        return Branch(algorithm, outcome.state, clustering, meter.counts, self.prefix.row(n))

    def _cluster(self, n: int) -> tuple[Outcome[Any], Meter]:
        """What the algorithm's own clustering returns, with signatures and stages of the cache."""
        fed = self.fed.during(n) if n else self.fed
        fed = replace(fed, meter=Meter(spent=self.meter.spent))
        algorithm: Branching[Any] = self.experiment.algorithm.build()
        plain = self.row.plain["algorithm"]["clustering"]
        prefix, shared = self.prefix.key, self.context.signatures
        is_shared = shared is None or signature_key(prefix, self.row.plain, n) in shared
        pipeline = with_stored_stages(algorithm.clustering, plain, self.cache, prefix, is_shared)
        stored = replace(algorithm, clustering=pipeline)  # type: ignore[type-var]  # a dataclass
        if n == 0:
            return stored.init(fed), fed.meter
        return cluster(stored, self.prefix.bank(n, n), fed), fed.meter

    def _groups(self, branch: Branch) -> Groups:
        """Clients that hear nobody else after the clustering, by a key of all that decides them.

        Empty if rows cannot share them: a client may join, leave or be dropped, the run may stop
        early, or there are records that are not kept for groups.
        """
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(1)
        is_fixed = len(split.clients) == split.num_clients and not settings.events
        evaluate = settings.evaluate
        is_sampled = evaluate.clients is not None  # scores of a group depend on who is drawn
        is_recorded = not (evaluate.last_trained or is_sampled or self.context.is_scheduled)
        goes_on = settings.rounds > branch.algorithm.rounds_before
        # Nobody is dropped, and no group ends because of what others score.
        is_safe = settings.on_client_failure == "raise" and settings.stop is None
        if not (is_fixed and is_recorded and goes_on and is_safe):
            return {}
        bank = self._deployed(branch)
        return {
            self._branch_key(branch, [clients.tolist(), heard, bank.digests(clients)]): clients
            for clients, heard in independent_groups(branch.algorithm, branch.state)
        }

    def _deployed(self, branch: Branch) -> ModelBank:
        """The models that clients use after the clustering."""
        return branch.deploy(branch.state, np.arange(self.fed.num_clients), self.fed)

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
        own_name = f"{self.cache.sweep} {self.row.number}"

        def compute(entry: Path) -> int:
            if self.directory.summary() is None:
                make()
            self.directory.copy_records_to(entry)
            (entry / OWNER).write_text(own_name, encoding="utf-8")
            return 0  # what a row trains is counted by its rounds, finished or not

        entry = self.cache.obtain("run", key, compute)

        def copy_records(new: RunDirectory) -> None:
            RunDirectory(entry).copy_records_to(new.path)
            if clustering is not None:
                n = self.experiment.algorithm.build().rounds_before
                record_clusterings(new, self.parts.payload.timeline, n, [clustering])

        is_own = (entry / OWNER).read_text(encoding="utf-8") == own_name
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
        directory, context = server.directory, self.context
        callbacks = _WriteAtOnce() if context.is_scheduled else server.callbacks
        monitor = Monitor(self.on_round, self.cache.is_over, context.draw, context.folder.name)

        def compute(on_round: OnRound, should_stop: ShouldStop) -> bool:
            self.fed.meter.read_and_reset()
            watched = replace(server, on_round=on_round, should_stop=should_stop)
            return replace(watched, callbacks=callbacks, write_every_s=WRITE_EVERY_S).run()

        if not conduct(compute, directory.path, monitor, self.experiment):
            raise OutOfTime
        # Many runs with a model for each cluster fill a disk; config.yaml gives these bits again.
        shutil.rmtree(directory.checkpoints, ignore_errors=True)

    def _train_groups(self, branch: Branch, groups: Groups) -> None:
        """Train the groups that no other row trains, wait for the others, join the records."""

        def is_missing(key: str) -> bool:
            return not self.cache.path(KIND, key).exists()

        part: RunDirectory | None = None
        while part is None or any(map(is_missing, groups)):
            with ExitStack() as claims:
                claimed = {
                    key: clients
                    for key, clients in groups.items()
                    if is_missing(key)
                    and claims.enter_context(self.cache.claim(KIND, key))
                    and is_missing(key)
                }
                if claimed or part is None:
                    part = self._train_some(branch, claimed)
            if any(map(is_missing, groups)):
                self.cache.wait()
        assembly = Assembly(part, self.experiment, self.parts, branch, self._deployed(branch))
        assembly.put_together(records_of(self.cache, groups))
        shutil.rmtree(part.checkpoints, ignore_errors=True)
        os.replace(part.path, self.directory.path)
        shutil.rmtree(self.directory.path / PART_FOLDER, ignore_errors=True)
        shutil.rmtree(self.part_folder)

    def _train_some(self, branch: Branch, groups: Groups) -> RunDirectory:
        """A run of the row that trains these groups and no other client."""
        n = branch.algorithm.rounds_before
        path = self.part_folder / digest(sorted(groups))
        directory = self._opened(path, lambda new: self.prefix.begin(new, n, n - 1))
        if directory.summary() is None:  # else it was killed before it was moved
            clients = np.sort(np.concatenate([nobody(), *groups.values()]))
            share = Share(clients, after=n)
            fed = replace(self.fed, share=share)
            fed.meter.read_and_reset()
            server = assemble(self.experiment, self.parts, fed, directory)
            recorder = GroupRecorder(share, directory, self.cache, groups)
            server = replace(server, algorithm=branch, callbacks=recorder, on_round=self.on_round)
            server = replace(server, write_every_s=WRITE_EVERY_S, should_stop=self.cache.is_over)
            if not server.run():
                raise OutOfTime
        return directory


class _WriteAtOnce(Callbacks):
    """Writes each round before it is reported, when a scheduler may end the process."""

    def while_writing(self, t: int, writer: RoundWriter) -> None:
        """Write the round before the loop goes on."""
        writer.flush()
