"""`flray compare`: tables and figures of chosen runs."""

import csv
import io
import sys
from pathlib import Path

import pytest
from recorded import DISTANCE, LINKAGE, SUMMARY, sweep_rows, write_run, write_sweep

from flray.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path):
    """Run `flray compare` in a folder with runs of FedAvg and FL+HC: (exit code, out, err)."""
    monkeypatch.chdir(tmp_path)
    for algorithm, accuracy in (("flhc", 0.8), ("fedavg", 0.6)):
        for seed in (0, 1):
            worst = 0.5 + 0.1 * seed
            numbers = {"accuracy_mean": accuracy + 0.1 * seed, "accuracy_worst": worst}
            summary = {**SUMMARY, **numbers, "ari": 0.25 + 0.5 * seed}
            folder = tmp_path / "runs" / algorithm / f"seed_{seed}"
            write_run(folder, (), summary, seed=seed, algorithm={"name": algorithm})

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flray", "compare", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_what_to_type_for_an_unfinished_run_or_sweep(compare) -> None:
    write_run(Path("my run"), (), None)
    here = Path.cwd()
    code, _, err = compare("my run")
    assert (code, f"go on with: flray run --out '{here}/my run' --resume" in err) == (2, True)
    rows = [row | {"status": "unfinished"} for row in sweep_rows()]
    write_sweep(Path("my sweep"), rows)
    assert f"flray sweep --out '{here}/my sweep' --resume" in compare("my sweep")[2]


def test_ranks_are_of_sweeps_over_methods(compare) -> None:
    code, _, err = compare("runs", "--figure", "ranks.pdf", "--kind", "ranks")
    assert (code, "--kind ranks is a figure of a sweep over methods" in err) == (2, True)
    assert "known for runs: accuracy, last_trained, clients, efficiency" in err
    code, _, err = compare("runs", "--figure", "runs.pdf", "--protocol", "tuned")
    assert (code, "--protocol tuned is for a sweep over methods" in err) == (2, True)


def test_a_row_names_its_algorithm_once(compare) -> None:
    """The baseline sets `algorithm`, the other row `algorithm.name`: columns have both."""
    keys = ({"algorithm.name": "flhc"}, {"algorithm.name": None})
    rows = [
        {**SUMMARY, **key, "algorithm": name, "seed": 0, "status": "done", "folder": f"runs/{name}"}
        for key, name in zip(keys, ("flhc", "fedavg"), strict=True)
    ]
    write_sweep(Path("both"), rows, baseline=[{"algorithm": "fedavg"}])
    for name in ("flhc", "fedavg"):
        write_run(Path("both/runs") / name, (), algorithm={"name": name})
    names = [
        row["experiment"]
        for row in csv.DictReader(io.StringIO(compare("both", "--format", "csv")[1]))
    ]
    assert sorted(names) == ["fedavg", "flhc"]


def test_the_table_has_means_spreads_and_differences_to_fedavg(compare) -> None:
    """Accuracies 0.8 and 0.9, worst clients 0.5 and 0.6: spreads of 0.1 / sqrt(2)."""
    code, out, _ = compare("runs/flhc", "runs/fedavg", "--format", "csv")
    flhc, fedavg = csv.DictReader(io.StringIO(out))
    assert (code, flhc["experiment"], fedavg["experiment"]) == (0, "flhc", "fedavg")
    expected = {
        "seeds": 2,
        "test accuracy (%)": 85,
        "test accuracy (%) ±": 7.0711,
        "vs fedavg": 20,
        "worst client (%)": 55,
        "worst client (%) ±": 7.0711,
        "ARI": 0.5,
        "clusters": 2,
        "sent up (MB)": 3,
    }
    assert {key: float(flhc[key]) for key in expected} == pytest.approx(expected, abs=1e-4)
    assert fedavg["vs fedavg"] == ""


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("rich", ["vs fedavg", "85.00±7.07", "0.50±0.35"]),
        ("md", ["| flhc | **85.00** ± 7.07 | +20.00 ± 0.00 |", "- ± is the standard deviation"]),
        ("latex", [r"flhc & 85.00 $\pm$ 7.07 & +20.00 $\pm$ 0.00 &", r"\bottomrule"]),
    ],
)
def test_every_format_has_the_same_numbers(compare, form: str, words: list[str]) -> None:
    code, out, _ = compare("runs", "--format", form)
    assert code == 0
    assert all(each in out for each in words)


@pytest.mark.parametrize(
    ("suffix", "first"),
    [
        ("pdf", b"%PDF"),
        pytest.param("svg", b"<?xml", marks=pytest.mark.long),
        pytest.param("png", b"\x89PNG", marks=pytest.mark.long),
    ],
)
def test_the_figure_is_a_file_that_the_same_runs_give_again(
    compare, tmp_path: Path, suffix: str, first: bytes
) -> None:
    files = [tmp_path / "new" / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        code, out, err = compare("runs", "--format", "csv", "--figure", str(file))
        assert code == 0
        assert "figure: " in err
        assert "figure" not in out  # which is the table alone
    assert files[0].read_bytes().startswith(first)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_figure_of_another_format_is_refused_before_anything_is_shown(compare) -> None:
    code, out, err = compare("runs", "--figure", "x.jpg")
    assert (code, out) == (2, "")
    assert "one of .pdf, .svg, .png, got 'x.jpg'" in err


def test_unfinished_runs_are_named_and_left_out(compare, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "later", (), None)
    code, out, err = compare("runs", "--format", "csv")
    assert code == 0
    assert "left out, since it is not finished: later, seed 0" in err
    assert len(out.splitlines()) == 3


def test_rows_of_a_sweep_are_compared_by_their_settings(compare, tmp_path: Path) -> None:
    rows = [row for row in sweep_rows() if row[DISTANCE] == "l1" and row[LINKAGE] == "ward"]
    folder = write_sweep(tmp_path / "s", [row | {"folder": row["run"]} for row in rows])
    for row in rows:
        write_run(folder / row["run"], (), SUMMARY, seed=row["seed"])
    _, out, _ = compare("s", "--format", "csv")
    found = [(row["experiment"], row["seeds"]) for row in csv.DictReader(io.StringIO(out))]
    assert found == [(f"threshold {value}", "2") for value in ("0.1", "1", "10")]
