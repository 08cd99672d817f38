"""What a client tells of its data in PACFL: the directions in which its inputs lie.

Vahidian et al.: Efficient Distribution Similarity Identification in Clustered Federated Learning
via Principal Angles Between Client Data Subspaces. AAAI 2023, arXiv 2209.10526.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import svds
from threadpoolctl import threadpool_limits

from flray.client.embedding import rescaled
from flray.client.host import Host
from flray.client.tasks import ClientsJob
from flray.data.dataset import Ids
from flray.models.bank import Params
from flray.randomness import generator

Basis = NDArray[np.float32]  # (p, d)
MOST_COMPLETE = 60  # Inputs up to which all singular vectors are found as fast as the first
NO_PART = 1e-6  # Share of the largest singular value; less is rounding of float32


@dataclass(frozen=True)
class DescribeSubspace:
    """The first p left singular vectors of a client's inputs in round t, as rows (p, d).

    Inputs are columns in the paper and rows here; pixels are not normalised. With `per_label` each
    label of the client has p vectors of its own, one label after the other. The sign of a singular
    vector is free: the largest of its entries is made positive, so that results do not depend on
    the library.
    """

    p: int
    per_label: bool
    t: int

    def __call__(self, host: Host, params: Params, job: ClientsJob) -> list[Basis]:
        timeline = host.timeline.at(self.t)
        with threadpool_limits(1):  # threads of BLAS add up in whatever order they end
            return [self._basis(host, timeline.trained_on(int(i))) for i in job.clients]

    def _basis(self, host: Host, ids: Ids) -> Basis:
        examples = host.examples
        if examples.images.dtype == torch.uint8:  # as in the authors' code, pixels as they are
            examples = rescaled(examples, "unit")
        x, y = examples.batch(host.on_device(ids))
        inputs, labels = x.flatten(1).double().cpu(), y.cpu()
        if not self.per_label:
            return singular_vectors(inputs, self.p)
        parts = [inputs[labels == label] for label in torch.unique(labels)]
        return np.concatenate([singular_vectors(part, self.p) for part in parts])


def singular_vectors(inputs: torch.Tensor, p: int) -> Basis:
    """(min(p, r), d) the first right singular vectors of inputs (n, d) that span r dimensions.

    A vector without a part in the inputs would be arbitrary. Inputs that are all 0 have one vector,
    of zeros.

    >>> singular_vectors(torch.tensor([[0.0, -3.0], [0.0, -1.0]]), 2).round(5)
    array([[0., 1.]], dtype=float32)
    """
    rank = min(inputs.shape)
    if rank > MOST_COMPLETE and p < rank // 2 and inputs.any():
        # Any direction that is at right angles to the start would be missed.
        start = generator(0, "subspace").standard_normal(rank)
        _, values, vectors = svds(inputs.numpy(), k=p, v0=start)
        sigma, kept = (torch.from_numpy(array[::-1].copy()) for array in (values, vectors))
    else:
        _, sigma, kept = torch.linalg.svd(inputs, full_matrices=False)
    kept = kept[:p][sigma[:p] > NO_PART * sigma[0]] if sigma[0] > 0 else torch.zeros_like(kept[:1])
    largest = kept.gather(1, kept.abs().argmax(1, keepdim=True))
    return (kept * largest.sign() + 0.0).float().numpy()  # no -0.0
