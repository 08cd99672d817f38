"""Colours that tell categories apart, for colour-blind readers too where there are few."""

import colorsys

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from scipy.optimize import linear_sum_assignment

from flray.data.dataset import Ids

Colour = tuple[float, float, float]

GREY: Colour = (0.35, 0.35, 0.35)  # what belongs to no category

# Okabe and Ito, "Color Universal Design", 2008; the two hardest to see on paper come last.
OKABE_ITO = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#000000",
    "#F0E442",
)
GOLDEN_RATIO = (5**0.5 - 1) / 2  # steps of hue that never meet again


def palette(num_colours: int) -> list[Colour]:
    """As many different colours: Okabe-Ito up to 8, then tab20, then any hue.

    >>> len(set(palette(8))), len(set(palette(100)))
    (8, 100)
    """
    if num_colours <= len(OKABE_ITO):
        return [to_rgb(name) for name in OKABE_ITO[:num_colours]]
    paired = [to_rgb(matplotlib.colormaps["tab20"](k)) for k in range(20)]
    strong_first = paired[::2] + paired[1::2]
    rest = range(num_colours - len(strong_first))
    return (strong_first + [colorsys.hsv_to_rgb(k * GOLDEN_RATIO % 1, 0.6, 0.8) for k in rest])[
        :num_colours
    ]


def matched_colours(labels: Ids, groups: Ids | None) -> tuple[dict[int, Colour], dict[int, Colour]]:
    """Colours of clusters and of planted groups, both in the same order of clients.

    A cluster has the colour of the group it shares most clients with, one cluster for a group, so
    that a partition that found the groups looks like them whatever their numbers are.

    >>> clusters, planted = matched_colours(np.array([0, 0, 1]), np.array([9, 9, 4]))
    >>> clusters[0] == planted[9], clusters[1] == planted[4]
    (True, True)
    """
    clusters, cluster_place = np.unique(labels, return_inverse=True)
    if groups is None:
        return dict(zip(clusters.tolist(), palette(len(clusters)), strict=True)), {}
    planted, group_place = np.unique(groups, return_inverse=True)
    colours = palette(max(len(clusters), len(planted)))
    shared = np.zeros((len(clusters), len(planted)), dtype=np.int64)
    np.add.at(shared, (cluster_place, group_place), 1)
    matched = dict(zip(*linear_sum_assignment(shared, maximize=True), strict=True))
    spare = iter(colours[len(planted) :])
    return (
        {
            int(c): colours[matched[k]] if k in matched else next(spare)
            for k, c in enumerate(clusters)
        },
        dict(zip(planted.tolist(), colours, strict=False)),
    )


def for_figure(text: str) -> str:
    r"""Text that matplotlib shows as it is: a dollar would begin a formula.

    >>> for_figure("$5")
    '\\$5'
    """
    return text.replace("$", r"\$")
