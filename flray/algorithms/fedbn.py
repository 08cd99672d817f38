"""FedBN: clients average everything but batch normalisation.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021, arXiv 2102.07623. Algorithm 1.

A layer is one of batch normalisation if it owns a buffer, whatever its name: public code looks for
"bn" in names and misses layers such as `downsample.1`. Weights, biases and statistics of such
layers are private. A model without any is FedAvg.
"""

from dataclasses import dataclass

from flray.algorithms.partly_shared import PartlyShared
from flray.execution.federation import Federation
from flray.models.bank import layers_of, leaves_of_layers


@dataclass(frozen=True)
class FedBn(PartlyShared):
    """Alg. 1: every layer but batch normalisation is averaged.

    Deviates: a client that has never trained has the initial statistics; the paper has none.
    """

    def private_leaves(self, fed: Federation) -> frozenset[str]:
        return leaves_of_layers(fed.initial, tuple(layers_of(fed.buffers)))
