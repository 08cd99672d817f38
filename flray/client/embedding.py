"""What a client tells of its data: the k-means centres of its examples' latents.

Jamali-Rad, Abdizadeh, Singh: Federated Learning With Taskonomy for Non-IID Data. IEEE TNNLS 2022,
arXiv 2103.15947. Algorithm 2 (FCR), l. 3-9. Latents come from an encoder, as it was sent or
fine-tuned first, or from the client's own PCA. The tasks are pure: modules are copied before use,
for what arrives may be memory that processes share.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from threadpoolctl import ThreadpoolController
from torch import Tensor

from flray.client.host import Host
from flray.client.tasks import ClientsJob
from flray.data.dataset import Ids
from flray.data.pixels import Examples
from flray.engines.losses import BatchLoss
from flray.engines.training import LocalBatch
from flray.errors import ExperimentError
from flray.models.bank import Params, load_params, params_of, trainable
from flray.randomness import torch_seed

PixelScale = Literal["unit", "signed"]  # [0, 1] and [-1, 1]
Latents = NDArray[Any]  # (n, e) in the precision of the host

FLT_SEED = 43  # random_state of FLT's k-means
FLT_INITS = 10  # sklearn's own number of starts when FLT was written
ENCODE_BATCH = 1000  # examples a forward pass; large, for no gradient is kept

# What is carried from client to client beside the params, under names that no parameter can have.
EPOCH, STEP, MOMENTS = "adam/epoch", "adam/step", ("exp_avg", "exp_avg_sq")


class Encodes(Protocol):
    def encode(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, e)"""
        ...


@dataclass(frozen=True)
class EncoderTraining:
    """Adam over batches of examples, at a rate that is halved every so many epochs."""

    epochs: int  # J
    batch_size: int
    lr: float
    halve_every: int  # epochs; 0: never

    def lr_at(self, epoch: int) -> float:
        """
        >>> training = EncoderTraining(epochs=5, batch_size=64, lr=1.0, halve_every=10)
        >>> training.lr_at(9), training.lr_at(10), training.lr_at(20)
        (1.0, 0.5, 0.25)
        """
        return self.lr * 0.5 ** (epoch // self.halve_every) if self.halve_every else self.lr


@dataclass(frozen=True)
class EmbedCentres:
    """l. 6-9: centres of the client's training examples of round t, encoded in evaluation mode."""

    module: LightningModule
    pixels: PixelScale
    t: int
    num_centres: Mapping[int, int]  # k of each client

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Latents]:
        module = self.own_module(host)
        load_params(module, params)
        return [self.centres(module, host, int(i)) for i in job.clients]

    def own_module(self, host: Host) -> LightningModule:
        mean = host.examples.mean
        return copy.deepcopy(self.module).to(device=mean.device, dtype=mean.dtype)

    def examples(self, host: Host) -> Examples:
        return rescaled(host.examples, self.pixels)

    def own_ids(self, host: Host, client: int) -> Tensor:
        own = host.timeline.at(self.t).train[client]
        return torch.from_numpy(own).to(host.examples.device)

    def centres(self, module: LightningModule, host: Host, client: int) -> Latents:
        latents = encode(module, self.examples(host), self.own_ids(host, client))
        return k_means(latents, self.num_centres[client])


@dataclass(frozen=True)
class FineTuneCentres:
    """l. 3-9: every client first trains a copy of the encoder of its own, which it keeps."""

    embed: EmbedCentres
    training: EncoderTraining

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Latents]:
        return [fine_tune_and_embed(self, host, params, int(i))[0] for i in job.clients]


@dataclass(frozen=True)
class FineTuneInTurn:
    """One encoder, trained by one client after another, for `Federation.chain`.

    As FLT's code does it: Adam's state and the schedule of its rate go along with the encoder,
    batches are not shuffled, and a client embeds right after its own epochs.
    """

    embed: EmbedCentres
    training: EncoderTraining

    def __call__(
        self, host: Host, carried: Params, job: ClientsJob
    ) -> tuple[list[Latents], Params]:
        found = []
        for i in job.clients:
            centres, carried = fine_tune_and_embed(self, host, carried, int(i))
            found.append(centres)
        return found, carried


