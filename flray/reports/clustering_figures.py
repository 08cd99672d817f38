"""Figures of a clustering: its distances, its clients in the plane, and its graph of clients.

All take a `ClusteringRecord`, of m clients, and draw clusters in the colours of the planted groups
that they share most clients with (`style.matched_colours`).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from flray.columns import ARI
from flray.data.dataset import Ids
from flray.measures.scores import partition_scores
from flray.records.clusterings import ClusteringRecord
from flray.reports.geometry import (
    Matrix,
    circle_layout,
    cluster_layout,
    cluster_order,
    dendrogram_brackets,
    leaf_order,
    merge_clusters,
    plane,
    tree_of,
)
from flray.reports.style import GREY, Colour, lines, matched_colours
from flray.wording import counted

MAX_NAMED_CLIENTS = 25  # most client ids that fit on an axis or into nodes
MAX_LEGEND = 12  # most categories in a legend
MAX_EDGES = 20_000  # most edges drawn; more show nothing new and take seconds
PANEL_POINTS = 270  # width of a graph in points, about

SIDE, TOP = (-0.05, 0, 0.035, 1), (0, 1.01, 1, 0.03)  # strips at a matrix: x, y, width, height

Colours = Mapping[int, Colour]  # by cluster or group
Anchor = Literal["lower center", "upper center"]  # side of a legend that is fixed


def distance_figure(
    clustering: ClusteringRecord, title: str = "", threshold: float | None = None
) -> Figure:
    """D in three panels, as in FLT's Fig. 3: raw, reordered under its dendrogram, and flattened.

    Args:
        clustering: What was clustered, and the clusters.
        title: Begins the headline of the figure.
        threshold: Height at which the dendrogram was cut.
    """
    assert clustering.D is not None  # `clustering_figures` leaves this figure out
    of_cluster, of_group = matched_colours(clustering.labels, clustering.groups)
    tree, leaves, order = tree_of(clustering), leaf_order(clustering), cluster_order(clustering)
    figure = Figure(figsize=(12, 6.0 if tree is None else 6.9), layout="constrained")
    figure.suptitle(_headline(clustering, title), fontsize=12, wrap=True)
    raw, reordered, flat = figure.subplots(1, 3)
    orders = {raw: np.arange(clustering.num_clients), reordered: leaves, flat: order}
    for axes in (raw, reordered):
        image = _show_matrix(axes, clustering.D, clustering.clients, orders[axes])
        image.set(cmap="viridis", clim=(0, float(clustering.D.max()) or 1.0))
    figure.colorbar(image, ax=[raw, reordered], location="bottom", label="distance D", aspect=50)
    raw.set_xlabel("(a) raw, by client")
    image, name = _show_relation(flat, clustering, order)
    figure.colorbar(image, ax=flat, location="bottom", label=name, aspect=24)
    outlined = "equal ones outlined" if clustering.is_overlapping else "outlined"
    flat.set_xlabel(f"(c) {name}; C = {clustering.num_clusters}, {outlined}")
    _outline_clusters(flat, clustering.labels[order], of_cluster)
    if clustering.groups is not None:
        for axes, clients in orders.items():
            _strip(axes, SIDE, clustering.groups[clients][:, None], of_group)
        _legend(raw, of_group, "lower center", (0.5, 1.02), "planted group (strip)")
    _legend(flat, of_cluster, "lower center", (0.5, 1.02), "cluster")
    _strip(reordered, TOP, clustering.labels[leaves][None], of_cluster)
    reordered.set_xlabel(f"(b) reordered by {'cluster' if tree is None else 'the dendrogram'}")
    if tree is not None:
        inside = merge_clusters(tree, clustering.labels)
        colours = [GREY if c is None else of_cluster[c] for c in inside]
        _draw_dendrogram(reordered, dendrogram_brackets(tree, leaves), colours, threshold)
    return figure


def embedding_figure(
    clustering: ClusteringRecord, title: str = "", _threshold: float | None = None
) -> Figure:
    """Clients, or their points, in the plane; by cluster, and by planted group if there are any.

    Each point of a client is a dot, so that clients with several points (FLT's centres) have
    several. The headline names the projection and the variance that it keeps. There is no threshold
    in this figure; the argument makes all figures of a clustering callable alike.

    Args:
        clustering: What was clustered, and the clusters.
        title: Begins the headline of the figure.
    """
    of_cluster, of_group = matched_colours(clustering.labels, clustering.groups)
    points, owner, how = plane(clustering)
    panels = 1 if clustering.groups is None else 2
    figure = Figure(figsize=(1.6 + 4.4 * panels, 5.2))
    figure.set_layout_engine("constrained", h_pad=0.1)
    figure.suptitle(f"{_headline(clustering, title)}\n{how}", fontsize=11, wrap=True)
    row = figure.subplots(1, panels, sharex=True, sharey=True, squeeze=False)[0]
    _scatter(row[0], points, clustering.labels[owner], of_cluster)
    row[0].set_title(f"by cluster (C = {clustering.num_clusters})", fontsize=10)
    if clustering.groups is not None:
        _scatter(row[1], points, clustering.groups[owner], of_group)
        ari = partition_scores(clustering.labels, clustering.groups)[ARI]
        row[1].set_title(f"by planted group ({len(of_group)}, ARI {ari:.2f})", fontsize=10)
    return figure


def graph_figure(
    clustering: ClusteringRecord, title: str = "", _threshold: float | None = None
) -> Figure:
    """The relation between clients, as in FLT's Fig. 2: matrix and graph, raw and reordered.

    Two clients have an edge if one hears the other (R > 0); of more than `MAX_EDGES` edges an even
    selection is drawn and the panel says so. Without R, clients of one cluster are related. There
    is no threshold in this figure; the argument makes all figures of a clustering callable alike.

    Args:
        clustering: What was clustered, and the clusters.
        title: Begins the headline of the figure.
    """
    of_cluster, _ = matched_colours(clustering.labels, clustering.groups)
    order = cluster_order(clustering)
    figure = Figure(figsize=(8.6, 9), layout="constrained")
    grid = figure.subplots(2, 2)
    for axes, shown in zip(grid[0], (np.arange(clustering.num_clients), order), strict=True):
        _, name = _show_relation(axes, clustering, shown)
    _outline_clusters(grid[0, 1], clustering.labels[order], of_cluster)
    edges, num_edges = _edges(clustering)
    layouts = (circle_layout(clustering.num_clients), cluster_layout(clustering.labels, order))
    for axes, positions in zip(grid[1], layouts, strict=True):
        _draw_graph(axes, clustering, positions, edges, of_cluster)
    grid[0, 0].set_title(f"(a) {name}, by client", fontsize=10)
    grid[0, 1].set_title(f"(b) {name}, by cluster", fontsize=10)
    drawn = f"{len(edges):,} of {num_edges:,}" if len(edges) < num_edges else f"{num_edges:,}"
    grid[1, 0].set_title(f"(c) graph by client, {drawn} edges", fontsize=10)
    grid[1, 1].set_title("(d) graph by cluster; between clusters grey", fontsize=10)
    figure.suptitle(_headline(clustering, title), fontsize=12, wrap=True)
    return figure


# Figures of a clustering by name; all take the clustering, a title and the threshold.
CLUSTERING_FIGURES: dict[str, Callable[..., Figure]] = {
    "distance": distance_figure,
    "embedding": embedding_figure,
    "graph": graph_figure,
}


def clustering_figures(clustering: ClusteringRecord) -> dict[str, Callable[..., Figure]]:
    """The figures of a clustering by name; without D, those that do not show pairs of clients."""
    if clustering.D is not None:
        return CLUSTERING_FIGURES
    return {"embedding": embedding_figure}


def when(t: int) -> str:
    """The time of a clustering, in words.

    >>> when(0), when(3)
    ('before the first round', 'after round 3')
    """
    return "before the first round" if t == 0 else f"after round {t}"


def _headline(clustering: ClusteringRecord, title: str) -> str:
    counts = f"{counted(clustering.num_clients, 'client')}, {clustering.counted}"
    return f"{title}: {counts}" if title else counts


def _relation(clustering: ClusteringRecord) -> tuple[Matrix, str]:
    """R and its name; if nothing was related, 1 within clusters."""
    if clustering.R is not None:
        return np.asarray(clustering.R, np.float64), "relation R"
    same = np.equal.outer(clustering.labels, clustering.labels)
    return same.astype(np.float64), "same cluster"


def _show_matrix(axes: Axes, matrix: NDArray[np.floating], clients: Ids, order: Ids) -> AxesImage:
    """Draw the rows and columns of a matrix in this order."""
    image = axes.imshow(matrix[np.ix_(order, order)])
    axes.set_yticks([])
    all_fit = len(order) <= MAX_NAMED_CLIENTS
    ticks = np.arange(0, len(order), 1 if all_fit else -(-len(order) // 50) * 10)
    names = [str(i) for i in clients[order[ticks]]]
    axes.set_xticks(ticks, names, fontsize=7, rotation=90 if all_fit else 0)
    return image


def _show_relation(axes: Axes, clustering: ClusteringRecord, order: Ids) -> tuple[AxesImage, str]:
    """Draw the relation with clients in this order; returns the image and the relation's name."""
    relation, name = _relation(clustering)
    image = _show_matrix(axes, relation, clustering.clients, order)
    image.set(cmap=sns.light_palette("0.45", as_cmap=True), clim=(0, float(relation.max()) or 1.0))
    return image, name


def _outline_clusters(axes: Axes, labels: Ids, colours: Colours) -> None:
    """Draw squares around equal labels on the diagonal, in the colours of clusters."""
    starts = np.flatnonzero(np.diff(labels, prepend=labels[0] - 1))
    sizes = np.diff(starts, append=len(labels))
    for start, size in zip(starts, sizes, strict=True):
        corner, colour = (start - 0.5, start - 0.5), colours[int(labels[start])]
        axes.add_patch(Rectangle(corner, size, size, fill=False, edgecolor=colour, linewidth=1.5))


def _strip(axes: Axes, bounds: tuple[float, ...], labels: Ids, colours: Colours) -> None:
    """Draw labels along the top (1, m) or the side (m, 1) of a matrix."""
    shared = {"sharex": axes} if len(labels) == 1 else {"sharey": axes}
    strip = axes.inset_axes(bounds, **shared)  # type: ignore[arg-type]
    cmap = ListedColormap(list(colours.values()))
    codes = np.searchsorted(list(colours), labels)
    strip.imshow(codes, cmap=cmap, vmin=-0.5, vmax=len(colours) - 0.5, aspect="auto")
    strip.axis("off")


def _draw_dendrogram(
    axes: Axes, brackets: Matrix, colours: list[Colour], threshold: float | None
) -> None:
    """Draw brackets (m - 1, 4, 2) above the axes of a matrix, with a dashed line at the cut."""
    tree = axes.inset_axes((0, 1.05, 1, 0.34))
    tree.add_collection(LineCollection(list(brackets), colors=colours, linewidths=0.9))
    highest = float(brackets[..., 1].max())
    if threshold is not None:
        tree.axhline(threshold, color="0.2", linewidth=1, linestyle="--")
        tree.set_title(f"cut at {threshold:.4g} (dashed)", fontsize=9, loc="right")
        highest = max(highest, threshold)
    tree.set_xlim(-0.5, len(brackets) + 0.5)
    tree.set_ylim(0, 1.06 * highest or 1.0)
    tree.set_xticks([])
    tree.tick_params(labelsize=8)
    tree.spines[["top", "right", "bottom"]].set_visible(False)


def _legend(
    axes: Axes, colours: Colours, side: Anchor, anchor: tuple[float, float], title: str = ""
) -> None:
    """Name the colours beside the axes; more than `MAX_LEGEND` of them are not named."""
    if len(colours) > MAX_LEGEND:
        return
    dots = lines({str(name): c for name, c in colours.items()}, linestyle="", marker="o")
    legend = axes.legend(handles=dots, loc=side, bbox_to_anchor=anchor, ncols=6, frameon=False)
    legend.set_title(title)


def _scatter(axes: Axes, points: Matrix, labels: Ids, colours: Colours) -> None:
    """Draw points (n, 2) in the colours of their labels (n,)."""
    # One call: no category lies wholly above another.
    c, size = [colours[label] for label in labels.tolist()], 36 if len(points) <= 200 else 10
    x, y = points.T
    axes.scatter(x, y, s=size, c=c, edgecolors="white", linewidths=0.4, alpha=0.9)
    axes.set_aspect("equal", adjustable="box")
    axes.tick_params(labelsize=8)
    sns.despine(ax=axes)
    _legend(axes, colours, "upper center", (0.5, -0.08))


def _edges(clustering: ClusteringRecord) -> tuple[Ids, int]:
    """(E, 2) positions of related clients, thinned evenly to MAX_EDGES; and the number of edges."""
    related = _relation(clustering)[0] > 0
    edges = np.argwhere(np.triu(related | related.T, 1))
    if len(edges) <= MAX_EDGES:
        return edges, len(edges)
    return edges[np.linspace(0, len(edges) - 1, MAX_EDGES).astype(np.int64)], len(edges)


def _draw_graph(
    axes: Axes, clustering: ClusteringRecord, positions: Matrix, edges: Ids, colours: Colours
) -> None:
    """Draw nodes and edges in the colours of their clusters, edges between clusters in grey."""
    inside = np.equal(*clustering.labels[edges].T)
    edges = edges[np.argsort(inside, kind="stable")]  # grey ones below
    ends = clustering.labels[edges].tolist()
    lines = [colours[a] if a == b else GREY for a, b in ends]
    alpha = float(np.clip(10 / np.sqrt(len(edges) + 1), 0.06, 0.6))
    axes.add_collection(
        LineCollection(list(positions[edges]), colors=lines, linewidths=0.7, alpha=alpha)
    )
    extent = float(np.ptp(positions, axis=0).max()) + 1.5
    diameter = min(16.0, 0.62 * PANEL_POINTS / extent)  # neighbours are about 1 apart
    nodes = [colours[label] for label in clustering.labels.tolist()]
    x, y = positions.T
    axes.scatter(x, y, s=diameter**2, c=nodes, edgecolors="white", linewidths=0.5, zorder=3)
    if clustering.num_clients <= MAX_NAMED_CLIENTS:
        for k, colour in enumerate(nodes):
            ink = "black" if np.mean(colour) > 0.5 else "white"
            name = axes.text(x[k], y[k], str(clustering.clients[k]), fontsize=7, color=ink)
            name.set(ha="center", va="center", zorder=4)
    for limit, coordinates in ((axes.set_xlim, x), (axes.set_ylim, y)):
        centre = (coordinates.min() + coordinates.max()) / 2
        limit(centre - extent / 2, centre + extent / 2)
    axes.set_aspect("equal")
    axes.axis("off")
