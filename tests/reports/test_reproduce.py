"""The script that runs the sweeps behind the pages of results again."""

import importlib.util
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from flray.reports.published import find_table
from flray.sweeps.rows import known_and_examples
from flray.sweeps.space import read_space

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SWEEPS = yaml.safe_load((RESULTS / "sweeps.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reproduce() -> Iterator[ModuleType]:
    """The script docs/results/reproduce.py."""
    spec = importlib.util.spec_from_file_location("reproduce", RESULTS / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "reproduce", module)  # its dataclasses look there
        spec.loader.exec_module(module)
        yield module


LONG = [pytest.mark.long]  # many rows over several datasets


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG * name.startswith("benchmark_")) for name in SWEEPS]
)
def test_every_sweep_that_is_listed_can_begin(reproduce, name, tmp_path) -> None:
    sweep = reproduce.sweeps_of([name], [0], tmp_path)[0]
    assert any(known_and_examples(read_space(Path(sweep.space), sweep.typed)))
    if table := SWEEPS[name].get("table"):
        assert find_table(table).rows


def test_sweeps_are_resumed_packed_and_tabled(reproduce, tmp_path, monkeypatch) -> None:
    """A pretended sweep needs two calls: the first one leaves a row."""
    called: list[list[str]] = []

    def pretend(arguments, output) -> None:
        called.append(arguments)
        if arguments[0] == "table":
            output.write("the table")
            return
        folder = Path(arguments[arguments.index("--out") + 1])
        ended = "0001" if "--resume" in arguments else "0000"
        for file in (
            "summary.json",
            "clients.parquet",
            "../0002/config.yaml",
            "../../rows.parquet",
        ):
            path = folder / "runs" / ended / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        (folder / "space.yaml").write_text("{}")
        unfinished = int("--resume" not in arguments)
        (folder / "sweep.json").write_text(json.dumps({"unfinished": unfinished}))

    monkeypatch.setattr(reproduce, "flray", pretend)
    monkeypatch.setattr(reproduce, "TRIES", 1)
    typed = ["reproduce", "flis_table4", "--seeds", "1", "--minutes", "60", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", typed)
    archive = tmp_path / "flis_table4" / "seed_1.tar.xz"
    reproduce.main()
    assert {"seed=1", "--max-minutes"} < set(called[0])
    assert packed_runs(archive) == ["runs/0000", "runs/0000/summary.json"]
    reproduce.main()
    assert "--resume" in called[2]
    both = [f"runs/{row}{file}" for row in ("0000", "0001") for file in ("", "/summary.json")]
    assert packed_runs(archive) == both
    assert (tmp_path / "flis_table4" / "table.md").read_text() == "the table"
    reproduce.main()
    assert [arguments[0] for arguments in called] == ["sweep", "table", "sweep", "table", "table"]
    called.clear()
    monkeypatch.setattr(reproduce, "TRIES", 2)
    monkeypatch.setattr(sys, "argv", [*typed[:3], "2", *typed[4:]])
    reproduce.main()  # with another seed: the row that was left is tried again at once
    assert [arguments[0] for arguments in called] == ["sweep", "sweep", "table"]
    assert ["--resume" in arguments for arguments in called] == [False, True, False]


def packed_runs(archive: Path) -> list[str]:
    with tarfile.open(archive) as packed:
        return sorted(name for name in packed.getnames() if name.startswith("runs/"))


def test_a_sweep_that_is_not_listed_is_refused(reproduce, tmp_path) -> None:
    with pytest.raises(SystemExit, match="unknown: flhc_table9; known: flhc_table1, flhc_table2"):
        reproduce.sweeps_of(["flhc_table9"], [0], tmp_path)
