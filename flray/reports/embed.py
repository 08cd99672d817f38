"""Figures inside a page, as data URLs."""

import base64
import io
import re

import matplotlib
from matplotlib.figure import Figure

from flray.reports import (
    benchmark_figures,
    clustering_figures,
    figures,
    sweep_curves,
    sweep_figures,
)

MAX_SVG_BYTES = 200_000
DPI = 130
CSS_PIXELS = 96  # pixels of an inch in CSS
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)


def figure_source(name: str, *arguments: object) -> tuple[str, int] | None:
    """The figure that the function `<name>_figure` draws, as a data URL, and its width in pixels.

    It is SVG, or WebP if SVG would be larger than `MAX_SVG_BYTES`; None if there is nothing to
    draw. Equal figures give equal SVG texts, so that pages of equal runs are equal.

    Args:
        name: Name of a function of this package's figures, without `_figure`.
        arguments: Arguments of that function.

    Raises:
        StopIteration: No figure has this name; names come from templates, never from users.
    """
    modules = (figures, clustering_figures, sweep_curves, sweep_figures, benchmark_figures)
    draw = next(draw for module in modules if (draw := vars(module).get(f"{name}_figure")))
    drawn: Figure | None = draw(*arguments)
    if drawn is None:
        return None
    svg, pixels = io.StringIO(), io.BytesIO()
    # The salt makes equal figures equal texts.
    with matplotlib.rc_context({"svg.hashsalt": "flray", "svg.fonttype": "path"}):
        drawn.savefig(svg, format="svg", metadata={"Date": None})
    kind, data = "svg+xml", re.sub(r"\s+", " ", _NEEDLESS.sub("", svg.getvalue())).encode()
    if len(data) > MAX_SVG_BYTES:
        drawn.savefig(pixels, format="webp", dpi=DPI)
        kind, data = "webp", pixels.getvalue()
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return source, round(drawn.get_size_inches()[0] * CSS_PIXELS)
