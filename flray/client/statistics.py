"""Signatures of REPA: statistics of the latents of a client's examples, without labels.

Radovič, Pejović: REPA: Client Clustering without Training and Data Labels for Improved Federated
Learning in Non-IID Settings. arXiv 2309.14088. Eq. 5: e_i = S(φ(X_i)).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pytorch_lightning import LightningModule

from flray.client.embedding import Latents, PixelScale, copied_module, encode, rescaled
from flray.client.host import Host
from flray.client.tasks import ClientsJob
from flray.cores import thread_pools
from flray.data.dataset import Ids
from flray.models.bank import Params, load_params

Statistic = Literal[
    "mean", "std", "quantiles", "skewness", "kurtosis", "covariance", "correlation", "components"
]
Values = NDArray[np.float64]
HoldoutImages = Literal["all", "validation"]  # what holdout clients describe; never test images

QUANTILES = (0.25, 0.5, 0.75)
NUM_COMPONENTS = 3  # principal ones
SMALLEST_SHARE = 1e-12  # share of the largest principal value; less is rounding


@dataclass(frozen=True)
class Foreign:
    """An encoder that is not the model of the run; its params are those the task is called with.

    It may have been trained on other data, with other ranges of pixels.
    """

    module: LightningModule
    pixels: PixelScale  # range of the pixels that the encoder expects


@dataclass(frozen=True)
class DescribeLatents:
    """S(φ(X_i)) of the clients' images of round t; labels are not read.

    Returns a vector for each client, the statistics of its latents one after the other. Clients
    describe their training images. Holdout clients never train on theirs: they describe these and
    their validation images, which are one part in the paper, or the latter alone.
    """

    statistics: tuple[Statistic, ...]
    t: int
    rows: Mapping[int, int]  # the row of the bank that each client encodes with
    foreign: Foreign | None = None  # None: φ is the model of the run
    holdout: HoldoutImages = "all"

    def __call__(self, host: Host, bank: Params, job: ClientsJob) -> list[Latents]:
        """A vector for each client of the job, in the precision of the host."""
        module, examples = host.module, host.examples
        if self.foreign is not None:
            module = copied_module(self.foreign.module, host)
            examples = rescaled(examples, self.foreign.pixels)
        vectors = []
        for i in map(int, job.clients):
            load_params(module, {name: leaf[self.rows[i]] for name, leaf in bank.items()})
            latents = encode(module, examples, host.on_device(self._images(host, i)))
            # Threads of BLAS add up in whatever order they end.
            with thread_pools().limit(limits=1):
                vector = describe(latents.astype(np.float64), self.statistics)
            vectors.append(vector.astype(latents.dtype))
        return vectors

    def _images(self, host: Host, client: int) -> Ids:
        split = host.timeline.at(self.t)
        ids = split.trained_on(client)
        if client in split.holdout and len(validation := split.validation[client]):
            ids = validation if self.holdout == "validation" else np.union1d(ids, validation)
        return ids


def describe(latents: Values, statistics: tuple[Statistic, ...]) -> Values:
    """S: the statistics of the rows of latents (n, E), one after the other; ddof 0.

    Args:
        latents: (n, E), n >= 1.
        statistics: Their names, in the order of the result.

    Returns:
        A vector whose length depends on E and the statistics alone, not on n.

    >>> describe(np.array([[0.0, 1.0], [2.0, 1.0]]), ("mean", "std")).tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    return np.concatenate([_STATISTICS[name](latents).ravel() for name in statistics])


def _units(latents: Values) -> Values:
    """(n, E) the latents with mean 0 and standard deviation 1; 0 for a constant feature."""
    constant = latents.min(0) == latents.max(0)
    spread = np.where(constant, 1.0, latents.std(0))
    return np.where(constant, 0.0, (latents - latents.mean(0)) / spread)


def _kurtosis(latents: Values) -> Values:
    """(E,) the excess over that of a normal distribution; 0 for a constant feature."""
    units = _units(latents)
    return np.where(units.any(0), (units**4).mean(0) - 3.0, 0.0)


def _covariance(latents: Values) -> Values:
    """(E (E + 1) / 2,) the upper triangle with the variances."""
    centred = latents - latents.mean(0)
    covariance: Values = centred.T @ centred / len(latents)
    return covariance[np.triu_indices(len(covariance))]


def _correlation(latents: Values) -> Values:
    """(E (E - 1) / 2,) the upper triangle without the ones; 0 for a constant feature."""
    units = _units(latents)
    correlation: Values = units.T @ units / len(latents)
    return correlation[np.triu_indices(len(correlation), 1)]


def _components(latents: Values) -> Values:
    """(3, E) principal directions of length 1, the largest entry positive; 0 if there are fewer.

    >>> _components(np.array([[0.0, 0.0], [-3.0, -4.0]])).round(9).tolist()
    [[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]]
    """
    _, values, directions = np.linalg.svd(latents - latents.mean(0), full_matrices=False)
    real = values > SMALLEST_SHARE * max(values[0], np.finfo(np.float64).tiny)
    kept = directions[:NUM_COMPONENTS][real[:NUM_COMPONENTS]]
    largest = np.abs(kept).argmax(1)
    components = np.zeros((NUM_COMPONENTS, latents.shape[1]))
    components[: len(kept)] = kept * np.sign(kept[np.arange(len(kept)), largest])[:, None]
    return components


_STATISTICS: dict[str, Callable[[Values], Values]] = {
    "mean": lambda latents: latents.mean(0),
    "std": lambda latents: latents.std(0),
    "quantiles": lambda latents: np.quantile(latents, QUANTILES, axis=0),
    "skewness": lambda latents: (_units(latents) ** 3).mean(0),
    "kurtosis": _kurtosis,
    "covariance": _covariance,
    "correlation": _correlation,
    "components": _components,
}
