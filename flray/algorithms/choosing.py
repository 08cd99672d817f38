"""How clients choose among models: each takes the one that is best on its own data (FLIS)."""

from typing import Literal

import numpy as np

from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.execution.federation import TEST_DATA, Cohort, Federation
from flray.models.bank import ModelBank

# The loss on the client's validation or training part; or, what FLIS's code does, the accuracy on
# its test part, which needs `uses_ground_truth: true`.
ChooseBy = Literal["validation", "train", "test_accuracy"]


def require_choice(by: ChooseBy, fed: Federation) -> None:
    """Refuse an experiment in which clients cannot choose so: called by a method's `require`."""
    if by == "test_accuracy":
        fed.require_ground_truth(TEST_DATA)
    else:
        fed.require_example_losses()


def choose(bank: ModelBank, clients: Ids, by: ChooseBy, fed: Federation) -> tuple[Ids, Ids]:
    """The clients that answered, in ascending order, and the row of the bank that each chose.

    A client takes the row with the smallest loss, or with the highest accuracy, on its own part. A
    client without validation examples chooses by its training loss, one without any the first row.
    If the bank has one row, nobody is asked.

    >>> import torch
    >>> bank = ModelBank({"w": torch.zeros(1, 2)}, owner=np.array([0, 0]))
    >>> choose(bank, np.array([1]), "train", fed=None)
    (array([1]), array([0]))
    """
    if bank.num_rows == 1 or not len(clients):
        return clients, np.zeros(len(clients), np.int64)
    if by == "test_accuracy":
        judgement = fed.judge(bank, Cohort(fed.t, clients), "test")
        return _chosen(dict(zip(judgement.clients, judgement.most_accurate, strict=True)))
    judgement = fed.judge(bank, Cohort(fed.t, clients), by)
    rows = dict(zip(judgement.clients, judgement.best, strict=True))
    without = judgement.clients[judgement.best < 0]
    if by == "validation" and len(without):
        again = fed.judge(bank, Cohort(fed.t, without), "train")
        rows = {i: row for i, row in rows.items() if row >= 0}
        rows |= zip(again.clients, again.best, strict=True)
    return _chosen(rows)


def _chosen(row_of: dict[int, int]) -> tuple[Ids, Ids]:
    """Clients and rows, the first row for a client that has nothing to choose by."""
    clients = np.array(sorted(row_of), np.int64)
    rows = np.array([row_of[i] for i in clients], np.int64)
    if len(rows) and (rows < 0).all():
        raise ExperimentError(
            "clients choose among models by their loss on their own examples, and nobody has one: "
            "the model must define example_losses(batch) -> (B,)"
        )
    return clients, np.maximum(rows, 0)
