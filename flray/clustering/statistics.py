"""Signature `statistics`: a client is one vector of statistics of its data in an encoder's latents.

Radovič, Pejović: REPA: Client Clustering without Training and Data Labels for Improved Federated
Learning in Non-IID Settings. arXiv 2309.14088. Eq. 5.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from flray.client.statistics import DescribeLatents, Foreign, HoldoutImages, Statistic
from flray.clustering.encoder import Encoder, server_device
from flray.clustering.encoder_centres import points_of
from flray.clustering.points import Points
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params, last_layers, num_bytes, stack


@dataclass(frozen=True)
class Statistics:
    """One vector per client: statistics of its unlabelled data, encoded by the run's own model.

    The encoder is the model's `encode`, or the model up to its last linear layer; `encoder`
    replaces it by one that was pre-trained centrally. Nothing is trained. Points are (m, s * e) for
    s numbers per latent and e latents.
    """

    # Statistics S of the latents that describe a client
    statistics: tuple[Statistic, ...] = ("mean", "quantiles")
    # Encoder φ of the images. None: the model that clients have trained so far
    encoder: Encoder | None = None
    # Images by which holdout clients are described. all: all but the test part; validation: the
    # validation part, which tells little of a client if it is small
    holdout: HoldoutImages = "all"

    def __post_init__(self) -> None:
        choices = get_args(Statistic)
        is_repeated = len(set(self.statistics)) < len(self.statistics)
        if not self.statistics or is_repeated or not set(self.statistics) <= set(choices):
            raise ValueError(
                f"statistics must be one or more of {', '.join(choices)}, each once, "
                f"got {list(self.statistics)}"
            )

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        if self.encoder is None:
            used = bank.of_some(cohort.clients)
            sent, foreign = used.params, None
            rows = {int(i): int(used.owner[i]) for i in cohort.clients}
        else:
            sent = stack([self.encoder.load_or_train(server_device())])
            foreign = Foreign(self.encoder.module(self.encoder.kind()), self.encoder.pixels)
            rows = {int(i): 0 for i in cohort.clients}
        leaves = {name: sent[name] for name in encoder_leaves(sent)}
        per_client = num_bytes(leaves, len(next(iter(sent.values()))))
        fed.meter.count_transfer("signature", down=len(cohort.clients) * per_client)
        task = DescribeLatents(self.statistics, cohort.t, rows, foreign, self.holdout)
        vectors = fed.map(task, cohort, sent)
        fed.meter.count_transfer("signature", up=sum(v.nbytes for v in vectors.values()))
        return points_of({i: vector[None] for i, vector in vectors.items()}), memory


def encoder_leaves(names: Iterable[str]) -> frozenset[str]:
    """The leaves that a client needs to encode its data: no decoder, no head.

    >>> sorted(encoder_leaves(["encoder.0.weight", "decoder.0.weight", "head.bias"]))
    ['encoder.0.weight']
    >>> sorted(encoder_leaves(["layers.1.weight", "layers.4.weight"]))
    ['layers.1.weight']
    """
    leaves = list(names)
    for prefix in ("embedder.encoder.", "classifier.encoder.", "encoder."):
        if encoder := frozenset(name for name in leaves if name.startswith(prefix)):
            return encoder
    return frozenset(leaves) - last_layers(leaves, 1)
