"""Figures as files: those of `flray run` and of `flray compare --figure`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from flray.config.overrides import THRESHOLD
from flray.errors import ExperimentError
from flray.records.clusterings import read_clustering
from flray.reports import style
from flray.reports.clustering_figures import clustering_figures, when
from flray.reports.figures import accuracy_figure, clients_figure
from flray.reports.runs import Experiments, read_run
from flray.values import file_name

DPI = 150
# Formats of files, with metadata that has no date: equal runs give equal files.
METADATA = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}
MAX_EVENTS = 3  # most clusterings drawn one by one; of more, only the last is drawn


def write_figures(experiments: Experiments, folder: Path) -> list[Path]:
    """Draw all figures of the experiments as PNG files in a folder; returns their paths.

    Figures of clusterings are those of the first seed of each experiment.

    Args:
        experiments: The runs of each experiment by name; names begin the files of clusterings.
        folder: Where to write; created if it does not exist.

    Raises:
        ValueError: Figures of two experiments would have the same file name.
    """
    stems = {name: file_name(name) for name, runs in experiments.items() if runs[0].clusterings}
    alike = [name for name in stems if Counter(stems.values())[stems[name]] > 1]
    if alike:
        raise ValueError(f"figures of {alike} would have one name: rename one")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, figure in _figures(experiments):
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure into a file; the suffix .pdf, .svg or .png decides its format.

    Folders are created. The file has no date in it, so that equal figures give equal files.

    Raises:
        ExperimentError: The suffix is none of these.
    """
    if file.suffix not in METADATA:
        raise ExperimentError(f"a figure is one of {', '.join(METADATA)}, got {file.name!r}")
    file.parent.mkdir(parents=True, exist_ok=True)
    # Font type 42, which journals accept in a PDF; a fixed salt, so that SVG ids do not change.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "flray"}):
        figure.savefig(file, dpi=DPI, metadata=METADATA[file.suffix])


def figures_of(run: Path) -> list[Path]:
    """Draw the figures of one run into its folder figures/; returns their paths.

    They are accuracy.png, clients.png and, for each drawn clustering after round t,
    run_round_t_distance.png, _embedding.png and _graph.png. Existing files are replaced.
    """
    return write_figures({"run": [read_run(run, "run")]}, run / "figures")


def _figures(experiments: Experiments) -> Iterator[tuple[str, Figure]]:
    """The figures with their file names, one at a time, since figures are large."""
    all_runs = [run for runs in experiments.values() for run in runs]
    if any(run.is_evaluated for run in all_runs):
        yield "accuracy", accuracy_figure(experiments)
    if any(len(run.last_test()) for run in all_runs):
        yield "clients", clients_figure(experiments)
    for name, (first, *others) in experiments.items():
        events = sorted(first.clusterings)
        for t in events if len(events) <= MAX_EVENTS else events[-1:]:
            title = style.for_figure(f"{first.label if others else name}, {when(t)}", 200)
            clustering = read_clustering(first.clusterings[t])
            stem = f"{file_name(name)}_round_{t}"
            for kind, draw in clustering_figures(clustering).items():
                yield f"{stem}_{kind}", draw(clustering, title, first.value(THRESHOLD))
