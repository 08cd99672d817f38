"""Figures inside the page: as SVG, or as PNG where SVG would be large."""

import base64
import io
import re

import matplotlib
from matplotlib.figure import Figure

from flray.report.page_elements import Html, element, void

MAX_SVG_BYTES = 200_000
PNG_DPI = 130
CSS_PIXELS = 96  # an inch

_DROPPED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<defs>\s*</defs>", re.DOTALL
)
_HOLDS = re.compile(r'\sid="([^"]*)"')
_REFERS = re.compile(r'(?:xlink:)?href="#([^"]*)"|url\(#([^)]*)\)')


def embed(figure: Figure, name: str, alt: str, caption: str = "") -> Html:
    """The figure on a card.

    Args:
        name: unique on the page; it goes in front of the SVG's own ids.
    """
    width = f"max-width:{figure.get_size_inches()[0] * CSS_PIXELS:.0f}px"
    svg = _svg(figure)
    if len(svg) <= MAX_SVG_BYTES:
        drawn = Html(_with_own_ids(_opened(svg, alt, width), name))
    else:
        drawn = void("img", src=f"data:image/png;base64,{_png(figure)}", alt=alt, style=width)
    below = [element("figcaption", caption)] if caption else []
    return element("figure", drawn, *below)


def _svg(figure: Figure) -> str:
    """The drawing alone: HTML needs no prologue, no namespaces and no line breaks."""
    buffer = io.StringIO()
    # The salt makes the same figure the same text.
    with matplotlib.rc_context({"svg.hashsalt": "flray", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r"\s+", " ", _DROPPED.sub("", text[text.index("<svg") :]))


def _opened(svg: str, alt: str, width: str) -> str:
    """With an opening tag that scales and tells what is drawn."""
    end = svg.index(">") + 1
    box = re.search(r'viewBox="([^"]*)"', svg[:end])
    assert box is not None, svg[:end]
    opening = element("svg", viewBox=box[1], role="img", aria_label=alt, style=width)
    return opening.removesuffix("</svg>") + svg[end:]


def _with_own_ids(svg: str, name: str) -> str:
    """Ids that no other figure has; those that nothing refers to go.

    >>> _with_own_ids('<g id="a"/><g id="b"/><use xlink:href="#b"/>', "x")
    '<g/><g id="x-b"/><use href="#x-b"/>'
    """
    used = {first or second for first, second in _REFERS.findall(svg)}

    def refer(found: re.Match[str]) -> str:
        return f'href="#{name}-{found[1]}"' if found[1] else f"url(#{name}-{found[2]})"

    def hold(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    return _REFERS.sub(refer, _HOLDS.sub(hold, svg)).replace("xlink:href", "href")


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
