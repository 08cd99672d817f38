"""FedPer: the first layers are one global model, the last ones each client's own.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019,
arXiv 1912.00818. Algorithms 1 and 2. Base and personalization layers are trained together.
"""

from dataclasses import dataclass

from flray.algorithms.partly_shared import PartlyShared
from flray.execution.federation import Federation
from flray.models.bank import last_layers
from flray.values import require_at_least


@dataclass(frozen=True)
class FedPer(PartlyShared):
    """Clients average the base layers W_B and keep the last K_P layers W_P for themselves.

        algorithm: {name: fedper, private_layers: 1}

    >>> sorted(last_layers(["body.weight", "body.bias", "head.weight", "head.bias"], 1))
    ['head.bias', 'head.weight']
    """

    private_layers: int = 1  # Number K_P of last layers that a client keeps; 0 is FedAvg

    def __post_init__(self) -> None:
        require_at_least(self, private_layers=0)

    def private_leaves(self, fed: Federation) -> frozenset[str]:
        return last_layers(fed.initial, self.private_layers)