def fine_tune_and_embed(
    task: FineTuneCentres | FineTuneInTurn, host: Host, carried: Params, client: int
) -> tuple[Latents, Params]:
    """A client's centres after its own epochs, and what the next client would go on from."""
    embed = task.embed
    module = embed.own_module(host)
    seed = torch_seed(host.seed, "fine-tune", embed.t, client)
    with seeded_generator(seed, host.examples.device):
        carried = fine_tune(
            module, embed.examples(host), embed.own_ids(host, client), carried, task.training
        )
    return embed.centres(module, host, client), carried


def fine_tune(
    module: LightningModule,
    examples: Examples,
    ids: Tensor,
    carried: Params,
    training: EncoderTraining,
) -> Params:
    """Go on from `carried` with epochs over the examples in their order; trains the module.

    `carried` holds the encoder's params and, unless nobody has trained yet, Adam's moments, its
    step and the number of epochs so far. What is returned shares no memory with it.
    """
    load_params(module, carried)
    optimizer = torch.optim.Adam(trainable(module).values(), lr=training.lr)
    _restore(optimizer, module, carried)
    first = int(carried[EPOCH]) if EPOCH in carried else 0
    batches = torch.split(ids, training.batch_size)
    for epoch in range(first, first + training.epochs):
        run_epoch(module, optimizer, examples, batches, training.lr_at(epoch))
    params = {name: leaf.clone() for name, leaf in params_of(module).items()}
    epochs = torch.tensor(first + training.epochs)
    return {**params, **_state_of(optimizer, module), EPOCH: epochs}


def run_epoch(
    module: LightningModule,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    batches: Iterable[Tensor],
    lr: float,
) -> float:
    """A gradient step for each batch of example ids; the mean loss over all examples seen."""
    module.train()
    for group in optimizer.param_groups:
        group["lr"] = lr
    batch_loss = BatchLoss(module)
    total = torch.zeros((), device=examples.device, dtype=torch.float64)
    num_examples = 0
    for ids in batches:
        loss = batch_loss(LocalBatch(*examples.batch(ids), None, {}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(ids)
        num_examples += len(ids)
    return float(total) / num_examples


def mean_loss(module: LightningModule, examples: Examples, ids: Tensor) -> float:
    """The loss over the examples, in evaluation mode."""
    module.eval()
    batch_loss = BatchLoss(module)
    total = torch.zeros((), device=examples.device, dtype=torch.float64)
    with torch.no_grad():
        for some in torch.split(ids, ENCODE_BATCH):
            total += batch_loss(LocalBatch(*examples.batch(some), None, {})) * len(some)
    return float(total) / len(ids)


def encode(module: LightningModule, examples: Examples, ids: Tensor) -> Latents:
    """(n, e) the latents of the examples, in evaluation mode."""
    module.eval()
    encoder = cast(Encodes, module)
    with torch.no_grad():
        parts = [encoder.encode(examples.batch(some)[0]) for some in torch.split(ids, ENCODE_BATCH)]
    latents: Latents = torch.cat(parts).cpu().numpy()
    return latents


def k_means(latents: Latents, k: int) -> Latents:
    """(k, e) centres of the rows, which are repeated in turn where there are fewer than k.

    >>> sorted(k_means(np.array([[0.0], [1.0], [10.0]]), 2).ravel().tolist())
    [0.5, 10.0]
    >>> k_means(np.array([[7.0]]), 3).ravel().tolist()
    [7.0, 7.0, 7.0]
    """
    from sklearn.cluster import KMeans  # seconds to import, and seldom needed
    from sklearn.exceptions import ConvergenceWarning

    fit = KMeans(n_clusters=k, random_state=FLT_SEED, n_init=FLT_INITS)
    # Threads add up their parts in whatever order they end: the last bits would vary.
    with _thread_pools().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than centres
        centres: Latents = fit.fit(_repeated(latents, k)).cluster_centers_
    return centres


@dataclass(frozen=True)
class ProjectCentres:
    """FLT's baseline: centres of the client's pixels in [0, 1], projected by a PCA of its own."""

    components: int
    k: int
    t: int

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Latents]:
        return [self._centres(host, int(i)) for i in job.clients]

    def _centres(self, host: Host, client: int) -> Latents:
        own = host.timeline.at(self.t).train[client]
        x, _ = rescaled(host.examples, "unit").batch(torch.from_numpy(own).to(host.examples.device))
        pixels: Latents = x.flatten(1).cpu().numpy()
        if pixels.shape[1] < self.components:
            raise ExperimentError(
                f"components must be at most the {pixels.shape[1]} pixels of an image, "
                f"got {self.components}"
            )
        return k_means(project(pixels, self.components), self.k)


def project(pixels: Latents, components: int) -> Latents:
    """(n, components) by PCA; rows are repeated in turn where there are fewer than components."""
    from sklearn.decomposition import PCA  # seconds to import, and seldom needed

    pca = PCA(components, random_state=FLT_SEED)
    no_variance = np.errstate(invalid="ignore", divide="ignore")
    with _thread_pools().limit(limits=1), no_variance:
        latents: Latents = pca.fit_transform(_repeated(pixels, components))
    return latents


@cache
def _thread_pools() -> ThreadpoolController:
    """Those of the libraries that k-means and PCA use; to look for them takes 18 ms."""
    import sklearn.cluster
    import sklearn.decomposition  # noqa: F401

    return ThreadpoolController()


@dataclass(frozen=True)
class Owned:
    """A client's training data as it would leave it."""

    images: NDArray[np.uint8]  # (n, channels, height, width)
    labels: Ids  # (n,)


@dataclass(frozen=True)
class SendData:
    """The client's training data of round t itself: what no federation should ask for."""

    t: int

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Owned]:
        return [self._owned(host, host.timeline.at(self.t).train[i]) for i in job.clients]

    def _owned(self, host: Host, own: Ids) -> Owned:
        ids = torch.from_numpy(own).to(host.examples.device)
        images = host.examples.images[host.examples.image_ids[ids]]
        return Owned(images.cpu().numpy(), host.examples.labels[ids].cpu().numpy())


