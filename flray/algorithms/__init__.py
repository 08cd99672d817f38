"""Algorithms: one paper, one file."""

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.algorithms.local import Local

ALGORITHMS: dict[str, type] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "local": Local,
}
