"""Signatures of a client's data: the k-means centres of its examples' latents.

Jamali-Rad, Abdizadeh, Singh: Federated Learning With Taskonomy for Non-IID Data. IEEE TNNLS 2022,
arXiv 2103.15947. Algorithm 2 (FCR), l. 3-9. Latents come from an encoder, as it was sent or
fine-tuned first, or from the client's own PCA. The tasks are pure: modules are copied before use,
because what arrives may be memory that processes share.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from flray.client.encoder_training import EncoderTraining, fine_tune
from flray.client.host import Host, in_evaluation
from flray.client.tasks import ClientsJob
from flray.cores import thread_pools
from flray.data.dataset import Ids
from flray.data.pixels import Examples
from flray.errors import ExperimentError
from flray.models.autoencoder import NormStatistics, with_image_statistics
from flray.models.bank import Params, load_params
from flray.models.generator import seeded_generator
from flray.randomness import torch_seed

PixelScale = Literal["unit", "signed"]  # [0, 1] and [-1, 1]
Latents = NDArray[Any]  # (n, e) in the precision of the host

FLT_SEED = 43  # random_state of FLT's k-means
FLT_INITS = 10  # sklearn's own number of starts when FLT was written


@dataclass(frozen=True)
class EmbedCentres:
    """l. 6-9: centres of the clients' training examples of round t, encoded in evaluation mode.

    Returns (k, e) for each client: k centres in the latent space of the encoder, whose params are
    those that the task is called with. The centres of a client do not depend on other clients.
    """

    module: LightningModule  # encoder, whose own weights are not used
    pixels: PixelScale  # range of the pixels that the encoder expects
    t: int
    num_centres: Mapping[int, int]  # k by client
    statistics: NormStatistics = "running"

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Latents]:
        module = copied_module(self.module, host)
        load_params(module, params)
        return [self.centres(module, host, int(i)) for i in job.clients]

    def centres(self, module: LightningModule, host: Host, client: int) -> Latents:
        """(k, e) the centres of one client's examples; clients with fewer than k repeat theirs."""
        ids = host.on_device(host.timeline.at(self.t).trained_on(client))
        module = with_image_statistics(module) if self.statistics == "image" else module
        latents = encode(module, rescaled(host.examples, self.pixels), ids)
        return k_means(latents, self.num_centres[client])


@dataclass(frozen=True)
class FineTuneCentres:
    """l. 3-9: every client trains a copy of the encoder first, and encodes with it.

    Clients start from the same encoder and do not hear of each other.
    """

    embed: EmbedCentres
    training: EncoderTraining

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Latents]:
        return [self.tuned_centres(host, params, int(i))[0] for i in job.clients]

    def tuned_centres(self, host: Host, carried: Params, client: int) -> tuple[Latents, Params]:
        """A client's centres after its own epochs, and what the next client would go on from.

        Args:
            carried: Params of the encoder, with Adam's state if a client has trained before.
        """
        embed = self.embed
        module = copied_module(embed.module, host)
        ids = host.on_device(host.timeline.at(embed.t).trained_on(client))
        seed = torch_seed(host.seed, "fine-tune", embed.t, client)
        with seeded_generator(seed, host.examples.device):
            examples = rescaled(host.examples, embed.pixels)
            carried = fine_tune(module, examples, ids, carried, self.training)
        return embed.centres(module, host, client), carried


@dataclass(frozen=True)
class FineTuneInTurn:
    """One encoder, trained by one client after another, for `Federation.chain`.

    As in FLT's code, Adam's state and the schedule of its rate go along with the encoder, batches
    are not shuffled, and a client embeds right after its own epochs. Returns the centres of each
    client, and what the next client goes on from.
    """

    embed: EmbedCentres
    training: EncoderTraining

    def __call__(
        self, host: Host, carried: Params, job: ClientsJob
    ) -> tuple[list[Latents], Params]:
        """Train and embed the clients of a job one after the other, in its order."""
        alone, outputs = FineTuneCentres(self.embed, self.training), []
        for i in job.clients:
            centres, carried = alone.tuned_centres(host, carried, int(i))
            outputs.append(centres)
        return outputs, carried


def encode(module: LightningModule, examples: Examples, ids: Tensor) -> Latents:
    """(n, e) the latents of the examples, in evaluation mode.

    A module without `encode`, such as a classifier, is an encoder up to its last linear layer.

    Args:
        module: An encoder or classifier, which is left in evaluation mode.
        examples: Where ids are looked up, with the pixel range that the encoder expects.
        ids: (n,) example ids on the device of the examples.

    Raises:
        ExperimentError: The module has neither `encode` nor a linear layer.
    """
    with _encoding(module) as encoding:
        parts = in_evaluation(module, examples, ids, lambda batch: encoding(batch[0]))
    return torch.cat(parts).cpu().numpy()


