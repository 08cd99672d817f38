"""The style of all figures: colours of categories, axes, legends, texts.

Methods and clusters have colours of two disjoint schemes, so that no line is mistaken for a
cluster. Nothing here is random or depends on a display.
"""

import colorsys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from flray.data.dataset import Ids

Colour = tuple[float, float, float]
Values = NDArray[np.float64]

GREY: Colour = (0.35, 0.35, 0.35)  # for no category
RED = "#CC3311"  # for emphasis; no method or group has it
# Methods: Okabe and Ito, "Color Universal Design", 2008; the hardest to see come last.
METHODS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442"]
# Clusters and planted groups: Paul Tol's muted scheme, which shares no colour with the methods.
GROUPS = (
    *("#332288", "#CC6677", "#117733", "#DDCC77", "#44AA99"),
    *("#882255", "#88CCEE", "#999933", "#AA4499"),
)
GOLDEN_RATIO = (5**0.5 - 1) / 2  # steps of hue that never meet again
LOG_FROM = 20  # clusters above which their axis is logarithmic
LEGEND_WIDTH = 95  # characters in a line of a legend


def palette(num_colours: int, few: Sequence[str] = METHODS) -> list[Colour]:
    """Distinct colours, `num_colours` of them: those of `few`, then further hues.

    >>> len(set(palette(8))), len(set(palette(100)))
    (8, 100)
    """
    hues = [colorsys.hsv_to_rgb(k * GOLDEN_RATIO % 1, 0.55, 0.75) for k in range(num_colours)]
    return [*map(to_rgb, few), *hues][:num_colours]


def colours_of(names: Iterable[str]) -> dict[str, Colour]:
    """A colour for each distinct name, in the order of their first occurrence.

    The first eight are those of METHODS; a name's colour depends on the names before it alone.
    """
    distinct = list(dict.fromkeys(names))
    return dict(zip(distinct, palette(len(distinct)), strict=True))


def matched_colours(labels: Ids, groups: Ids | None) -> tuple[dict[int, Colour], dict[int, Colour]]:
    """Colours of clusters and of planted groups; both arrays are in the same order of clients.

    A cluster has the colour of the group that it shares most clients with, one cluster per group,
    so that a partition equal to the groups has the same colours whatever the numbers are.

    >>> clusters, planted = matched_colours(np.array([0, 0, 1]), np.array([9, 9, 4]))
    >>> clusters[0] == planted[9], clusters[1] == planted[4]
    (True, True)
    """
    clusters, cluster_index = np.unique(labels, return_inverse=True)
    if groups is None:
        colours = palette(len(clusters), GROUPS)
        return dict(zip(clusters.tolist(), colours, strict=True)), {}
    planted, group_index = np.unique(groups, return_inverse=True)
    colours = palette(max(len(clusters), len(planted)), GROUPS)
    shared = np.zeros((len(clusters), len(planted)), dtype=np.int64)
    np.add.at(shared, (cluster_index, group_index), 1)
    matched = dict(zip(*linear_sum_assignment(shared, maximize=True), strict=True))
    spare = iter(colours[len(planted) :])
    of_cluster = {
        int(c): colours[matched[k]] if k in matched else next(spare) for k, c in enumerate(clusters)
    }
    return of_cluster, dict(zip(planted.tolist(), colours, strict=False))


def for_figure(text: str, length: int = 40) -> str:
    r"""Text of at most `length` characters, with dollars escaped, which would begin a formula.

    Long texts lose their beginning, because names tend to differ at their end.

    >>> for_figure("$5"), for_figure("experiments/flt/seed=3", 8)
    ('\\$5', '…/seed=3')
    """
    fitting = text if len(text) <= length else f"…{text[1 - length :]}"
    return fitting.replace("$", r"\$")


def spread_out(number: int, width: float) -> Values:
    """Offsets within `width` that keep dots at the same position apart; not random.

    >>> spread_out(3, 1.0).round(3)
    array([-0.5  ,  0.118, -0.264])
    """
    return width * (np.arange(number, dtype=np.float64) * GOLDEN_RATIO % 1 - 0.5)


def plain(axes: Axes) -> None:
    """Leave two spines of the axes and draw faint lines behind the data."""
    sns.despine(ax=axes)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def whole_rounds(axes: Axes) -> None:
    """Label the x axis as rounds, with ticks at whole numbers."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def count_axis(axes: Axes) -> None:
    """Label the y axis as numbers of clusters, logarithmic if a panel that shares it has many.

    Call it after drawing: it reads the limits of the data from the axes.
    """
    axes.set_ylabel("clusters")
    largest = max(panel.dataLim.y1 for panel in axes.get_shared_y_axes().get_siblings(axes))
    if largest > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        axes.set_ylim(0, 1.1 * max(largest, 1))


def line(label: str, colour: Colour | str, **style: object) -> Line2D:
    """An entry of a legend; `style` are properties of a `Line2D`, such as linestyle or marker."""
    return Line2D([], [], color=colour, label=label, **style)  # type: ignore[arg-type]


def lines(colours: Mapping[str, Colour], **style: object) -> list[Line2D]:
    """An entry of a legend for each label, in the order of `colours`, all with one `style`."""
    return [line(label, colour, **style) for label, colour in colours.items()]


def legend_below(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Put a legend below all panels, in as many columns as its labels fit into.

    The figure must have the layout "constrained", which makes room for it.
    """
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    columns = max(1, min(5, len(handles), LEGEND_WIDTH // (longest + 6)))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
