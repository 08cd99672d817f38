"""Branching rows: the rounds of FedAvg that they share, and how each continues from its clustering.

`Prefix` trains FedAvg's rounds once for all rows; `Branch` takes the place of a row's algorithm
from the round of its clustering on.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flray.algorithms.algorithm import Branching, Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.clustering.pipeline import Clustering
from flray.columns import CLIENT_STEPS, COUNTED, TRAIN_LOSS
from flray.config.experiment import Experiment, parse_experiment
from flray.data.dataset import Ids
from flray.engines.training import Gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.records.run_directory import RunDirectory
from flray.records.writer import RoundWriter
from flray.runs.assemble import assemble, open_directory
from flray.runs.preparing import Prepared
from flray.server.evaluation import RoundRow
from flray.server.loop import Callbacks
from flray.sweeps.cache import Cache, OutOfTime

PREFIX = "prefix"  # kind of cache entry
NEVER_ENDS = 1_000_000_000  # rounds, so many that a prefix never counts as a finished run
OF_EVALUATION = "_evaluation"  # ends the columns of costs of evaluating, not of the round itself
METRICS = frozenset({TRAIN_LOSS})  # metrics that records of clients give again
# A write takes 20 ms of a CPU, as long as a short round; a kill costs a row this time again.
WRITE_EVERY_S = 5.0


def branches(experiment: Experiment) -> bool:
    """True if the experiment is FedAvg up to a clustering, and has enough rounds to reach it.

    Then its rounds before the clustering can be taken from a `Prefix`;
    `flray.algorithms.algorithm.Branching` describes such algorithms. False with
    `recluster.when: auto`, where the round of the clustering is not known before, and with
    `evaluate.last_trained`, for which the models that clients train in that round are evaluated:
    such a row runs alone.
    """
    settings, algorithm = experiment.settings, experiment.algorithm.build()
    is_auto = getattr(getattr(algorithm, "recluster", None), "when", None) == "auto"
    if not isinstance(algorithm, Branching) or is_auto:
        return False
    if settings.evaluate.last_trained and algorithm.rounds_before:
        return False
    return algorithm.rounds_before <= settings.rounds


class _StopAfter(Callbacks):
    """Stops a run after a round and gives that round and the one before checkpoints."""

    def __init__(self, last: int) -> None:
        self.last, self.is_reached = last, False

    def while_writing(self, t: int, writer: RoundWriter) -> None:
        """Write the last two rounds at once, and stop the loop after the last."""
        if t >= self.last - 1:
            writer.flush()
        self.is_reached = t >= self.last


@dataclass(frozen=True)
class Prefix:
    """FedAvg's rounds, which all rows share that differ only in algorithm and rounds.

    The entry `prefix/<key>-<n>` of the cache is a run directory of FedAvg after n rounds; it
    continues the one with the next smaller n. It has checkpoints of its last two rounds: a branch
    starts after round n - 1, so that the server's own loop records round n. Every method trains the
    rounds it needs, or waits for the process that does; n may be 0.
    """

    key: str  # key of everything that decides the rounds
    cache: Cache
    parts: Prepared
    fed: Federation
    plain: dict[str, Any]  # configuration of a row with this prefix; Any: YAML
    wanted: Collection[int]  # rounds after which rows may cluster

    def bank(self, n: int, t: int) -> ModelBank:
        """The model after round t of the prefix of n rounds; t is n - 1 or n.

        t = 0 is the initial model, for which nothing is trained.
        """
        if t == 0:
            return self.fed.initial_bank()
        checkpoint = self._after(n).store().load_latest(self.parts.device, up_to=t)
        assert checkpoint is not None, (n, t)
        assert checkpoint.round == t, (n, t)
        bank: ModelBank = checkpoint.state.bank
        return bank

    def row(self, n: int) -> RoundRow:
        """The row that was recorded of round n; empty for round 0."""
        return self._after(n).rows()[-1] if n else {}

    def steps(self, n: int) -> int:
        """The client steps of the first n rounds."""
        return sum(row.get(CLIENT_STEPS, 0) for row in self._after(n).rows()) if n else 0

    def begin(self, directory: RunDirectory, n: int, t: int) -> None:
        """Give a new run directory records and state after round t of the prefix of n rounds.

        Does nothing if n is 0.
        """
        if not n:
            return
        if t:
            directory.adopt(self._after(n), t)
        directory.store().save(t, FedAvgState(self.bank(n, t)))

    def _after(self, n: int) -> RunDirectory:
        """The run directory after n rounds, n >= 1."""
        key = f"{self.key}-{n}"
        others = (self.cache.root / PREFIX).glob(f"{self.key}-*/")
        stops = {*self.wanted, *(int(path.name.rpartition("-")[2]) for path in others)}
        before = max((t for t in stops if t < n), default=0)
        if before and not self.cache.path(PREFIX, key).exists():
            self._after(before)  # before claiming: a process that holds a claim must not wait
        path = self.cache.obtain(PREFIX, key, lambda folder: self._train(folder, before, n))
        return RunDirectory(path)

    def _train(self, folder: Path, before: int, n: int) -> int:
        """Train rounds `before` + 1 to n in this folder; the client steps that they took."""
        # `stop` does not look at rounds before a clustering.
        changes = {"algorithm": "fedavg", "rounds": NEVER_ENDS, "stop": None}
        experiment = parse_experiment(self.plain | changes)
        directory = RunDirectory(folder)
        is_new = not directory.holds_run()
        open_directory(experiment, self.parts, directory)
        if is_new:
            self.begin(directory, before, before)
        stop = _StopAfter(n)
        checkpoint = directory.store().load_latest(self.parts.device)
        if checkpoint is None or checkpoint.round < n:  # else it was killed when it was complete
            self.fed.meter.read_and_reset()
            server = assemble(experiment, self.parts, self.fed, directory)
            is_over = lambda: stop.is_reached or self.cache.is_over()  # noqa: E731
            server = replace(server, write_every_s=WRITE_EVERY_S, on_round=self.cache.note_round)
            replace(server, should_stop=is_over, callbacks=stop).run()
            self.fed.meter.read_and_reset()
        rows = directory.rows()
        if len(rows) < n:
            raise OutOfTime
        return sum(row.get(CLIENT_STEPS, 0) for row in rows[before:])


class OwnMetrics(Exception):
    """A round returned metrics that are recorded neither in the prefix nor for groups.

    The trial then runs its row from round 1, as a run of its own.
    """


@dataclass(frozen=True)
class Branch:
    """Replaces a branching algorithm from the round of its clustering on.

    Round `rounds_before` trains nobody: its metrics and costs are the prefix's, its state is the
    one after the clustering, whose costs are added. Later rounds are the algorithm's own.
    The server's own loop records and evaluates that round, as it would in a run alone. Raises
    OwnMetrics if the algorithm returns metrics that only a run of its own records.
    """

    algorithm: Branching[Any]  # Any: the state is the algorithm's own
    state: Any  # after the clustering
    clustering: Clustering
    counts: Counter[str]  # costs of the clustering
    row: RoundRow  # the prefix's, of the round of the clustering; empty for round 0

    @property
    def gradient(self) -> Gradient:
        """The algorithm's local equation."""
        return self.algorithm.gradient

    def init(self, fed: Federation) -> Outcome[Any]:
        """The state after the clustering, of a row that clusters before round 1."""
        fed.meter.counts.update(self.counts)
        return Outcome(self.state, clusterings=(self.clustering,))

    def cohort(self, state: Any, t: int, fed: Federation) -> Cohort:
        """FedAvg's cohort in the round of the clustering, later the algorithm's."""
        if t == self.algorithm.rounds_before:
            return FedAvg().cohort(state, t, fed)
        return self.algorithm.cohort(state, t, fed)

    def round(self, state: Any, cohort: Cohort, fed: Federation) -> Outcome[Any]:
        """In the round of the clustering what the prefix recorded, later the algorithm's round."""
        if cohort.t > self.algorithm.rounds_before:
            outcome = self.algorithm.round(state, cohort, fed)
            if outcome.metrics.keys() - METRICS:
                raise OwnMetrics
            return outcome
        # A branch is evaluated anew, so what the prefix's evaluation cost is not its own.
        costs = {
            key: value
            for key, value in self.row.items()
            if key.startswith(COUNTED) and not key.endswith(OF_EVALUATION)
        }
        fed.meter.counts.update(costs)
        fed.meter.counts.update(self.counts)
        metrics = {key: value for key, value in self.row.items() if key in METRICS}
        return Outcome(self.state, metrics, (self.clustering,))

    def deploy(self, state: Any, clients: Ids, fed: Federation) -> ModelBank:
        """Before the clustering the one model of the prefix, later the algorithm's models."""
        if isinstance(state, FedAvgState):  # the state before the clustering
            return state.bank
        return self.algorithm.deploy(state, clients, fed)

    def partition(self, state: Any) -> Ids:
        return self.algorithm.partition(state)

    @property
    def nearest_clusters(self) -> Any:  # Any: a method that only some algorithms have
        """The algorithm's method that assigns newcomers to clusters.

        Raises:
            AttributeError: The algorithm has none, as `hasattr` expects.
        """
        return self.algorithm.nearest_clusters  # type: ignore[attr-defined]  # raised without one
