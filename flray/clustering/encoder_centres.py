"""Signature `encoder_centres`: a client is the k-means centres of its data in an encoder's latents.

Jamali-Rad, Abdizadeh, Singh: Federated Learning With Taskonomy for Non-IID Data. IEEE TNNLS 2022,
arXiv 2103.15947. Algorithm 2 (FCR), l. 1-12.

Deviates: by default clients fine-tune one encoder in turn, as the authors' code did at the time of
the paper, which says that each fine-tunes a copy of its own (`fine_tune: independent`); copies
drift apart, and centres of different clients stop being comparable.
"""

import copy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from pytorch_lightning import LightningModule

from flray.client.embedding import (
    EmbedCentres,
    FineTuneCentres,
    FineTuneInTurn,
    Latents,
    SendData,
)
from flray.clustering.encoder import Encoder, server_device
from flray.clustering.encoder_training import EncoderRun, same_bits
from flray.clustering.points import Points
from flray.columns import CLIENT_STEPS, FINE_TUNING_STEPS
from flray.data.datasets.downloaded import FashionMnist
from flray.engines.training import Training
from flray.execution.federation import GROUND_TRUTH, Cohort, Federation
from flray.models.autoencoder import NormStatistics
from flray.models.bank import ModelBank, Params, load_params, num_bytes, params_of
from flray.models.conv_ae import ConvAe
from flray.randomness import torch_seed
from flray.values import require_at_least

FineTune = Literal["none", "sequential", "independent", "central"]


def foreign_encoder() -> Encoder:
    """FLT's Enc2 for 28x28 images: an autoencoder of Fashion-MNIST."""
    return Encoder(dataset=FashionMnist(), model=ConvAe)


