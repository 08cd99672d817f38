"""The tree of a sweep: what its rows share, found before anything is trained.

Rows that differ in their algorithm alone grow from one trunk of FedAvg. At the end of the trunk
clients are observed once for each signature; each embedding, distance and dendrogram is computed
once; rows whose clusterings lead to the same state go on as one continuation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from flray.algorithms.algorithm import Branching
from flray.algorithms.fedavg import FedAvg
from flray.config.binding import Plain
from flray.config.experiment import Experiment, parse_experiment
from flray.sweep.keys import deciding, device_of, digest
from flray.sweep.rows import Row

BRANCHING = ("rounds_before", "clustering", "observed_by", "state_decides", "observe", "branch")


@dataclass(frozen=True)
class Run:
    """A run directory that a trial brings to its end."""

    key: str
    plain: Plain

    @property
    def path(self) -> str:
        return run_path(self.key)


def run_path(key: str) -> str:
    """Where a run lies, relative to the sweep's folder."""
    return str(PurePosixPath("runs") / key)


@dataclass(frozen=True)
class Observation:
    """Signatures of all clients after round `round`, and the rows that look at them."""

    key: str
    round: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Trunk:
    """One run of FedAvg as far as its rows need it."""

    key: str
    plain: Plain
    run: str  # the folder of that run; a row's own where FedAvg is a row
    observations: tuple[Observation, ...]

    @property
    def last_round(self) -> int:
        return max(each.round for each in self.observations)

    @property
    def rounds_kept(self) -> frozenset[int]:
        """Rounds whose state is needed: of each observation, and the one before it."""
        rounds = {t for each in self.observations for t in (each.round - 1, each.round)}
        return frozenset(t for t in rounds if t > 0)

    @property
    def rows(self) -> list[Row]:
        return [row for each in self.observations for row in each.rows]


@dataclass(frozen=True)
class Tree:
    trunks: tuple[Trunk, ...]
    runs: tuple[Run, ...]  # that do not branch
    run_of: dict[int, str]  # the run of each row that does not branch, by row number


def plan(rows: Sequence[Row], version: Mapping[str, str], has_gpu: bool) -> Tree:
    """Sort rows into trunks and runs of their own."""
    families: dict[str, list[tuple[Row, Experiment]]] = {}
    for row in rows:
        experiment = parse_experiment(row.plain)
        device = device_of(experiment, has_gpu)
        key = digest([_up_to_the_algorithm(row.plain), dict(version), device])
        families.setdefault(key, []).append((row, experiment))
    trunks: list[Trunk] = []
    runs: dict[str, Run] = {}
    run_of: dict[int, str] = {}
    for key, members in families.items():
        branching = [(row, n) for row, e in members if (n := _clusters_after(e)) is not None]
        numbers = {row.number for row, _ in branching}
        alone = [(row, e) for row, e in members if row.number not in numbers]
        for row, _ in alone:
            run = Run(digest([key, row.plain["algorithm"], row.plain["rounds"]]), row.plain)
            run_of[row.number] = runs.setdefault(run.key, run).key
        if branching:
            trunks.append(_trunk(key, branching, alone, run_of))
    return Tree(tuple(trunks), tuple(runs.values()), run_of)


def _up_to_the_algorithm(plain: Plain) -> Plain:
    """What experiments of one trunk have in common."""
    own = ("algorithm", "rounds")
    return {key: value for key, value in deciding(plain).items() if key not in own}


def _clusters_after(experiment: Experiment) -> int | None:
    """The round of FedAvg after which it clusters; None if it never does or is not FedAvg."""
    algorithm = experiment.algorithm.build()
    if not all(hasattr(algorithm, name) for name in BRANCHING):
        return None
    rounds: int = algorithm.rounds_before
    return rounds if rounds <= experiment.settings.rounds else None


def _trunk(
    key: str,
    branching: Sequence[tuple[Row, int]],
    alone: Sequence[tuple[Row, Experiment]],
    run_of: Mapping[int, str],
) -> Trunk:
    groups: dict[str, list[tuple[Row, int]]] = {}
    for row, n in branching:
        observed = digest([key, n, _seen_by_observation(row)])
        groups.setdefault(observed, []).append((row, n))
    observations = tuple(
        Observation(name, members[0][1], tuple(row for row, _ in members))
        for name, members in groups.items()
    )
    last = max(n for _, n in branching)
    long_enough = [
        row
        for row, experiment in alone
        if type(experiment.algorithm.build()) is FedAvg and experiment.settings.rounds >= last
    ]
    if long_enough:
        row = max(long_enough, key=lambda row: row.plain["rounds"])
        return Trunk(key, row.plain, run_path(run_of[row.number]), observations)
    first = branching[0][0].plain
    # One round more than it will run, so that it is never a finished run.
    rounds = max(last + 1, *(row.plain["rounds"] for row, _ in branching))
    plain = parse_experiment(first | {"algorithm": "fedavg", "rounds": rounds}).plain
    return Trunk(key, plain, f"trunks/{key}/run", observations)


def _seen_by_observation(row: Row) -> Plain:
    """The algorithm's fields that matter before its clients have answered."""
    plain = row.plain["algorithm"]
    algorithm: Branching[Any] = parse_experiment(row.plain).algorithm.build()
    own = {name: plain[name] for name in ("name", *algorithm.observed_by)}
    return {**own, "signature": plain["clustering"]["signature"]}


def continuation_key(trunk: Trunk, row: Row, n: int, start: str, shared: bool) -> str:
    """Rows with one key go on alike after round n, and have the same records.

    Without sharing every row has a key of its own.

    Args:
        start: digest of the state to go on from, and of what else the records depend on.
    """
    algorithm: Any = row.plain["algorithm"]
    built: Branching[Any] = parse_experiment(row.plain).algorithm.build()
    if built.state_decides and not row.plain["events"]:
        algorithm = algorithm["name"]
    own = None if shared else row.number
    return digest([trunk.key, n, algorithm, row.plain["rounds"], start, own])
