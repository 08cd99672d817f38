"""One self-contained HTML page of runs and sweeps: what `flray.report` and `flray report` write.

Templates (`templates/*.html`) define layout and wording; `page_run` and `sweep_tables` compute what
templates cannot. Texts of users, such as names of experiments, are escaped, and a name that a
template misspells is an error. The page loads nothing from the network: figures are inside it.
"""

import functools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from flray import __version__
from flray import columns as recorded
from flray.config.deciding import leaves
from flray.files import write_output
from flray.measures.scores import partition_scores
from flray.records.clusterings import read_clustering
from flray.records.inside import path_below
from flray.reports import embed, page_run, sweep_tables
from flray.reports.benchmark import benchmarks_of, is_benchmark, ranking_sheet, score_sheet
from flray.reports.clustering_figures import when
from flray.reports.columns import column_of, with_unit
from flray.reports.configuration import setting_text
from flray.reports.explorer import distance_picture, explorer
from flray.reports.measures import errors_by_round, run_sheet
from flray.reports.runs import RunRecord, by_experiment, find_runs, holds_run, read_run
from flray.reports.sheets import GROUND_TRUTH, GROUND_TRUTH_NOTE, INCOMPLETE_NOTE
from flray.reports.sweep_curves import curve_keys
from flray.reports.sweep_figures import heatmap_pairs
from flray.reports.sweeps import Sweep, left_out_note
from flray.wording import capitalised

PAGE = "report.html"

_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d|–$")
_FUNCTIONS = (  # functions that templates call by name
    *(curve_keys, heatmap_pairs, left_out_note, when, explorer, distance_picture),
    *(benchmarks_of, is_benchmark, ranking_sheet, score_sheet),
    *(errors_by_round, run_sheet, read_clustering, partition_scores, holds_run, read_run),
)


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one page of all runs and sweeps in and below the folders; returns its path.

    The file is replaced as a whole: a reader sees the old page or the new one.

    Args:
        folders: Folders of runs or sweeps, or folders that contain such folders.
        out: The file to write. None: report.html in the first folder.

    Raises:
        ExperimentError: There is neither a run nor a sweep in one of the folders, or the files of a
            run contradict each other.
    """
    path = path_below(folders[0], PAGE) if out is None else out
    page = render_page(*find_runs(folders))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, lambda file: file.write_text(page, encoding="utf-8"))
    return path


def render_page(runs: Sequence[RunRecord], sweeps: Sequence[Sweep]) -> str:
    """The HTML of a page, with runs grouped into experiments by their names.

    Args:
        runs: Runs, finished or not, as `find_runs` returns them.
        sweeps: Sweeps, each with a chapter of its own.
    """
    page = _environment().get_template("page.html")
    experiments = by_experiment(runs)
    return page.render(runs=runs, experiments=experiments, sweeps=sweeps, version=__version__)


@functools.cache
def _environment() -> Environment:
    """The templates with the functions, constants, filters and tests that they use."""
    environment = Environment(
        loader=PackageLoader("flray.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {function.__name__: function for function in _FUNCTIONS}
    environment.globals |= {
        "GROUND_TRUTH": GROUND_TRUTH,
        "GROUND_TRUTH_NOTE": GROUND_TRUTH_NOTE,
        "INCOMPLETE_NOTE": INCOMPLETE_NOTE,
        "embed": embed,
        "number": with_unit,
        "of_run": page_run,
        "of_sweep": sweep_tables,
        "recorded": recorded,
        "title_of": lambda key: column_of(key).title,
    }
    environment.filters |= {
        "leaves": leaves,
        "capitalised": capitalised,
        "setting": setting_text,
        "typed": typed,
        "yaml": lambda config: yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True),
    }
    environment.tests["numeric"] = lambda text: _NUMBER.match(str(text)) is not None
    return environment


def typed(path: Path) -> str:
    """A path to type in a shell: quoted if necessary, relative if it is below the current folder.

    >>> typed(Path.cwd() / "my runs" / "a")
    "'my runs/a'"
    """
    absolute, here = path.absolute(), Path.cwd()
    shown = absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    return shlex.quote(str(shown))
