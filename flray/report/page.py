"""One self-contained HTML page of a run, of several runs, of a sweep, or of all of them."""

from collections.abc import Sequence
from pathlib import Path

from flray import __version__
from flray.records.atomic import replace_text
from flray.report.page_elements import Html, element, joined, section, void
from flray.report.page_folders import Found, find
from flray.report.page_run import run_sections
from flray.report.page_runs import runs_sections
from flray.report.page_style import SCRIPT, STYLE
from flray.report.page_sweep import sweep_sections, sweep_title

# Nothing may be loaded from anywhere: a browser that had to would say so.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

Sections = list[tuple[str, str, Html]]  # heading, anchor, section


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Everything in and below the folders on one page."""
    page = render_page(find(folders))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page)


def render_page(found: Found) -> str:
    title = _title(found)
    sections = _sections(found)
    head = element(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", http_equiv="Content-Security-Policy", content=POLICY),
        void("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    top = [element("h1", title), element("p", _remark(found), class_="sub")]
    body = element(
        "body",
        element("header", *top, class_="top"),
        _navigation(sections),
        element("main", *(shown for _, _, shown in sections)),
        element("footer", f"Made by flray {__version__} from the recorded files alone."),
        element("script", Html(SCRIPT)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _sections(found: Found) -> Sections:
    """Those of the one thing there is, or one for each of several things."""
    level = 2 if len(found.sweeps) + bool(found.runs) == 1 else 3
    parts: list[tuple[str, str, Sections]] = []
    if len(found.runs) == 1:
        parts.append((found.runs[0].label, "run", run_sections(found.runs[0], "run", level)))
    elif found.runs:
        parts.append(("Runs", "runs", runs_sections(found.experiments, "runs", level)))
    for number, sweep in enumerate(found.sweeps):
        name = f"sweep{number}"
        heading = f"{sweep.name}: {sweep_title(sweep)}"
        parts.append((heading, name, sweep_sections(sweep, name, level)))
    if len(parts) == 1:
        return parts[0][2]
    return [
        (heading, anchor, section(2, heading, *(s for _, _, s in inner), anchor=anchor))
        for heading, anchor, inner in parts
    ]


def _navigation(sections: Sections) -> Html:
    links = (
        element("li", element("a", heading, href=f"#{anchor}")) for heading, anchor, _ in sections
    )
    return element("nav", element("ul", joined(links)), aria_label="sections")


def _title(found: Found) -> str:
    if len(found.runs) == 1 and not found.sweeps:
        return found.runs[0].title
    if len(found.sweeps) == 1 and not found.runs:
        return sweep_title(found.sweeps[0])
    names = [*found.experiments, *(sweep.name for sweep in found.sweeps)]
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _remark(found: Found) -> str:
    if len(found.runs) == 1 and not found.sweeps:
        run = found.runs[0]
        return f"{run.label}; folder {run.folder}"
    counts = [
        (len(found.experiments), "experiment"),
        (len(found.runs), "run"),
        (len(found.sweeps), "sweep"),
        (sum(len(sweep.rows) for sweep in found.sweeps), "row"),
    ]
    return ", ".join(f"{n:,} {word}{'s' if n != 1 else ''}" for n, word in counts if n)
