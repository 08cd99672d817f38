"""Positions of the clients of a clustering in figures: orders, a plane, a tree, graphs.

Orders are permutations of 0, ..., m - 1, positions in the arrays of a `ClusteringRecord`, and not
client ids. Nothing here draws.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list

from flray.data.dataset import Ids
from flray.records.clusterings import ClusteringRecord

Matrix = NDArray[np.float64]

GAP = 1.25  # distance of neighbouring clusters' centres, relative to the sum of their radii


def tree_of(clustering: ClusteringRecord) -> Matrix | None:
    """The linkage matrix; None for a partition without a tree, and for one client."""
    return None if clustering.linkage is None or not len(clustering.linkage) else clustering.linkage


def leaf_order(clustering: ClusteringRecord) -> Ids:
    """Positions of clients from left to right in the dendrogram; without one, by cluster.

    >>> leaf_order(ClusteringRecord(np.arange(3), np.array([0, 1, 0]), np.zeros((3, 3))))
    array([0, 2, 1])
    """
    tree = tree_of(clustering)
    if tree is None:
        return np.argsort(clustering.labels, kind="stable")
    leaves: Ids = leaves_list(tree).astype(np.int64)
    return leaves


def cluster_order(clustering: ClusteringRecord) -> Ids:
    """The leaf order, changed as little as it takes to have the clients of a cluster together.

    Clusters come in the order of their first leaf.

    >>> cluster_order(ClusteringRecord(np.arange(4), np.array([7, 2, 7, 2]), np.zeros((4, 4))))
    array([1, 3, 0, 2])
    """
    leaves = leaf_order(clustering)
    _, first, cluster = np.unique(clustering.labels[leaves], return_index=True, return_inverse=True)
    return leaves[np.argsort(first[cluster], kind="stable")]


def classical_scaling(D: Matrix) -> tuple[Matrix, float]:
    """(m, 2) points in the plane with distances near D, and the share of the variance they keep.

    >>> points, share = classical_scaling(np.array([[0.0, 2.0], [2.0, 0.0]]))
    >>> float(np.linalg.norm(points[0] - points[1]).round(9)), share
    (2.0, 1.0)
    """
    centre = np.eye(len(D)) - 1 / len(D)
    return _plane_of_products(-0.5 * centre @ D**2 @ centre)


def _plane_of_products(G: Matrix) -> tuple[Matrix, float]:
    """Points in the plane with scalar products near G, and the share of its trace they keep."""
    m = len(G)
    values, vectors = np.linalg.eigh(G)  # ascending
    values = np.maximum(values, 0)
    points = np.zeros((m, 2))
    points[:, : min(2, m)] = (vectors * np.sqrt(values))[:, ::-1][:, :2]
    return points, float(values[-2:].sum() / values.sum()) if values.any() else 1.0


def principal_plane(points: Matrix) -> tuple[Matrix, float]:
    """The first two principal components, and the share of the variance that they keep.

    Args:
        points: (n, d) coordinates. Components that do not exist (n or d of 1) are 0.

    >>> flat, share = principal_plane(np.array([[0.0, 0.0, 5.0], [3.0, 4.0, 5.0]]))
    >>> float(np.linalg.norm(flat[0] - flat[1]).round(9)), share
    (5.0, 1.0)
    """
    centred = points - points.mean(axis=0)
    if len(points) <= points.shape[1]:  # much cheaper than singular vectors as long as a model
        return _plane_of_products(centred @ centred.T)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    flat = np.zeros((len(points), 2))
    flat[:, : min(2, len(singular))] = (left * singular)[:, :2]
    variance = singular**2
    return flat, float(variance[:2].sum() / variance.sum()) if variance.any() else 1.0


def plane(clustering: ClusteringRecord) -> tuple[Matrix, Ids, str]:
    """(n, 2) points, the position in `clients` of the owner of each, and how they were computed.

    Recorded points of two dimensions are drawn as they are; of more, their principal components;
    without points there is one per client, by classical scaling of D. The text is a caption and has
    the share of the variance that the plane keeps.
    """
    points, owner, full = clustering.points, clustering.point_owner, clustering.projected_from
    is_line = full is None and points is not None and points.shape[1] < 2
    if points is None or owner is None or (is_line and clustering.D is not None):
        flat, share = classical_scaling(np.asarray(clustering.D, np.float64))
        how = f"classical multidimensional scaling of D ({100 * share:.0f} % of the variance)"
        return flat, np.arange(clustering.num_clients), how
    if full is None and points.shape[1] == 2:
        return np.asarray(points, np.float64), owner, "the points that were clustered"
    flat, share = principal_plane(np.asarray(points, np.float64))
    share *= 1.0 if clustering.variance_kept is None else float(clustering.variance_kept)
    num_dimensions = points.shape[1] if full is None else int(full)
    how = f"first two principal components of {num_dimensions:,}"
    note = _projection_note(clustering, points.shape[1])
    return flat, owner, f"{how} ({100 * share:.0f} % of the variance){note}"


def _projection_note(clustering: ClusteringRecord, num_kept: int) -> str:
    """How the recorded points differ from those that were clustered; "" if they do not."""
    if clustering.variance_kept is None:
        return ""
    if clustering.variance_kept < 1:
        return f"\ndrawn from the leading {num_kept} components"
    return "\ndrawn from coordinates with the same distances"


def dendrogram_brackets(linkage: Matrix, leaves: Ids) -> Matrix:
    """(m - 1, 4, 2) corners of the bracket of each merge; leaf leaves[k] is at x = k.

    Corners run from the foot of one branch over the height of the merge to the foot of the other.
    scipy's `dendrogram` recurses, too deep for the chains of single linkage.

    Args:
        linkage: (m - 1, 4) merges, as `scipy.cluster.hierarchy.linkage` returns them.
        leaves: (m,) positions of clients from left to right.
    """
    m = len(leaves)
    x, height = np.zeros(2 * m - 1), np.zeros(2 * m - 1)
    x[leaves] = np.arange(m)
    brackets = np.empty((m - 1, 4, 2))
    for k, (a, b, h, _) in enumerate(linkage):
        i, j = int(a), int(b)
        brackets[k] = [(x[i], height[i]), (x[i], h), (x[j], h), (x[j], height[j])]
        x[m + k], height[m + k] = (x[i] + x[j]) / 2, h
    return brackets


def merge_clusters(linkage: Matrix, labels: Ids) -> list[int | None]:
    """The cluster that each merge is inside of, None for a merge of two clusters.

    >>> merge_clusters(np.array([[0, 1, 0.5, 2], [2, 3, 9.0, 3]]), np.array([4, 4, 7]))
    [4, None]
    """
    inside: list[int | None] = [int(label) for label in labels]
    for a, b in linkage[:, :2].astype(np.int64):
        inside.append(inside[a] if inside[a] == inside[b] else None)
    return inside[len(labels) :]


def circle_layout(num_clients: int) -> Matrix:
    """(m, 2) positions on a circle, clockwise from the top, neighbours about 1 apart.

    >>> circle_layout(1)
    array([[0., 0.]])
    """
    angle = 2 * np.pi * np.arange(num_clients) / num_clients
    radius = num_clients / (2 * np.pi) if num_clients > 1 else 0.0
    return radius * np.stack([np.sin(angle), np.cos(angle)], axis=1)


def cluster_layout(labels: Ids, order: Ids) -> Matrix:
    """(m, 2) positions with each cluster on a small circle, and these circles on a large one.

    Clusters come in the order of their first client in `order`; neighbours are about 1 apart.
    """
    _, first = np.unique(labels[order], return_index=True)
    members = [order[labels[order] == labels[order[k]]] for k in np.sort(first)]
    radii = np.array([max(len(clients) / (2 * np.pi), 0.5) for clients in members])
    middle = 2 * np.pi * (np.cumsum(radii) - radii / 2) / radii.sum()
    centres = np.stack([np.sin(middle), np.cos(middle)], axis=1)
    a, b = np.triu_indices(len(members), 1)
    # The smallest large circle on which no two clusters touch.
    needed = GAP * (radii[a] + radii[b]) / np.linalg.norm(centres[a] - centres[b], axis=1)
    centres *= needed.max(initial=0)
    positions = np.empty((len(labels), 2))
    for clients, centre in zip(members, centres, strict=True):
        positions[clients] = centre + circle_layout(len(clients))
    return positions
