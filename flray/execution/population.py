"""The clients of a round: who is there, with how many examples, and who takes part."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flray.data.dataset import Ids
from flray.data.events import Timeline
from flray.data.split import Split
from flray.engines.plan import num_local_steps
from flray.engines.training import Training
from flray.execution.cohort import cohort_size, nobody, sample_cohort
from flray.randomness import generator


@dataclass(frozen=True, kw_only=True)
class Population:
    """The M clients of an experiment as they are in round t, and the draws of cohorts.

    Arrays over all clients have shape (M,) and are indexed by client id.

    >>> from flray.data.events import make_timeline
    >>> ids = np.split(np.arange(40), [5, 15, 35])  # of four clients
    >>> split = Split(np.arange(40), np.arange(40) % 2, ids, ids, ids, holdout=np.array([2]))
    >>> population = Population(timeline=make_timeline(split, ()), participation=0.67, seed=0)
    >>> population.clients, population.holdout, population.num_examples
    (array([0, 1, 3]), array([2]), array([ 5, 10, 20,  5]))
    >>> population.cohort_size, len(population.sample(1, population.clients))
    (2, 2)
    """

    timeline: Timeline  # the split of every round: who is there and holds which examples
    participation: float  # ρ, the share of clients in a cohort
    seed: int
    t: int = 1  # the round whose clients and data these are

    @cached_property
    def _split(self) -> Split:
        return self.timeline.at(self.t)

    @cached_property
    def clients(self) -> Ids:
        """The clients that may train in this round, ascending."""
        return self._split.clients

    @cached_property
    def holdout(self) -> Ids:
        """The clients that are present but never train."""
        return np.setdiff1d(self._split.holdout, self._split.absent)

    def present(self, clients: Ids) -> Ids:
        """Those of these clients that are there in this round, ascending, with holdout clients."""
        return np.setdiff1d(clients, self._split.absent)

    @cached_property
    def changed(self) -> Ids:
        """The clients that joined or got other data in this round."""
        return self.timeline.changed(self.t)

    @cached_property
    def num_examples(self) -> Ids:
        """(M,) n_k, the number of training examples of each client."""
        return self._split.num_train_examples

    @property
    def num_clients(self) -> int:
        """M, holdout and absent clients included."""
        return self._split.num_clients

    @property
    def cohort_size(self) -> int:
        """max(ρ N, 1), rounded down, where N is the number of clients that may train."""
        return cohort_size(len(self.clients), self.participation)

    def num_steps(
        self, clients: Ids, training: Training, rounds: Sequence[Sequence[int]] = ()
    ) -> Ids:
        """(K,) steps of these clients' optimisers in a training of this round.

        Args:
            rounds: of each client, the rounds whose data it trains on; (): this round.
        """
        sizes = [len(self._split.trained_on(i)) for i in clients.tolist()]
        if rounds:
            pairs = zip(clients.tolist(), rounds, strict=True)
            sizes = [len(self.timeline.trained_on(i, of_client)) for i, of_client in pairs]
        return num_local_steps(np.array(sizes, np.int64), training)

    def generator(self, purpose: str, *where: int) -> np.random.Generator:
        """Random numbers that depend on the seed, `purpose` and `where` (a round, a client) alone.

        An algorithm draws from nothing else, so that resumed and distributed runs repeat it.
        """
        return generator(self.seed, purpose, *where)

    def sample(self, t: int, members: Ids, size: int | None = None) -> Ids:
        """A cohort of `size` of the members, at most all of them; of no members nobody is drawn.

        Drawn by seed, round and the smallest member, so that a cluster draws the same clients
        whatever the other clusters are.

        Args:
            members: Ids to draw from, ascending.
            size: Number of clients, by default max(rho |members|, 1).
        """
        if size is None:
            size = cohort_size(len(members), self.participation)
        return sample_cohort(members, size, self.seed, t)

    def sample_clusters(self, t: int, labels: Ids, size: int | None = None) -> Ids:
        """The cohort with a sample of each cluster, ascending; labels (M,), -1: in no cluster.

        Args:
            size: number of clients of each cluster, by default max(rho |cluster|, 1).
        """
        present = labels[self.clients]
        names = np.flatnonzero(np.bincount(present[present >= 0]))  # without sorting
        clusters = [self.clients[present == c] for c in names]
        cohorts = [self.sample(t, members, size) for members in clusters]
        return np.sort(np.concatenate([nobody(), *cohorts]))