@dataclass(frozen=True)
class EncoderCentres:
    """k-means centres of a client's data in the latents of an encoder (FLT).

    The encoder may be fine-tuned first. `sequential`: one encoder goes from client to client;
    `independent`: each client trains a copy of the server's; `central`: the server trains it on the
    data of all clients. Points are (m * k, latents); a client with fewer examples repeats them.

    >>> EncoderCentres(k=3, fine_tune="none").encoder.dataset
    FashionMnist(normalize='unit', augment='none', download=False)
    """

    # Encoder G that embeds the clients' images
    encoder: Encoder = field(default_factory=foreign_encoder)
    # Number of centres per client. label_count: as many as the client has labels (ground truth)
    k: int | Literal["label_count"] = 5
    # Fine-tuning of the encoder. sequential: clients train one encoder in turn; independent: each
    # trains a copy; central: the server trains it on everybody's data
    fine_tune: FineTune = "sequential"
    epochs: int = 5  # Epochs J of fine-tuning
    # Statistics of the encoder's batch norms while it embeds. running: those of its training;
    # image: those of each image, as in FLT's code, whose encoder stays in training mode
    statistics: NormStatistics = "running"

    def __post_init__(self) -> None:
        require_at_least(self, k=1)
        if self.epochs < 1:
            raise ValueError(
                f"epochs must be >= 1, got {self.epochs}; fine_tune: none does without"
            )

    def require(self, fed: Federation) -> None:
        """Refuse `k: label_count` without permission to read the ground truth, or classes."""
        if self.k == "label_count":
            fed.require_ground_truth(GROUND_TRUTH)
            fed.timeline.at(1).require_classes("k: label_count", "set k to a number")

    @property
    def is_set(self) -> bool:
        """True if a client may send several points."""
        return self.k != 1

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        num_centres = self._num_centres(fed, cohort)
        kind = self.encoder.kind()
        params = memory or self.encoder.load_or_train(server_device())
        module = self.encoder.module(kind)
        embed = EmbedCentres(module, self.encoder.pixels, cohort.t, num_centres, self.statistics)
        self._count_download(fed, len(cohort.clients), params)
        centres, params = self._embedded(fed, cohort, embed, params)
        self._count_steps(fed, list(centres))
        fed.meter.count_transfer("signature", up=sum(rows.nbytes for rows in centres.values()))
        return points_of(centres), params

    def _num_centres(self, fed: Federation, cohort: Cohort) -> dict[int, int]:
        """k of each client."""
        if self.k == "label_count":
            num_labels = (fed.oracle.label_counts(cohort.clients) > 0).sum(1)
            return {int(i): int(k) for i, k in zip(cohort.clients, num_labels, strict=True)}
        return {int(i): self.k for i in cohort.clients}

    def _embedded(
        self, fed: Federation, cohort: Cohort, embed: EmbedCentres, params: Params
    ) -> tuple[dict[int, Latents], Params]:
        """Centres by client, and the encoder to go on from."""
        training = self.encoder.training(self.epochs)
        if self.fine_tune == "sequential":
            order = fed.generator("fine-tune order", cohort.t).permutation(cohort.clients)
            task = FineTuneInTurn(embed, training)
            centres, carried = fed.chain(task, cohort.t, order, dict(params))
            last = {name: carried[name].cpu() for name in params}
            # All but the last send on encoder and Adam's state, for which Table VI has no term.
            times, all_of_it = max(len(centres) - 1, 0), num_bytes(carried, 1)
            state = all_of_it - num_bytes(last, 1)
            fed.meter.count_transfer("fine_tuning", down=times * state, up=times * all_of_it)
            return centres, last
        if self.fine_tune == "independent":
            return fed.map(FineTuneCentres(embed, training), cohort, params), params
        if self.fine_tune == "central":
            params = self._fine_tuned_centrally(fed, cohort, embed.module, params)
        return fed.map(embed, cohort, params), params

    def _fine_tuned_centrally(
        self, fed: Federation, cohort: Cohort, module: LightningModule, params: Params
    ) -> Params:
        """The encoder trained on the data of all clients, which leaves them for that."""
        gathered = fed.map(SendData(cohort.t), cohort).values()
        if not gathered:
            return params
        images = np.concatenate([data.images for data in gathered])
        labels = np.concatenate([data.labels for data in gathered])
        fed.meter.count_transfer("fine_tuning", up=images.nbytes + labels.nbytes)
        device = torch.device(server_device())
        module = copy.deepcopy(module).to(device)
        load_params(module, params)
        examples = self.encoder.examples(images, labels, device)
        run = EncoderRun(module, torch.optim.Adam(module.parameters(), lr=self.encoder.lr), device)
        with same_bits(torch_seed(fed.seed, "fine-tune", cohort.t), device):
            for epoch in range(self.epochs):
                order = fed.generator("fine-tune batches", cohort.t, epoch).permutation(len(images))
                lr = self.encoder.training(self.epochs).lr_at(epoch)
                run.train_epoch(examples, order, self.encoder.batch_size, lr)
        return {name: leaf.cpu().clone() for name, leaf in params_of(module).items()}

    def _count_steps(self, fed: Federation, clients: list[int]) -> None:
        """Count the steps of the clients' fine-tuning, in the total and in their own column."""
        if self.fine_tune in ("sequential", "independent"):
            training = Training(epochs=self.epochs, batch_size=self.encoder.batch_size)
            steps = int(fed.num_steps(np.array(clients, np.int64), training).sum())
            fed.meter.counts[CLIENT_STEPS] += steps
            fed.meter.counts[FINE_TUNING_STEPS] += steps

    def _count_download(self, fed: Federation, num_clients: int, params: Params) -> None:
        """FLT, Table VI: M W_enc; who trains needs the decoder too."""
        sent = params
        if self.fine_tune in ("none", "central"):
            sent = {k: v for k, v in params.items() if k.startswith("encoder.")} or params
        fed.meter.count_transfer("signature", down=num_clients * num_bytes(sent, 1))


def points_of(centres: dict[int, Latents]) -> Points:
    """The points of clients in ascending order, each with as many as it sent.

    >>> points_of({3: np.zeros((2, 1)), 7: np.ones((1, 1))}).owner.tolist()
    [0, 0, 1]
    """
    counts = [len(rows) for rows in centres.values()]
    values = np.concatenate(list(centres.values())) if centres else np.empty((0, 1))
    clients = np.array(list(centres), dtype=np.int64)
    return Points(clients, torch.from_numpy(values), np.repeat(np.arange(len(counts)), counts))
