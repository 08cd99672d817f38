"""LG-FedAvg: the last layers are one global model, the layers before them each client's own.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally:
Federated Learning with Local and Global Representations. 2020, arXiv 2001.01523. Algorithm 1.

A layer is a module with parameters or float buffers of its own, in the order of the module's
definition; the buffers of a private BatchNorm layer are private too. A client that never trained, a
newcomer or a holdout client, has the initial private layers.

Deviates: no rounds of FedAvg before, and no choice of models on test data, as in the authors' code.
"""

from dataclasses import dataclass

from flray.algorithms.partly_shared import PartlyShared
from flray.execution.federation import Federation
from flray.models.bank import last_layers
from flray.values import require_at_least


@dataclass(frozen=True)
class LgFedAvg(PartlyShared):
    """Alg. 1: clients keep their first layers theta_l and average the last ones theta_g.

    A client that has never trained, such as a holdout client, has the initial first layers. Only
    the shared layers are sent, in both directions. `global_layers: 0` is local training, all layers
    of the model are FedAvg.

        algorithm: {name: lg_fedavg, global_layers: 1}
    """

    # Number of last layers that clients share; 2 in FLIS's comparison, 0 shares nothing
    global_layers: int = 2

    def __post_init__(self) -> None:
        require_at_least(self, global_layers=0)

    def private_leaves(self, fed: Federation) -> frozenset[str]:
        # Alg. 1: theta_l stays on the device, theta_g <- sum_k n_k / n theta_g,k
        return frozenset(fed.initial) - last_layers(fed.initial, self.global_layers)
