"""Models as data: the params of one model, and a bank of the distinct models of all clients."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.models.generator import seeded_generator

SUMMED = 1 << 14  # numbers of a model summed in float64 at a time, which stay in a cache

Params = dict[str, Tensor]  # leaf name -> tensor; a stack of models has a leading axis
Layers = Literal["all", "first", "last"] | tuple[str, ...]  # layers of a model, or their names


def params_of(module: LightningModule) -> Params:
    """What travels between server and client: parameters and persistent float buffers, by name.

    The tensors share the memory of the module. One that several layers share has its first name.

    >>> from flray.models.mlp200 import Mlp200
    >>> [tuple(leaf.shape) for leaf in params_of(Mlp200((1, 8, 8), 10)).values()]
    [(200, 64), (200,), (10, 200), (10,)]
    """
    persistent = module.state_dict(keep_vars=True)
    name_of = {id(v): k for k, v in reversed(persistent.items())}
    return {
        k: v.detach()
        for k, v in persistent.items()
        if v.is_floating_point() and name_of[id(v)] == k
    }


def load_params(module: LightningModule, params: Params) -> None:
    """Overwrite the module's params in place."""
    for name, leaf in params_of(module).items():
        leaf.copy_(params[name])


def trainable(module: LightningModule) -> Params:
    """The parameters that are trained, by name, not copied; those frozen are left out."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def buffers_of(module: LightningModule) -> frozenset[str]:
    """Names of the params that are no parameters, such as the statistics of a BatchNorm layer."""
    return frozenset(params_of(module)) - {name for name, _ in module.named_parameters()}


def last_layers(names: Iterable[str], number: int) -> frozenset[str]:
    """The names of the leaves of the last so many layers; a layer is what the last dot separates.

    Layers are in the order in which the module defines them, as `params_of` gives them.

    >>> sorted(last_layers(["0.weight", "0.bias", "2.weight", "2.bias"], 1))
    ['2.bias', '2.weight']
    """
    names = list(names)
    layers = layers_of(names)
    if number > len(layers):
        raise ExperimentError(
            f"the last {number} layers were asked for, but this model has {len(layers)}: "
            f"{', '.join(layers)}"
        )
    return leaves_of_layers(names, tuple(layers[len(layers) - number :]))


def flat_rows(leaf: Tensor) -> Tensor:
    """(K, p) the rows of a leaf (K, ...), each of which may be one number.

    >>> flat_rows(torch.zeros(2, 3, 4)).shape, flat_rows(torch.zeros(2)).shape
    (torch.Size([2, 12]), torch.Size([2, 1]))
    """
    return leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]


def layers_of(names: Iterable[str]) -> list[str]:
    """The layers of these leaves, in their order.

    >>> layers_of(["0.weight", "0.bias", "2.weight"])
    ['0', '2']
    """
    return list(dict.fromkeys(map(_layer, names)))


def leaves_of_layers(names: Iterable[str], layers: Layers) -> frozenset[str]:
    """The names of the leaves of these layers; raises an ExperimentError for a layer not there.

    >>> names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    >>> sorted(leaves_of_layers(names, "first")), sorted(leaves_of_layers(names, ("2",)))
    (['0.bias', '0.weight'], ['2.bias', '2.weight'])
    """
    names = list(names)
    known = layers_of(names)
    places = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}
    chosen = known[places[layers]] if isinstance(layers, str) else layers
    if unknown := [layer for layer in chosen if layer not in known]:
        raise ExperimentError(
            f"layers must be all, first, last or a list of this model's layers "
            f"({', '.join(known)}), got {unknown[0]}"
        )
    return frozenset(name for name in names if _layer(name) in chosen)


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


def build_seeded(build: Callable[[], LightningModule], seed: int) -> LightningModule:
    """Build a module whose initial weights depend on the seed alone.

    >>> from flray.models.mlp200 import Mlp200
    >>> a, b = (build_seeded(lambda: Mlp200((1, 8, 8), 10), seed=3) for _ in range(2))
    >>> bool((a.layers[1].weight == b.layers[1].weight).all())
    True
    """
    with seeded_generator(seed):
        return build()


def stack(models: list[Params]) -> Params:
    """U models with leaves (...) as one stack with leaves (U, ...).

    >>> stack([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])["w"].tolist()
    [[1.0], [2.0]]
    """
    return {k: torch.stack([m[k] for m in models]) for k in models[0]}


def rows_of(leaf: Tensor, rows: Ids) -> Tensor:
    """(n, ...) a copy of the rows of a leaf (U, ...) at these positions."""
    return leaf.index_select(0, torch.from_numpy(rows).to(leaf.device))


def rows_on(leaf: Tensor, rows: Ids, device: torch.device) -> Tensor:
    """Rows of a leaf on a device, a view where all or one of them are asked for."""
    if np.array_equal(rows, np.arange(len(leaf))):
        return leaf.to(device)
    if len(rows) and (rows == rows[0]).all():
        first = int(rows[0])
        return leaf[first : first + 1].to(device).expand(len(rows), *leaf.shape[1:])
    return rows_of(leaf, rows).to(device)


def num_bytes(params: Params, num_models: int) -> int:
    """Bytes of one model out of a stack of num_models."""
    return sum(v.numel() * v.element_size() for v in params.values()) // num_models


def digest(params: Params, row: int) -> str:
    """SHA-256 of the leaves of one row, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(params):
        sha.update(name.encode())
        sha.update(params[name][row].contiguous().cpu().numpy().tobytes())
    return sha.hexdigest()


