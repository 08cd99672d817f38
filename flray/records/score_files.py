"""Scores of clients: one small file per part and evaluation while a run goes on, then one table."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flray import columns
from flray.columns import PART, ROUND, ScoreColumns
from flray.data.dataset import Ids
from flray.measures.scores import ClientScores
from flray.records import tables

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start

# What a client's model is scored on: its own examples or the whole test set (global), as it is or
# after fine-tuning on the client's own data. last_trained: its own test examples, by the model that
# it has just trained; round 0 is the initial model.
PARTS = (*dict.fromkeys(part for _, part, _ in columns.EVALUATED), "last_trained")
# Columns of every run; scores and groups depend on the experiment.
REQUIRED = (ROUND, columns.CLIENT, PART, columns.TOTAL, columns.LOSS, columns.MODEL)


class ScoreFiles:
    """The scores of a run's clients.

    A part is what models are scored on, one of PARTS. While a run goes on, each part of each
    evaluated round is a file of its own, so that appending does not rewrite what is there and a
    resumed run can drop what no checkpoint knows. A finished run has all of them in one table.

    Args:
        folder: of the files while the run goes on.
        path: of the table of a finished run.

    >>> from tempfile import mkdtemp
    >>> files = ScoreFiles(Path(mkdtemp()), Path(mkdtemp()) / "clients.parquet")
    >>> scores = ClientScores(np.array([0, 2]), np.array([3, 4]), np.array([4, 4]), np.zeros(2))
    >>> files.append(1, "test", scores, model=np.zeros(3, np.int64))
    >>> files.table(is_final=False)["accuracy"].to_pylist(), files.num_evaluations(1, False)
    ([0.75, 1.0], 1)
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path

    def append(
        self, t: int, part: str, scores: ClientScores, model: Ids, group: Ids | None = None
    ) -> None:
        """Add a row for each scored client of one part in round t.

        Args:
            part: One of PARTS.
            scores: Scores of some clients; without any, nothing is written.
            model: The bank row each client of the run uses, by client id 0..M-1.
            group: Planted groups, by client id too.

        Raises:
            ValueError: The part is unknown, or was recorded for this round already.
        """
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
        path = self._file(t, part)
        if path.exists():
            raise ValueError(f"the {part} scores of round {t} are already recorded")
        if not len(scores.clients):
            return  # a finished run could not tell that it was there
        self.folder.mkdir(parents=True, exist_ok=True)
        tables.write(path, _client_rows(t, part, scores, model, group))

    def table(self, is_final: bool) -> pa.Table:
        """The rows of all clients, parts and rounds, from the table of a finished run or the parts.

        Columns that only some parts have, such as the group, are null in the others.
        """
        if files := [self.path] if is_final else self._files():
            return tables.join([tables.read(file, required=REQUIRED) for file in files])
        nothing = np.empty(0, np.int64)
        scores = ClientScores(nothing, nothing, nothing, np.empty(0))
        return _client_rows(0, PARTS[0], scores, nothing, None)

    def num_evaluations(self, t: int, is_final: bool) -> int:
        """How many parts were scored until round t, each part of each round counted once."""
        if not is_final:
            return tables.num_files(self.folder, "parquet", t)
        table = tables.read(self.path, [ROUND, PART]).filter(pc.field(ROUND) <= t)
        return len(table.group_by([ROUND, PART]).aggregate([]))

    def has_part(self, part: str, is_final: bool) -> bool:
        """True if the part was scored in any round."""
        if not is_final:
            return any(self.folder.glob(f"round_*_{part}.parquet"))
        return part in tables.read(self.path, [ROUND, PART])[PART].to_pylist()

    def replace(self, table: pa.Table) -> None:
        """Write the table of a finished run."""
        tables.write(self.path, table)

    def remove_parts(self) -> None:
        """Remove the files of single parts, which the table has by now."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)

    def divide(self) -> None:
        """Write the table of a finished run as files of single parts again."""
        table = tables.read(self.path)
        self.folder.mkdir(parents=True, exist_ok=True)
        pairs = zip(table[ROUND].to_pylist(), table[PART].to_pylist(), strict=True)
        for t, part in dict.fromkeys(pairs):
            rows = table.filter((pc.field(ROUND) == t) & (pc.field(PART) == part))
            tables.write(self._file(t, part), rows)

    def truncate(self, after_round: int) -> None:
        """Drop the scores of later rounds, and a table that was written by a `finish` cut short."""
        self.path.unlink(missing_ok=True)
        tables.remove_later_files(self.folder, "parquet", after_round)

    def adopt(self, other: "ScoreFiles", num_rounds: int) -> None:
        """Copy the scores of the first rounds of another, unfinished run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in other._files():
            if tables.round_of(file) <= num_rounds:
                shutil.copyfile(file, self.folder / file.name)

    def _file(self, t: int, part: str) -> Path:
        return self.folder / f"round_{t:06d}_{part}.parquet"

    def _files(self) -> list[Path]:
        return tables.files_of_rounds(self.folder, "parquet")


def _client_rows(
    t: int, part: str, scores: ClientScores, model: Ids, group: Ids | None
) -> pa.Table:
    """A row of clients.parquet for each scored client."""
    num_rows = len(scores.clients)
    has_classes = columns.ACCURACY_COLUMNS in scores.values
    rows = {
        ROUND: np.full(num_rows, t, dtype=np.int64),
        columns.CLIENT: scores.clients,
        PART: pa.array([part] * num_rows, pa.string()),
        **({columns.CORRECT: scores.correct} if has_classes else {}),
        columns.TOTAL: scores.total,
        **{score.name: values for score, values in scores.values.items()},
        columns.LOSS: scores.loss,
        columns.MODEL: model[scores.clients],
    }
    return pa.table(rows if group is None else rows | {columns.GROUP: group[scores.clients]})


def scores_in(rows: "pd.DataFrame", scores: Sequence[ScoreColumns]) -> ClientScores:
    """The scores of the clients of one part in one round, from their rows of clients.parquet."""
    correct = rows[columns.CORRECT] if columns.CORRECT in rows else 0 * rows[columns.TOTAL]
    total, loss = rows[columns.TOTAL].to_numpy(), rows[columns.LOSS].to_numpy()
    values = {score: rows[score.name].to_numpy() for score in scores}
    return ClientScores(rows[columns.CLIENT].to_numpy(), correct.to_numpy(), total, loss, values)
