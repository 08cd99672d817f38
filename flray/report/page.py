"""One self-contained HTML page of a run, of several runs, of a sweep, or of all of them."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from flray import __version__
from flray.records.atomic import replace_text
from flray.report.page_blocks import Block, section
from flray.report.page_run import experiments_sections, run_sections
from flray.report.page_sweep import sweep_sections, sweep_title
from flray.report.runs import RunRecord, by_experiment, find_runs
from flray.report.sweeps import Sweep

MAX_NAMES = 4  # in a title


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Everything in and below the folders on one page."""
    page = render_page(*find_runs(folders))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page)


def render_page(runs: Sequence[RunRecord], sweeps: Sequence[Sweep]) -> str:
    loader = PackageLoader("flray.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("page.html").render(
        title=_title(runs, sweeps),
        remark=_remark(runs, sweeps),
        sections=_sections(runs, sweeps),
        version=__version__,
    )


def _sections(runs: Sequence[RunRecord], sweeps: Sequence[Sweep]) -> list[Block]:
    """Those of the one thing there is, or one for each of several things."""
    parts: list[tuple[str, str, list[Block]]] = []
    if len(runs) == 1:
        parts.append((runs[0].label, "run", run_sections(runs[0], "run")))
    elif runs:
        parts.append(("Runs", "runs", experiments_sections(by_experiment(runs), "runs")))
    for number, sweep in enumerate(sweeps):
        name = f"sweep{number}"
        parts.append((f"{sweep.name}: {sweep_title(sweep)}", name, sweep_sections(sweep, name)))
    return parts[0][2] if len(parts) == 1 else [section(*part) for part in parts]


def _title(runs: Sequence[RunRecord], sweeps: Sequence[Sweep]) -> str:
    if len(runs) == 1 and not sweeps:
        return runs[0].title
    if len(sweeps) == 1 and not runs:
        return sweep_title(sweeps[0])
    names = [*by_experiment(runs), *(sweep.name for sweep in sweeps)]
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def _remark(runs: Sequence[RunRecord], sweeps: Sequence[Sweep]) -> str:
    if len(runs) == 1 and not sweeps:
        return f"{runs[0].label}; folder {runs[0].folder}"
    counts = [
        (len(by_experiment(runs)), "experiment"),
        (len(runs), "run"),
        (len(sweeps), "sweep"),
        (sum(len(sweep.rows) for sweep in sweeps), "row"),
    ]
    return ", ".join(f"{n:,} {word}{'s' if n != 1 else ''}" for n, word in counts if n)
