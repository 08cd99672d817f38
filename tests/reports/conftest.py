"""Pages for several tests: one with everything on it, drawn once, and pages without figures."""

from pathlib import Path

import pytest
from recorded import LINKAGE, sweep_rows, write_run, write_sweep

from flray.reports.page import write_page


@pytest.fixture(scope="session")
def drawn_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one with a clustering, and a sweep; names hold what must be escaped."""
    folder = tmp_path_factory.mktemp("drawn")
    write_run(folder / '<b>&"x $y_$', dataset={"name": "<script>alert(1)</script>"})
    write_run(folder / "b", events=())
    rows = [row | {LINKAGE: f"${row[LINKAGE]}_$ <&>"} for row in sweep_rows()]
    write_sweep(folder / "s", rows)
    write_page([folder], folder / "page.html")
    return folder / "page.html"


@pytest.fixture
def empty_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are empty: making and drawing them takes most of the time of a page."""
    monkeypatch.setattr("flray.reports.embed.figure_source", lambda *_: ("data:,", 1))
