"""A row whose clusters were trained by several runs: its records, put together from theirs.

After the clustering of FL+HC a cluster samples, trains and averages its own clients, so it goes on
in the same way in every partition it is part of, and a sweep trains it once. What a run would have
recorded had it trained all its clients itself follows from what was recorded of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from flray.client.plan import num_local_steps
from flray.config.build import Prepared, facts_of, prepare
from flray.config.experiment import Experiment, parse_experiment
from flray.data.dataset import Ids
from flray.execution.federation import GROUND_TRUTH_READS
from flray.models.bank import sha256_of
from flray.records.run_directory import PARTS, RunDirectory
from flray.records.strands import Arrays, Strands
from flray.scores import ClientScores
from flray.server.evaluation import Row, evaluation_row
from flray.server.summary import summarise_run
from flray.sweep.rows import canonical

# How the columns of a round's costs begin, and of what else the meter counts.
COSTS = ("client_steps", "clients_dropped", "bytes_", "seconds", GROUND_TRUTH_READS)

Sources = Mapping[Path, Ids]  # the clients that each run directory trained for a row


def is_trained(sources: Sources) -> bool:
    return all(Strands(run).is_finished() for run in sources)


@dataclass(frozen=True)
class Record:
    """What a finished run keeps of its strands."""

    only: Ids
    rounds: dict[int, Arrays]
    scores: pd.DataFrame
    digests: dict[int, str]


@dataclass
class Weaver:
    """Puts rows together; what it has read it keeps, for runs are read by many rows."""

    records: dict[Path, Record] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)  # by what decides them

    def weave(self, directory: RunDirectory, sources: Sources) -> None:
        """Give the run directory the records and the summary of all its clients.

        Nothing that is read of strands is changed: it may be cut short and done again.
        """
        experiment = parse_experiment(dict(directory.config()))
        payload = self._prepared(experiment).payload
        evaluation, training = experiment.settings.evaluate, experiment.settings.train
        tuning = evaluation.tuning(training)
        scores = self._scores(directory, sources)
        rows = []
        for row in directory.rows():
            t = row["round"]
            own = self._record(directory.path).rounds.get(t)
            if own is not None:
                evaluated = {}
                if "owner" in own:
                    found = _by_part(scores[scores["round"] == t])
                    split = payload.timeline.at(t)
                    evaluated = evaluation_row(found, own["partition"], split, evaluation.target)
                row = _whole(row, own, self._heard(t, sources), evaluated)
                if evaluated and tuning is not None:  # all clients are there, and none was dropped
                    steps = num_local_steps(split.num_train_examples, tuning)
                    row["client_steps_evaluation"] = int(steps.sum())
            rows.append(row)
        directory.replace_rounds(rows)
        sha256 = sha256_of(self._digests(sources))
        summary = summarise_run(directory, payload.timeline, evaluation.target, sha256)
        directory.conclude(scores, {**facts_of(experiment, payload), **summary})

    def _record(self, run: Path) -> Record:
        if run not in self.records:
            held = Strands(run)
            only = held.only()
            assert only is not None, run
            self.records[run] = Record(only, held.rounds(), held.clients(), held.digests())
        return self.records[run]

    def _prepared(self, experiment: Experiment) -> Prepared:
        # Participation too: a block's default size follows the cohort.
        decides = ("dataset", "split", "model", "seed", "execution", "participation")
        key = canonical([experiment.plain[name] for name in decides])
        if key not in self.prepared:
            self.prepared[key] = prepare(experiment)
        return self.prepared[key]

    def _heard(self, t: int, sources: Sources) -> Arrays:
        """What was heard of the row's clients in round t, in their order."""
        heard: list[Arrays] = []
        moved: list[tuple[Ids, Arrays]] = []
        for run, clients in sources.items():
            record = self._record(run)
            arrays = record.rounds[t]
            wanted = np.isin(arrays["clients"], clients)
            heard.append({name: arrays[name][wanted] for name in ("clients", "loss", "steps")})
            if "moved" in arrays:
                own = np.isin(record.only, clients)
                moved.append((record.only[own], {"moved": arrays["moved"][own]}))
        found = _in_order([each.pop("clients") for each in heard], heard)
        return found | _in_order([each for each, _ in moved], [each for _, each in moved])

    def _scores(self, directory: RunDirectory, sources: Sources) -> pd.DataFrame:
        """A row for each client and evaluation, as a run that scored all of them would have it."""
        own = self._record(directory.path)
        begin = min(own.rounds)
        parts = [own.scores[own.scores["round"] < begin]]
        for run, clients in sources.items():
            theirs = self._record(run).scores
            wanted = (theirs["round"] >= begin) & theirs["client"].isin(clients)
            parts.append(theirs[wanted])
        scores = pd.concat(parts).sort_values(["round", "part", "client"], ignore_index=True)
        later = scores["round"] >= begin
        models = [
            int(own.rounds[t]["owner"][i])
            for t, i in zip(scores.loc[later, "round"], scores.loc[later, "client"], strict=True)
        ]
        scores.loc[later, "model"] = models
        return scores

    def _digests(self, sources: Sources) -> list[str]:
        """Of the final model of each client, in id order."""
        found = {
            int(i): self._record(run).digests[int(i)]
            for run, clients in sources.items()
            for i in clients
        }
        return [found[i] for i in sorted(found)]


def _in_order(clients: Sequence[Ids], arrays: Sequence[Arrays]) -> Arrays:
    """Arrays of several runs as one, in the order of clients."""
    if not clients:
        return {}
    order = np.argsort(np.concatenate(clients), kind="stable")
    return {name: np.concatenate([each[name] for each in arrays])[order] for name in arrays[0]}


def _by_part(scores: pd.DataFrame) -> dict[str, ClientScores]:
    names = ("client", "correct", "total", "loss")
    there = set(scores["part"])
    chosen = {part: scores[scores["part"] == part] for part in PARTS if part in there}
    return {
        part: ClientScores(*(frame[name].to_numpy() for name in names))
        for part, frame in chosen.items()
    }


def _whole(row: Row, own: Arrays, heard: Arrays, evaluated: Row) -> Row:
    """A round's row for all clients; its columns come in the order in which a run writes them.

    Args:
        row: as the run recorded it, which trained some of the clients; or as it is here already.
        own: what it kept of this round.
    """
    keys = list(row)
    first: Row = {key: row[key] for key in keys[: keys.index("cohort_size") + 1]}
    losses = heard["loss"][heard["steps"] > 0]
    if len(losses):
        first["train_loss"] = float(losses.mean())
    first |= evaluated
    if evaluated:
        first["params_change_sq"] = float(heard["moved"].sum())
    costs = {key: value for key, value in row.items() if key.startswith(COSTS)}
    costs["client_steps"] = int(own["other_steps"]) + int(heard["steps"].sum())
    return first | costs
