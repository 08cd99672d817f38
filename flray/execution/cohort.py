"""Cohorts: the clients of a round, and how they are drawn."""

from dataclasses import dataclass

import numpy as np

from flray.data.dataset import Ids
from flray.data.dealing import whole_share
from flray.randomness import generator


@dataclass(frozen=True)
class Cohort:
    """The clients that are asked in round t.

    What comes back for a cohort of K clients has K rows, in the order of `clients`.

    >>> cohort = Cohort(t=3, clients=np.array([1, 4]))
    >>> cohort.t, len(cohort.clients)
    (3, 2)
    """

    t: int  # Round, counted from 1
    clients: Ids  # (K,) ids in ascending order
    # True for training that only serves a signature: it is not part of the round, and its batches
    # come in another random order
    is_probe: bool = False


def nobody() -> Ids:
    """(0,) no client ids."""
    return np.empty(0, np.int64)


def sample_evaluated(seed: int, t: int, clients: Ids, number: float | None) -> Ids:
    """The clients that are evaluated in round t, ascending: `number` of them, None or inf for all.

    >>> len(sample_evaluated(0, 1, np.arange(9), 4)), len(sample_evaluated(0, 1, np.arange(9), 20))
    (4, 9)
    """
    if number is None or number >= len(clients):
        return clients
    rng = generator(seed, "evaluated clients", t)
    return np.sort(rng.choice(clients, int(number), replace=False))


def cohort_size(num_clients: int, participation: float) -> int:
    """Number of clients that take part in a round: max(rho K, 1), rounded down.

    >>> cohort_size(100, 0.1), cohort_size(3, 0.1)
    (10, 1)
    """
    return max(whole_share(num_clients, participation), 1)


def sample_cohort(members: Ids, size: int, seed: int, t: int) -> Ids:
    """At most `size` of the members, ascending, drawn by seed, round and the smallest member.

    >>> sample_cohort(np.array([4, 7, 9]), size=5, seed=0, t=1)
    array([4, 7, 9])
    """
    if not len(members):
        return members
    rng = generator(seed, "cohort", t, int(members.min()))
    return np.sort(rng.choice(members, min(size, len(members)), replace=False))
