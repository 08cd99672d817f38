"""Models as data: the params of one model, and a bank of the distinct models of all clients."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from flray.data.dataset import Ids

Params = dict[str, Tensor]  # leaf name -> tensor; a stack of models has a leading axis


def params_of(module: LightningModule) -> Params:
    """What travels between server and client: parameters and persistent float buffers, by name."""
    persistent = module.state_dict(keep_vars=True)
    return {k: v.detach() for k, v in persistent.items() if v.is_floating_point()}


def load_params(module: LightningModule, params: Params) -> None:
    """Overwrite the module's params in place."""
    for name, leaf in params_of(module).items():
        leaf.copy_(params[name])


def trainable(module: LightningModule) -> Params:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def build_seeded(build: Callable[[], LightningModule], seed: int) -> LightningModule:
    """Build a module whose initial weights depend on the seed alone."""
    # torch's initialisers read the global generator: give them a forked one.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def stack(models: list[Params]) -> Params:
    return {k: torch.stack([m[k] for m in models]) for k in models[0]}


def num_bytes(params: Params, num_models: int) -> int:
    """Bytes of one model out of a stack of num_models."""
    return sum(v.numel() * v.element_size() for v in params.values()) // num_models


def digest(params: Params, row: int) -> str:
    """SHA-256 of one row's leaves in name order."""
    sha = hashlib.sha256()
    for name in sorted(params):
        sha.update(name.encode())
        sha.update(params[name][row].contiguous().cpu().numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True)
class ModelBank:
    """U distinct models stacked leaf by leaf, and the row each of the M clients uses."""

    params: Params  # leaves (U, ...)
    owner: Ids  # (M,)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.params.values())))

    @property
    def bytes_per_model(self) -> int:
        return num_bytes(self.params, self.num_rows)

    def row(self, u: int) -> Params:
        return {k: v[u] for k, v in self.params.items()}

    def of_clients(self, clients: Ids) -> Params:
        """The clients' models stacked in their order (a copy)."""
        any_leaf = next(iter(self.params.values()))
        rows = torch.from_numpy(self.owner[clients]).to(any_leaf.device)
        return {k: v.index_select(0, rows) for k, v in self.params.items()}

    def owned_by(self, clients: Ids, models: Params) -> "ModelBank":
        """A bank in which each of the clients has a row of its own, holding its model.

        A client that shared its row gets a new one at the end; the others keep theirs.
        """
        uses = np.bincount(self.owner, minlength=self.num_rows)
        shares = uses[self.owner[clients]] > 1  # (K,)
        owner = self.owner.copy()
        owner[clients[shares]] = self.num_rows + np.arange(shares.sum())
        params = {}
        device = next(iter(models.values())).device
        new, rows = torch.from_numpy(shares).to(device), torch.from_numpy(owner[clients]).to(device)
        for k, v in self.params.items():
            grown = torch.cat([v, models[k][new]])  # a copy: what was received stays as it is
            params[k] = grown.index_copy_(0, rows, models[k])
        return _without_unused_rows(ModelBank(params, owner))

    def split(self, kinds: Ids) -> "ModelBank":
        """The same models, with a row for each pair of kind and row: clusters that start equal."""
        pairs, owner = np.unique(np.stack([kinds, self.owner]), axis=1, return_inverse=True)
        any_leaf = next(iter(self.params.values()))
        rows = torch.from_numpy(pairs[1]).to(any_leaf.device)
        params = {k: v.index_select(0, rows) for k, v in self.params.items()}
        return ModelBank(params, owner.reshape(-1))

    def joined(self, clients: Ids, labels: Ids) -> "ModelBank":
        """The clients use the row of the first other client with their label, where there is one.

        labels (M,) are those of all clients.
        """
        owner = self.owner.copy()
        others = np.setdiff1d(np.arange(len(owner)), clients)
        for i in clients:
            same = others[labels[others] == labels[i]]
            if len(same):
                owner[i] = self.owner[same[0]]
        return _without_unused_rows(replace(self, owner=owner))

    def sha256(self) -> str:
        """Hash over clients in id order of the digest of each one's params."""
        rows = {int(u): digest(self.params, int(u)) for u in np.unique(self.owner)}
        return hashlib.sha256("".join(rows[int(u)] for u in self.owner).encode()).hexdigest()


def _without_unused_rows(bank: ModelBank) -> ModelBank:
    used, owner = np.unique(bank.owner, return_inverse=True)
    if len(used) == bank.num_rows:
        return bank
    any_leaf = next(iter(bank.params.values()))
    keep = torch.from_numpy(used).to(any_leaf.device)
    params = {k: v.index_select(0, keep) for k, v in bank.params.items()}
    return replace(bank, params=params, owner=owner.astype(np.int64))


def squared_change(new: ModelBank, old: ModelBank) -> float:
    """||W^t - W^(t-1)||^2 over the params of all clients (FLT, Theorem 2)."""
    pairs, counts = np.unique(np.stack([new.owner, old.owner]), axis=1, return_counts=True)
    total = 0.0
    for u, v, count in zip(pairs[0], pairs[1], counts, strict=True):
        moved = (new.params[k][u] - old.params[k][v] for k in new.params)
        total += float(count) * sum(float(d.double().square().sum()) for d in moved)
    return total
