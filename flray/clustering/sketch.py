"""Embed `sketch`: short vectors with nearly the same distances, computed on the client."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from flray.client.sketching import count_sketch
from flray.clustering.checks import require_finite
from flray.clustering.points import Points
from flray.values import require_at_least


@dataclass(frozen=True)
class Sketch:
    """Count sketches of long signatures: `dim` numbers per point, the same map for all clients.

    Signatures `update` and `weights` are sketched before they leave the client: bytes are counted
    for the sketch, and the server never holds the updates of all clients. Points of other
    signatures are sketched at the server.

    Approximates: L2 distances and inner products, right in expectation over seeds; a squared
    distance has a relative standard deviation of at most sqrt(2 / dim), 9 % for 256. L1 distances
    are not kept. Points with at most `dim` coordinates stay as they are.

        clustering: {embed: {name: sketch, dim: 256}, partition: {name: kmeans, number: 10}}
    """

    dim: int = 256  # Numbers that a client sends instead of a longer signature

    def __post_init__(self) -> None:
        require_at_least(self, dim=1)

    def on_client(self, signature: Any) -> Any:
        """The signature that clients are asked for; Any: a signature stage.

        It is called as the given one is, and its points are sketches already.
        """
        sketched = getattr(signature, "sketched", None)
        return signature if sketched is None else partial(sketched, dim=self.dim)

    def __call__(self, points: Points, seed: int) -> Points:
        """Points (P, min(dim, e)).

        >>> import numpy as np, torch
        >>> long = Points.vectors(np.arange(2), torch.eye(2, 9))
        >>> short = Sketch(dim=4)(long, seed=0)
        >>> short.values.shape, Sketch(dim=4)(short, seed=0) is short
        (torch.Size([2, 4]), True)
        """
        if points.values.shape[1] <= self.dim:
            return points
        require_finite(points)
        return Points(points.clients, count_sketch(points.values, self.dim, seed), points.owner)

    def transform(self, known: Points, new: Points, seed: int) -> Points:
        """Sketches of new points, which do not depend on the known ones."""
        return self(new, seed)
