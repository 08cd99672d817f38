"""`flray report`: one page of a run, several runs or a sweep."""

from pathlib import Path

from rich.console import Console

from flray.files import is_plain
from flray.reports.page import write_page


def write_report(folders: tuple[Path, ...], out: Path | None, console: Console) -> None:
    """Write the page of the folders, into the first of them unless told where, and say so."""
    path = write_page(folders, out)
    if is_plain(path):  # the page may be on its way to standard output
        size = path.stat().st_size / 1e6
        console.print(f"report: {path} ({size:.1f} MB)", soft_wrap=True, markup=False)
