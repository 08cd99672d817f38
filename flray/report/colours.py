"""Colours that tell categories apart, for colour-blind readers too where there are few."""

import colorsys

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from scipy.optimize import linear_sum_assignment

from flray.data.dataset import Ids

Colour = tuple[float, float, float]

GREY: Colour = (0.35, 0.35, 0.35)  # what belongs to no category
# Methods: Okabe and Ito, "Color Universal Design", 2008; the hardest to see come last.
METHODS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442"]
# Clusters and planted groups: Paul Tol's muted scheme, which shares no colour with the methods.
GROUPS = [
    "#332288",
    "#CC6677",
    "#117733",
    "#DDCC77",
    "#44AA99",
    "#882255",
    "#88CCEE",
    "#999933",
    "#AA4499",
]
GOLDEN_RATIO = (5**0.5 - 1) / 2  # steps of hue that never meet again


def palette(num_colours: int, few: list[str] = METHODS) -> list[Colour]:
    """As many different colours: those of `few` if they suffice, then tab20, then any hue.

    >>> len(set(palette(8))), len(set(palette(100)))
    (8, 100)
    """
    if num_colours <= len(few):
        return [to_rgb(name) for name in few[:num_colours]]
    paired = list(sns.color_palette("tab20"))
    rest = [colorsys.hsv_to_rgb(k * GOLDEN_RATIO % 1, 0.6, 0.8) for k in range(num_colours)]
    return (paired[::2] + paired[1::2] + rest)[:num_colours]


def matched_colours(labels: Ids, groups: Ids | None) -> tuple[dict[int, Colour], dict[int, Colour]]:
    """Colours of clusters and of planted groups; both arrays are in the same order of clients.

    A cluster has the colour of the group it shares most clients with, one cluster for each group,
    so that a partition that found the groups looks like them whatever their numbers are.

    >>> clusters, planted = matched_colours(np.array([0, 0, 1]), np.array([9, 9, 4]))
    >>> clusters[0] == planted[9], clusters[1] == planted[4]
    (True, True)
    """
    clusters, cluster_place = np.unique(labels, return_inverse=True)
    if groups is None:
        colours = palette(len(clusters), GROUPS)
        return dict(zip(clusters.tolist(), colours, strict=True)), {}
    planted, group_place = np.unique(groups, return_inverse=True)
    colours = palette(max(len(clusters), len(planted)), GROUPS)
    shared = np.zeros((len(clusters), len(planted)), dtype=np.int64)
    np.add.at(shared, (cluster_place, group_place), 1)
    matched = dict(zip(*linear_sum_assignment(shared, maximize=True), strict=True))
    spare = iter(colours[len(planted) :])
    of_cluster = {
        int(c): colours[matched[k]] if k in matched else next(spare) for k, c in enumerate(clusters)
    }
    return of_cluster, dict(zip(planted.tolist(), colours, strict=False))


def for_figure(text: str) -> str:
    r"""Text that matplotlib shows as it is: a dollar would begin a formula.

    >>> for_figure("$5")
    '\\$5'
    """
    return text.replace("$", r"\$")


def plain(axes: Axes) -> None:
    """Two spines and faint lines behind the data."""
    sns.despine(ax=axes)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