def sha256_of(digests: list[str]) -> str:
    """One hash for the digests of all clients in id order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclass(frozen=True)
class ModelBank:
    """The models of M clients: U distinct ones stacked leaf by leaf, and the row each client uses.

    Clients of a cluster share a row, so memory follows the number of distinct models: one row for
    FedAvg, one per cluster for FL+HC, one per client for Local. A bank is never changed in place:
    methods return new ones.

    >>> bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, owner=np.array([0, 1, 0]))
    >>> bank.num_rows, bank.bytes_per_model
    (2, 4)
    >>> bank.of_clients(np.array([1, 2]))["w"].tolist()
    [[5.0], [1.0]]
    """

    params: Params  # leaves (U, ...), by name
    owner: Ids  # (M,) owner[i] is the row of `params` that client i uses
    # Memory of the server's optimiser, leaves (U, ...) such as `v/layer.weight`; {} without one
    moments: Params = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """U, whether a row is used or not."""
        return len(next(iter(self.params.values())))

    @property
    def bytes_per_model(self) -> int:
        """Bytes of one row, which is what sending a model costs."""
        return num_bytes(self.params, self.num_rows)

    def row(self, u: int) -> Params:
        """Model u, leaves (...) without the leading axis."""
        return {k: v[u] for k, v in self.params.items()}

    def of_clients(self, clients: Ids) -> Params:
        """The clients' models stacked in their order (a copy)."""
        return {n: rows_of(leaf, self.owner[clients]) for n, leaf in self.params.items()}

    def with_rows(self, rows: Ids, owner: Ids) -> "ModelBank":
        """The bank of copies of these rows, with their moments."""
        return self._changed(lambda leaf: rows_of(leaf, rows), owner)

    def _changed(self, change: Callable[[Tensor], Tensor], owner: Ids) -> "ModelBank":
        """The bank with other leaves, of params and moments alike."""
        params = {name: change(leaf) for name, leaf in self.params.items()}
        moments = {name: change(leaf) for name, leaf in self.moments.items()}
        return ModelBank(params, owner, moments)

    def split(self, kinds: Ids) -> "ModelBank":
        """A bank with a row of its own for each pair (kind, row) that some client has.

        After a clustering each cluster has a copy of the joint model, which it trains alone, and
        of its moments.

        >>> bank = ModelBank({"w": torch.tensor([[1.0]])}, np.zeros(3, np.int64))
        >>> bank.split(kinds=np.array([0, 1, 0])).owner
        array([0, 1, 0])

        Args:
            kinds: (M,) usually the cluster of each client.
        """
        pairs, owner = np.unique(np.stack([kinds, self.owner]), axis=1, return_inverse=True)
        return self.with_rows(pairs[1], owner.reshape(-1))

    def shares_of(self, clients: Ids) -> list[tuple[float, ...]]:
        """Weights over all rows of each of the clients, () for a client that uses one model."""
        return [()] * len(clients)

    def joined(self, clients: Ids, labels: Ids, members: Ids) -> "ModelBank":
        """The bank in which each of the clients uses the row of a member with the same label.

        >>> bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, np.array([0, 1, 0]))
        >>> bank.joined(np.array([2]), np.array([0, 1, 1]), members=np.array([0, 1])).owner
        array([0, 1, 1])

        Args:
            labels: (M,) the cluster of each client.
            members: clients whose rows are those of their clusters; the first of a label counts.
        """
        owner = self.owner.copy()
        for i in clients:
            owner[i] = self.owner[members[labels[members] == labels[i]][0]]
        return replace(self, owner=owner).of_some(np.arange(len(owner)))

    def of_some(self, clients: Ids) -> "ModelBank":
        """The rows used by `clients`; owners of other clients are undefined.

        >>> bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, np.array([0, 1, 0]))
        >>> bank.of_some(np.array([1])).params["w"].tolist()
        [[5.0]]
        """
        used, rows = np.unique(self.owner[clients], return_inverse=True)
        if len(used) == self.num_rows:
            return self
        owner = np.zeros_like(self.owner)
        owner[clients] = rows.reshape(-1)
        return self.with_rows(used, owner)

    def combined(self, shares: NDArray[np.float64], owner: Ids) -> "ModelBank":
        """The bank whose row v is the sum of all rows u times shares[v, u], moments too.

        A row that has the share 1 of one row has its bits.

        >>> bank = ModelBank({"w": torch.tensor([[1.0], [5.0]])}, np.array([0, 1]))
        >>> bank.combined(np.array([[0.25, 0.75]]), np.zeros(2, np.int64)).params["w"].tolist()
        [[4.0]]

        Args:
            shares: (V, U), of which each row sums to 1.
            owner: (M,) the new row of each client.
        """
        return self._changed(lambda leaf: _combined(leaf, shares), owner)

    def digests(self, clients: Ids) -> list[str]:
        """SHA-256 of the params of each of the clients."""
        rows = {int(u): digest(self.params, int(u)) for u in np.unique(self.owner[clients])}
        return [rows[int(u)] for u in self.owner[clients]]

    def sha256(self) -> str:
        """One hash of all clients' models in id order, however they are stacked."""
        return sha256_of(self.digests(np.arange(len(self.owner))))