class TellImageShape:
    """(channels, height, width), which all clients share."""

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[tuple[int, ...]]:
        return [tuple(host.examples.images.shape[1:])] * len(job.clients)


def rescaled(examples: Examples, pixels: PixelScale) -> Examples:
    """The examples as an encoder sees them, whatever the dataset's own normalisation."""
    middle = 0.0 if pixels == "unit" else 0.5
    mean = torch.full_like(examples.mean, middle)
    std = torch.full_like(mean, 1 - middle)
    return replace(examples, mean=mean, std=std, augment="none", normalised=None)


@contextmanager
def seeded_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Layers that draw from torch's generator (a user's nn.Dropout) get one of this seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.random.manual_seed(seed)
        yield


def _repeated(rows: Latents, at_least: int) -> Latents:
    num = len(rows)
    return rows if num >= at_least else rows[np.arange(at_least) % num]


def _restore(optimizer: torch.optim.Optimizer, module: LightningModule, carried: Params) -> None:
    """Give Adam copies of the moments that are carried, and its step."""
    for name, p in trainable(module).items():
        if f"{MOMENTS[0]}/{name}" not in carried:
            continue
        # torch.tensor copies, and Adam reads its step on the CPU.
        optimizer.state[p] = {"step": torch.tensor(float(carried[STEP]))}
        for moment in MOMENTS:
            received = carried[f"{moment}/{name}"]
            optimizer.state[p][moment] = received.to(p, copy=True)


def _state_of(optimizer: torch.optim.Optimizer, module: LightningModule) -> Params:
    """Adam's moments by name, and its step, which all parameters share."""
    state: Params = {}
    for name, p in trainable(module).items():
        if own := optimizer.state.get(p):  # none for a parameter that the loss does not reach
            state |= {f"{moment}/{name}": own[moment] for moment in MOMENTS}
            state[STEP] = own["step"]
    return state
