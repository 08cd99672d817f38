"""The records of a row whose groups of clients were trained by several runs."""

from dataclasses import dataclass

import pandas as pd

from flray.columns import (
    CLIENT,
    CLIENT_STEPS,
    CLIENT_STEPS_EVALUATION,
    CORRECT,
    LOSS,
    MODEL,
    PARAMS_CHANGE,
    PART,
    ROUND,
    TOTAL,
    TRAIN_LOSS,
)
from flray.config.experiment import Experiment
from flray.engines.plan import num_local_steps
from flray.measures.scores import ClientScores
from flray.models.bank import ModelBank, sha256_of
from flray.records.run_directory import PARTS, RunDirectory
from flray.runs.assemble import facts_of
from flray.runs.preparing import Prepared
from flray.server.evaluation import RoundRow, evaluation_row
from flray.server.summary import summarise_run
from flray.sweeps.branch import Branch
from flray.sweeps.groups import MOVED, SHA256, STEPS, Frames


@dataclass(frozen=True)
class Assembly:
    """Gives a run directory that trained some of its clients the records of all of them.

    They are equal to the last bit to those of a run that trained everybody.
    """

    directory: RunDirectory
    experiment: Experiment
    parts: Prepared
    branch: Branch
    bank: ModelBank  # that clients use after the clustering

    @property
    def begin(self) -> int:
        """The round after which groups were trained."""
        return self.branch.algorithm.rounds_before

    def put_together(self, tables: Frames) -> None:
        """Write the records of all clients. May be cut short and done again."""
        directory, payload = self.directory, self.parts.payload
        scores = self._all_scores(tables["scores"])
        directory.replace_rounds([self._whole(row, tables, scores) for row in directory.rows()])
        sha256 = sha256_of(tables["models"][SHA256].tolist())
        target = self.experiment.settings.evaluate.target
        summary = summarise_run(directory, payload.timeline, target, sha256)
        directory.conclude(scores, {**facts_of(self.experiment, payload), **summary})

    def _all_scores(self, later: pd.DataFrame) -> pd.DataFrame:
        """A row for each client and evaluation, as a run that scored all of them would have it."""
        here = self.directory.clients()
        later = later.assign(**{MODEL: self.bank.owner[later[CLIENT]]})
        earlier = here[here[ROUND] <= self.begin]
        scores = pd.concat([earlier, later]) if len(earlier) else later
        return scores.sort_values([ROUND, PART, CLIENT], ignore_index=True)

    def _whole(self, row: RoundRow, tables: Frames, scores: pd.DataFrame) -> RoundRow:
        """A round's row for all clients.

        Args:
            row: as it was recorded by the run that trained some of the clients.
        """
        t = row[ROUND]
        if t <= self.begin:
            return row
        trained, scored = _of_round(tables["rounds"], t), _of_round(scores, t)
        steps = int(trained[STEPS].sum())
        if t == 1:  # whose row has what a clustering before round 1 cost
            steps += self.branch.counts[CLIENT_STEPS]
        whole = row | {CLIENT_STEPS: steps}
        losses = trained.loc[trained[STEPS] > 0, LOSS].to_numpy()
        if len(losses):
            whole[TRAIN_LOSS] = float(losses.mean())
        if len(scored):
            whole |= self._evaluated(t, scored)
            whole[PARAMS_CHANGE] = float(trained[MOVED].dropna().to_numpy().sum())
        return whole

    def _evaluated(self, t: int, scored: pd.DataFrame) -> RoundRow:
        """The columns of an evaluation in round t, from the scores of all clients."""
        names = (CLIENT, CORRECT, TOTAL, LOSS)
        parts = {part: scored[scored[PART] == part] for part in PARTS}
        client_scores = {
            part: ClientScores(*(frame[name].to_numpy() for name in names))
            for part, frame in parts.items()
            if len(frame)
        }
        settings, split = self.experiment.settings, self.parts.payload.timeline.at(t)
        partition = self.branch.partition(self.branch.state)
        row = evaluation_row(client_scores, partition, split, settings.evaluate.target)
        tuning = settings.evaluate.tuning(settings.train)
        if tuning is not None:  # all clients are present, and none was dropped
            steps = num_local_steps(split.num_train_examples, tuning)
            row[CLIENT_STEPS_EVALUATION] = int(steps.sum())
        return row


def _of_round(table: pd.DataFrame, t: int) -> pd.DataFrame:
    return table[table[ROUND] == t]
