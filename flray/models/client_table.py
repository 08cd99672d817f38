"""A client table: rows of state that belong to one client each, for the clients that have any.

SCAFFOLD's control variates, the models of `local`, the private layers of LG-FedAvg. A table lives
with the server; the rows of a cohort travel with its jobs and are written back after them.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from flray.data.dataset import Ids
from flray.models.bank import ModelBank, Params, rows_of, rows_on

DEFAULT = -1  # in place of a block: the client has the default row
MOST_STORED = 2  # rows in all blocks for each row in use; above that, sparse blocks are rewritten


@dataclass(frozen=True)
class ClientTable:
    """State of M clients, a row for each: control variates, private layers, whole models.

    A client that never got a row has the default. A table is never changed in place: `updated`
    returns a new one, which shares the blocks of the old. Each update is one block, so it costs its
    own rows, memory follows the clients heard, and a checkpoint writes new blocks only.

    >>> table = ClientTable.empty({"c": torch.zeros(1, 1)}, num_clients=3)
    >>> table = table.updated(np.array([2]), {"c": torch.ones(1, 1)})
    >>> table.clients, table.of_clients(np.arange(3))["c"].tolist()
    (array([2]), [[0.0], [0.0], [1.0]])
    """

    default: Params  # leaves (1, ...)
    block_of: Ids  # (M,) the block of each client, or DEFAULT
    row_of: Ids  # (M,) its row in that block
    blocks: dict[str, Params]  # leaves (n, ...) by the number of the block
    num_updates: int = 0  # the number of the next block

    @classmethod
    def empty(cls, default: Params, num_clients: int) -> "ClientTable":
        """The table in which every client has the default, leaves (1, ...)."""
        nowhere = np.full(num_clients, DEFAULT, dtype=np.int64)
        return cls(default, nowhere, np.zeros(num_clients, dtype=np.int64), {})

    @property
    def clients(self) -> Ids:
        """The clients that have a row of their own, ascending."""
        return np.flatnonzero(self.block_of != DEFAULT)

    def of_clients(self, clients: Ids) -> Params:
        """The rows of the clients stacked in their order, a view where they are one whole block.

        >>> table = ClientTable.empty({"c": torch.zeros(1, 1)}, 3)
        >>> table = table.updated(np.array([2]), {"c": torch.ones(1, 1)})
        >>> table.of_clients(np.array([2, 0]))["c"].tolist()
        [[1.0], [0.0]]
        """
        return self._stacked(clients)

    def _stacked(self, clients: Ids, num_defaults: int = 0) -> Params:
        """So many default rows, then those of the clients, each copied once."""
        blocks, rows = self.block_of[clients], self.row_of[clients]
        numbers = np.unique(blocks)
        if not num_defaults and len(numbers) == 1 and numbers[0] != DEFAULT:
            block = self.blocks[str(numbers[0])]
            return {n: rows_on(block[n], rows, leaf.device) for n, leaf in self.default.items()}
        stacked = {
            name: leaf.expand(num_defaults + len(clients), *leaf.shape[1:]).clone()
            for name, leaf in self.default.items()
        }
        for number in numbers[numbers != DEFAULT]:
            positions = np.flatnonzero(blocks == number)
            for name, leaf in self.blocks[str(number)].items():
                into = torch.from_numpy(num_defaults + positions).to(stacked[name].device)
                values = rows_of(leaf, rows[positions]).to(stacked[name].device)
                stacked[name].index_copy_(0, into, values)
        return stacked

    def updated(self, clients: Ids, rows: Params) -> "ClientTable":
        """The table in which these clients have these rows, leaves (K, ...) in their order.

        A table without leaves stays empty.
        """
        if not len(clients) or not rows:
            return self
        block_of, row_of = self.block_of.copy(), self.row_of.copy()
        block_of[clients] = self.num_updates
        row_of[clients] = np.arange(len(clients))
        blocks = {**self.blocks, str(self.num_updates): rows}
        in_use = {str(number) for number in np.unique(block_of)}
        return replace(
            self,
            block_of=block_of,
            row_of=row_of,
            blocks={name: block for name, block in blocks.items() if name in in_use},
            num_updates=self.num_updates + 1,
        )._without_waste()

    def bank(self, clients: Ids) -> ModelBank:
        """Rows that are whole models as a bank: one of each client that has its own, before them
        the default. Owners of clients not named are undefined.
        """
        holders = clients[self.block_of[clients] != DEFAULT]
        owner = np.zeros(len(self.block_of), dtype=np.int64)
        num_defaults = 0 if len(holders) == len(clients) else 1
        owner[holders] = num_defaults + np.arange(len(holders))
        return ModelBank(self._stacked(holders, num_defaults), owner)

    def _without_waste(self) -> "ClientTable":
        """Rewrite blocks of which less than half is in use, once rows in no use outnumber others.

        A block loses rows as its clients get new ones, so a row is rewritten about once.
        """
        sizes = {name: len(next(iter(block.values()))) for name, block in self.blocks.items()}
        clients = self.clients
        if sum(sizes.values()) <= MOST_STORED * len(clients):
            return self
        numbers, used = np.unique(self.block_of[clients], return_counts=True)
        sparse = [n for n, count in zip(numbers, used, strict=True) if 2 * count < sizes[str(n)]]
        moving = clients[np.isin(self.block_of[clients], sparse)]
        return self.updated(moving, self.of_clients(moving))
