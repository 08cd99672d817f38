"""The prefix of branching runs: FedAvg up to their clusterings, trained once.

`prefix/<key>/run` in the cache is a run directory of FedAvg that goes on as far as anybody needs;
`states/round_000010` beside it is the model after round 10, kept for the rounds that branch.
"""

import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flray.algorithms.fedavg import FedAvgState
from flray.config.build import Prepared, assemble, open_directory
from flray.config.experiment import Experiment, parse_experiment
from flray.execution.federation import Federation
from flray.models.bank import ModelBank
from flray.records.checkpoint import CheckpointStore, Snapshot
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import Row
from flray.sweep.cache import Cache, OutOfTime

KIND = "prefix"
NEVER_ENDS = 1_000_000_000  # rounds: a prefix is no finished run, wherever it is left


@dataclass(frozen=True)
class Prefix:
    key: str
    cache: Cache
    parts: Prepared
    fed: Federation
    plain: dict[str, Any]  # of an experiment that has it; Any: YAML
    wanted: Collection[int]  # rounds that others are likely to ask for

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.cache.path(KIND, self.key) / "run")

    @property
    def device(self) -> str:
        return self.parts.device

    def reach(self, n: int) -> None:
        """Have the states after rounds n - 1 and n: found, trained here, or awaited."""
        while not self._has(n):
            with self.cache.claim(KIND, self.key) as is_mine:
                if is_mine and not self._has(n):
                    with self.cache.failing_once(KIND, f"{self.key}-{n}"):
                        self._train(n)
            if not self._has(n):
                self.cache.wait()

    def bank(self, t: int) -> ModelBank:
        if t == 0:
            return self.fed.initial_bank()
        kept = CheckpointStore(self._place(t)).load_latest(self.device)
        assert kept is not None, t
        bank: ModelBank = kept.state.bank
        return bank

    def row(self, t: int) -> Row:
        """What was recorded of round t."""
        return next(row for row in self.directory.rows() if row["round"] == t)

    def begin(self, directory: RunDirectory, t: int) -> None:
        """Let a new run directory stand after round t."""
        if t > 0:
            directory.adopt(self.directory, t)
        CheckpointStore(directory.checkpoints).save(t, FedAvgState(self.bank(t)))

    def _has(self, n: int) -> bool:
        return self._is_kept(n - 1) and self._is_kept(n)

    def _is_kept(self, t: int) -> bool:
        return t < 1 or any(self._place(t).glob("*.json"))

    def _place(self, t: int) -> Path:
        return self.cache.path(KIND, self.key) / "states" / f"round_{t:06d}"

    def _train(self, n: int) -> None:
        store = CheckpointStore(self.directory.checkpoints)
        newest = store.load_latest()
        if newest is not None and newest.round > 0:
            self._keep(n, store.snapshot(newest.round, newest.state))  # killed before it was
        if newest is None or newest.round < n:
            self._train_in(self.directory, n)
            self._count(self.key, sum(row.get("client_steps", 0) for row in self.directory.rows()))
            return
        # The run has gone past round n without keeping it: go there again from an earlier state.
        first = max(t for t in range(n) if self._is_kept(t))
        with tempfile.TemporaryDirectory() as place:
            again = RunDirectory(Path(place) / "run")
            open_directory(self._experiment, self.parts, again)
            self.begin(again, first)
            self._train_in(again, n)
            steps = (row.get("client_steps", 0) for row in again.rows(first))
            self._count(f"{self.key}-{n}", sum(steps))

    @property
    def _experiment(self) -> Experiment:
        fedavg = {"algorithm": "fedavg", "rounds": NEVER_ENDS}
        return parse_experiment(self.plain | fedavg)

    def _train_in(self, directory: RunDirectory, n: int) -> None:
        open_directory(self._experiment, self.parts, directory)
        server = assemble(self._experiment, self.parts, self.fed, directory)
        self.fed.meter.read_and_reset()
        keep = partial(self._keep, n)
        replace(server, on_commit=keep, should_stop=self.cache.is_over, stop_after=n).run()
        self.fed.meter.read_and_reset()
        if not self._is_kept(n):
            raise OutOfTime

    def _keep(self, n: int, snapshot: Snapshot) -> None:
        """Keep the state of a round that this or another row branches from: a run keeps two."""
        needed = {n - 1, n, *self.wanted, *(each - 1 for each in self.wanted)}
        if snapshot.round in needed and not self._is_kept(snapshot.round):
            CheckpointStore(self._place(snapshot.round)).write(snapshot)

    def _count(self, key: str, total: int) -> None:
        """Record what this sweep has trained of a prefix of so many steps in all."""
        of_others = self.cache.costs_of_others(KIND, key)
        self.cache.count(KIND, key, total - of_others)
