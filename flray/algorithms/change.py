"""When FLT clusters again: flags of change raised by clients or seen by the server, or a clock."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flray.clustering.update import updates
from flray.execution.federation import Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank
from flray.values import Unbounded, require_at_least

Series = NDArray[np.float64]


@dataclass(frozen=True)
class Flags:
    """δ of each client, and what its next value is compared with; part of FLT's state."""

    raised: NDArray[np.bool_]  # δ (M,)
    last: Series  # (M,) the client's last loss or update norm, NaN before its first training

    @classmethod
    def none(cls, num_clients: int) -> "Flags":
        """No flag is raised, and no client has been heard."""
        return cls(np.zeros(num_clients, np.bool_), np.full(num_clients, np.nan))


@dataclass(frozen=True)
class Dynamic:
    """FLT, Alg. 3 l. 21-28: when clients are clustered again; by default never.

    A flag δ_i says that the data of client i seem to have changed. Clients are clustered again
    after a round in which more than λ flags are raised, and every τ rounds; then flags are lowered.

    >>> two_of_three = Flags(np.array([True, True, False]), np.full(3, np.nan))
    >>> Dynamic(flags="loss", more_than=1).is_due(two_of_three, t=4)
    True
    >>> Dynamic(every=10).is_due(Flags.none(3), t=4), Dynamic(every=10).is_due(Flags.none(3), t=20)
    (False, True)
    """

    # What raises a flag. events: a client reports that its data changed. loss: its training loss
    # has jumped. update: the server finds that its params change more than before
    flags: Literal["none", "events", "loss", "update"] = "none"
    more_than: int = 0  # Number λ of raised flags above which clients are clustered again
    # Interval τ, in rounds, after which clients are clustered again. None: only by flags
    every: int | None = None
    # Factor by which a loss or update norm must exceed its last value to raise a flag
    jump: Unbounded = 3.0
    floor: float = 0.1  # Smallest loss or norm to compare with: near 0 any noise would be a jump

    def __post_init__(self) -> None:
        require_at_least(self, more_than=0, floor=0, every=1)
        if not self.jump > 1:
            raise ValueError(f"jump must be > 1, got {self.jump}")

    @property
    def is_static(self) -> bool:
        """True if clients are never clustered again."""
        return self.flags == "none" and self.every is None

    def updated(self, flags: Flags, trained: Trained, bank: ModelBank, fed: Federation) -> Flags:
        """Flags after a round in which the trained clients started from their rows of the bank.

        A loss or norm raises a flag if it exceeds `jump` times the client's last one; the first
        training of a client raises none.
        """
        if self.flags == "none":
            return flags
        raised, last = flags.raised.copy(), flags.last.copy()
        if self.flags == "events":
            raised[np.intersect1d(fed.changed, fed.clients)] = True
            return Flags(raised, last)
        if self.flags == "loss":
            now = trained.loss
        else:  # ||w_k - w0_k||
            w0 = fed.learned(bank.params)
            moved = updates(trained, w0, bank.owner[trained.clients])
            now = moved.double().norm(dim=1).cpu().numpy()
        before = np.maximum(last[trained.clients], self.floor)
        raised[trained.clients] |= now > self.jump * before  # never at first: NaN compares False
        last[trained.clients] = now
        return Flags(raised, last)

    def is_due(self, flags: Flags, t: int) -> bool:
        """True if clients are clustered again after round t.

        l. 23: sum_i δ_i > λ or t mod τ = 0
        """
        enough = int(flags.raised.sum()) > self.more_than
        return enough or (self.every is not None and t % self.every == 0)
