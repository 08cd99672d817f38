"""Local: every client keeps its own model; the sampled ones train, nothing is averaged or sent."""

from dataclasses import dataclass

import numpy as np

from flray.algorithms.algorithm import Outcome
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.models.client_table import ClientTable


@dataclass(frozen=True)
class LocalState:
    """State of local training: a model for each client that has trained."""

    models: ClientTable  # w_k; who has not trained yet has the initial model


@dataclass(frozen=True)
class Local:
    """Every client for itself: the baseline that federated methods should beat.

    A client that was never sampled, a newcomer or a holdout client, uses the initial model. With
    `participation: 1` all clients train in every round. It has no keys:

        algorithm: local

    >>> import torch
    >>> models = ClientTable.empty({"w": torch.zeros(1, 2)}, 3)
    >>> models = models.updated(np.array([1]), {"w": torch.ones(1, 2)})
    >>> Local().partition(LocalState(models))  # client 1 has trained
    array([0, 1, 0])
    """

    gradient = staticmethod(plain_gradient)

    def init(self, fed: Federation) -> Outcome[LocalState]:
        return Outcome(LocalState(ClientTable.empty(fed.initial, fed.num_clients)))

    def cohort(self, state: LocalState, t: int, fed: Federation) -> Cohort:
        return Cohort(t, fed.sample(t, fed.clients))

    def round(self, state: LocalState, cohort: Cohort, fed: Federation) -> Outcome[LocalState]:
        trained = fed.train(state.models.bank(cohort.clients), cohort, self.gradient)
        models = state.models.updated(trained.clients, trained.params)
        return Outcome(LocalState(models), trained.metrics())

    def deploy(self, state: LocalState, clients: Ids, fed: Federation) -> ModelBank:
        return state.models.bank(clients)

    def partition(self, state: LocalState) -> Ids:
        """A cluster for each client that has trained; the others share the initial model."""
        clients = state.models.clients
        labels = np.zeros(len(state.models.block_of), dtype=np.int64)
        labels[clients] = 1 + np.arange(len(clients))
        return labels
