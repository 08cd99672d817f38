"""Answers of clients to `Federation.judge` and `Federation.predict`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flray.data.dataset import Ids


@dataclass(frozen=True)
class Judgement:
    """Loss and accuracy of U models on the data of K clients, as `Federation.judge` returns them.

    Row k belongs to clients[k], column u to row u of the judged bank.

    >>> loss, accuracy = np.array([[2.0, 1.0]]), np.array([[0.7, 0.6]])
    >>> judgement = Judgement(np.array([4]), loss, accuracy)
    >>> judgement.best, judgement.most_accurate  # client 4: model 1 by loss, model 0 by accuracy
    (array([1]), array([0]))
    """

    clients: Ids  # (K,) ascending
    loss: NDArray[np.float64]  # (K, U) mean over the client's examples; NaN if it has none
    accuracy: NDArray[np.float64]  # (K, U) share of the client's examples, likewise

    @property
    def best(self) -> Ids:
        """(K,) the model with the least loss, the first of equals; -1 where all are NaN.

        >>> loss = np.array([[2.0, 1.0], [np.nan, np.nan]])
        >>> Judgement(np.array([4, 9]), loss, loss).best
        array([ 1, -1])
        """
        least: Ids = np.nan_to_num(self.loss, nan=np.inf).argmin(1)
        return np.where(np.isnan(self.loss).all(1), -1, least)

    @property
    def most_accurate(self) -> Ids:
        """(K,) the model with the highest accuracy, the first of equals; -1 where all are NaN."""
        most: Ids = np.nan_to_num(self.accuracy, nan=-1.0).argmax(1)
        return np.where(np.isnan(self.accuracy).all(1), -1, most)


@dataclass(frozen=True)
class Predictions:
    """Predictions of K clients' models on the R public examples of the server.

    >>> import torch
    >>> hard = torch.eye(3)[torch.tensor([[0, 2], [1, 2]])]  # 2 models, 2 examples, 3 classes
    >>> Predictions(np.array([0, 5]), hard).values.argmax(2).tolist()
    [[0, 2], [1, 2]]
    """

    clients: Ids  # (K,) ascending
    values: Tensor  # B (K, R, classes): one-hot rows or class probabilities