@contextmanager
def _encoding(module: LightningModule) -> Iterator[Callable[[Tensor], Tensor]]:
    """The function that maps inputs (B, ...) to latents (B, e)."""
    if hasattr(module, "encode"):
        yield cast(Callable[[Tensor], Tensor], module.encode)
        return
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ExperimentError(
            f"statistics need a model with encode(x), or with a linear layer at its end; "
            f"{type(module).__name__} has neither"
        )
    inputs: list[Tensor] = []
    hook = linear[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))

    def encoding(x: Tensor) -> Tensor:
        module(x)
        return inputs.pop().flatten(1)

    try:
        yield encoding
    finally:
        hook.remove()


def k_means(latents: Latents, k: int) -> Latents:
    """(k, e) centres of the rows, as FLT computes them; fewer rows than k are repeated in turn.

    >>> sorted(k_means(np.array([[0.0], [1.0], [10.0]]), 2).ravel().tolist())
    [0.5, 10.0]
    >>> k_means(np.array([[7.0]]), 3).ravel().tolist()
    [7.0, 7.0, 7.0]
    """
    fit = fitted_k_means(_repeated(latents, k), k, FLT_INITS, FLT_SEED)
    centres: Latents = fit.cluster_centers_
    return centres


def fitted_k_means(rows: NDArray[Any], number: int, starts: int, seed: int) -> Any:
    """scikit-learn's `KMeans` after rows (m, e); its bits do not depend on the number of threads.

    Any: scikit-learn ships no types.
    """
    from sklearn.cluster import KMeans  # seconds to import, and seldom needed
    from sklearn.exceptions import ConvergenceWarning

    # Threads add up their parts in whatever order they end: the last bits would vary.
    with thread_pools().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters
        return KMeans(number, n_init=starts, random_state=seed).fit(rows)


@dataclass(frozen=True)
class ProjectCentres:
    """FLT's baseline: centres of the client's inputs, projected by a PCA of its own.

    Inputs are scaled as for training, as in FLT's code: pixels by the dataset's normalisation.
    Returns (k, components) for each client.
    """

    components: int
    k: int
    t: int

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Latents]:
        return [self._centres(host, int(i)) for i in job.clients]

    def _centres(self, host: Host, client: int) -> Latents:
        """(k, components) of one client."""
        ids = host.on_device(host.timeline.at(self.t).trained_on(client))
        x, _ = host.examples.batch(ids)
        pixels: Latents = x.flatten(1).cpu().numpy()
        return k_means(project(pixels, self.components), self.k)


def project(pixels: Latents, components: int) -> Latents:
    """(n, components) the rows projected by PCA; too few rows are repeated in turn.

    Args:
        pixels: (n, d) rows, d at least `components`.
        components: Number of principal components.

    >>> np.abs(project(np.array([[0.0, 0.0], [3.0, 4.0]]), 1)).ravel().round(5).tolist()
    [2.5, 2.5]
    """
    from sklearn.decomposition import PCA  # seconds to import, and seldom needed

    pca = PCA(components, random_state=FLT_SEED)
    no_variance = np.errstate(invalid="ignore", divide="ignore")
    with thread_pools().limit(limits=1), no_variance:
        latents: Latents = pca.fit_transform(_repeated(pixels, components))
    return latents


@dataclass(frozen=True)
class ClientData:
    """A client's training data as it would leave the client: raw pixels and labels."""

    images: NDArray[np.uint8]  # (n, channels, height, width)
    labels: Ids  # (n,)


@dataclass(frozen=True)
class SendData:
    """The client's training data of round t itself, which no federation should ask for.

    For the comparison with a central fine-tuning of the encoder.
    """

    t: int

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[ClientData]:
        """Images and labels of each client of the job."""
        examples = host.examples
        data = []
        for i in job.clients:
            ids = host.on_device(host.timeline.at(self.t).train[i])
            images = examples.images[examples.image_ids[ids]].cpu().numpy()
            data.append(ClientData(images, examples.labels[ids].cpu().numpy()))
        return data


def copied_module(module: LightningModule, host: Host) -> LightningModule:
    """A copy of the module on the device and in the precision of the host's examples.

    The original is not changed: it may lie in memory that processes share.
    """
    mean = host.examples.mean
    return copy.deepcopy(module).to(device=mean.device, dtype=mean.dtype)


def rescaled(examples: Examples, pixels: PixelScale) -> Examples:
    """The examples with pixels in [0, 1] or [-1, 1], whatever the dataset's normalisation.

    Args:
        pixels: `unit` or `signed`, as the encoder was trained.
    """
    middle = 0.0 if pixels == "unit" else 0.5
    mean = torch.full_like(examples.mean, middle)
    std = torch.full_like(mean, 1 - middle)
    return replace(examples, mean=mean, std=std, augment="none", normalised=None)


def _repeated(rows: Latents, at_least: int) -> Latents:
    return rows if len(rows) >= at_least else np.resize(rows, (at_least, rows.shape[1]))