def _combined(leaf: Tensor, shares: NDArray[np.float64]) -> Tensor:
    """(V, ...) sums of the rows of a leaf (U, ...) times shares (V, U), some columns at a time."""
    weights = torch.from_numpy(shares).to(leaf.device)
    combined = leaf.new_empty(len(shares), *leaf.shape[1:])
    columns = (torch.split(flat_rows(rows), SUMMED, 1) for rows in (combined, leaf))
    for sums, part in zip(*columns, strict=True):
        sums.copy_(weights @ part.double())
    return combined


@dataclass(frozen=True)
class MixtureBank(ModelBank):
    """Models of which clients use a mixture: predictions are weighted means of probabilities.

    `owner` is the model with the largest share of each client: the one that is fine-tuned or
    exported where a single model is needed.

    >>> params = {"w": torch.tensor([[1.0], [5.0]])}
    >>> bank = MixtureBank.of(params, np.array([[0.25, 0.75], [1.0, 0.0]]))
    >>> bank.owner, bank.shares_of(np.array([0, 1]))  # client 1 uses one model
    (array([1, 0]), [(0.25, 0.75), ()])
    """

    # (M, U) weight of each model in a client's mixture; rows sum to 1
    shares: NDArray[np.float64] = field(kw_only=True)

    @classmethod
    def of(cls, params: Params, shares: NDArray[np.float64]) -> "MixtureBank":
        """The bank in which client i has the shares (M, U) of its row."""
        return cls(params, shares.argmax(1), shares=shares)

    def shares_of(self, clients: Ids) -> list[tuple[float, ...]]:
        rows = self.shares[clients].tolist()
        return [() if max(row) == 1 else tuple(row) for row in rows]

    def of_some(self, clients: Ids) -> ModelBank:
        return self

    def digests(self, clients: Ids) -> list[str]:
        models = [digest(self.params, u) for u in range(self.num_rows)]
        mixtures = zip(self.owner[clients], self.shares_of(clients), strict=True)
        return [
            sha256_of([*models, np.array(shares).tobytes().hex()]) if shares else models[owner]
            for owner, shares in mixtures
        ]
