"""The work of a case, for every system alike; needs numpy and torch only.

`export.py` writes a folder with everything that decides the result: images, labels, initial
weights, and for every round the cohort and the order of each client's examples. A system that
follows it ends with the same weights as the others, up to rounding.
"""

import json
import os
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
DTYPE = torch.float64 if os.environ.get("BENCH_EXACT") else torch.float32
torch.backends.cudnn.allow_tf32 = False  # on by default: weights of a CNN would differ by 5e-4


class Work:
    """One case, read from its folder; arrays are mapped, so processes share them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        facts = json.loads((self.folder / "facts.json").read_text())
        self.case: str = facts["case"]
        self.model: str = facts["model"]
        self.lr: float = facts["lr"]
        self.batch: int = facts["batch_size"]
        self.num_clients: int = facts["clients"]
        self.cohorts = np.load(self.folder / "cohorts.npy")  # (rounds, K) client ids
        self.orders = np.load(self.folder / "orders.npy", mmap_mode="r")  # (rounds, K, n)
        self.num_rounds, self.num_heard, self.num_examples = self.orders.shape
        self.steps = self.num_heard * -(-self.num_examples // self.batch)  # per round

    def load_data(self) -> None:
        """Images (N, 1, 28, 28) normalised, and labels (N,)."""
        images = np.load(self.folder / "images.npy", mmap_mode="c")
        self.images = torch.from_numpy(images).to(DEVICE, DTYPE)
        self.labels = torch.from_numpy(np.load(self.folder / "labels.npy")).to(DEVICE)

    def examples(self, t: int, client: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a client in the order of round t, which is counted from 0."""
        k = int(np.flatnonzero(self.cohorts[t] == client)[0])
        ids = torch.from_numpy(np.array(self.orders[t, k])).to(DEVICE)
        return self.images[ids], self.labels[ids]

    def new_net(self) -> nn.Module:
        net = NETS[self.model]()
        net.load_state_dict(self.initial())
        return net.to(DEVICE, DTYPE)

    def initial(self) -> dict[str, Tensor]:
        with np.load(self.folder / "initial.npz") as found:
            return {name: torch.from_numpy(found[name]) for name in found}

    def train(self, net: nn.Module, t: int, client: int) -> None:
        """The reference: plain SGD over the client's batches."""
        optimizer = torch.optim.SGD(net.parameters(), lr=self.lr)
        x, y = self.examples(t, client)
        for images, labels in zip(x.split(self.batch), y.split(self.batch), strict=True):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The places of flray's layers, so that weights have the same names.
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 200), nn.Identity(), nn.ReLU(), nn.Linear(200, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NETS = {"mlp200": Mlp, "flhc_cnn": Cnn}


class Report:
    """Seconds of each round, and in the end the weights: `<system>.npz` and `<system>.json`."""

    def __init__(self, system: str, work: Work) -> None:
        self.system, self.work = system, work
        self.times = [perf_counter()]

    def start(self) -> None:
        self.times = [perf_counter()]

    def round_done(self) -> None:
        if DEVICE.startswith("cuda"):
            torch.cuda.synchronize()
        self.times.append(perf_counter())

    def finish(self, weights: dict[str, Tensor]) -> None:
        write_result(self.work, self.system, np.diff(self.times), weights)


def write_result(work: Work, system: str, seconds: np.ndarray, weights: dict[str, Tensor]) -> None:
    np.savez(
        work.folder / f"{system}.npz",
        **{name: leaf.detach().cpu().numpy() for name, leaf in weights.items()},
    )
    later = seconds[1:] if len(seconds) > 1 else seconds  # the first round starts processes
    row = {
        "system": system,
        "case": work.case,
        "device": DEVICE,
        "seconds_per_round": round(float(np.median(later)), 4),
        "least": round(float(later.min()), 4),
        "first_round": round(float(seconds[0]), 4),
        "steps_per_second": round(work.steps / float(np.median(later))),
    }
    (work.folder / f"{system}.json").write_text(json.dumps(row))
    print(json.dumps(row), flush=True)
