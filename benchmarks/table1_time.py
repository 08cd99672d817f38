"""Where the time of a sweep's rows goes: training, evaluation, checkpoints, waiting and the rest.

FL+HC's Table I, 20 rows side by side, on a GPU, and a part of the benchmark on any machine:

    flray sweep tune_spaces/flhc_table1.yaml evaluate.every=5 concurrency=14 --out table1
    flray sweep clustered_benchmark_digits --splits label_swap space.seeds=1 --out digits

    python benchmarks/table1_time.py digits --figure digits.svg

One line per method, or per setting of a space without methods, and one for all: rows, and seconds
of their trials by phase, per row. `train` is what the row itself trained; shared rounds count in
the row that trained them. `waiting` is for rows that train what this one needs too; `other` is what
no phase accounts for: the method's work on the server, start, records. `cpu` are CPU seconds of the
trial's process, which do not depend on how busy the machine is. The last line compares with the
seconds of the sweep.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from flray.reports.style import METHODS
from flray.sweeps.folder import read_report, read_rows
from flray.sweeps.rows import SweepRow

SHOWN = {"train": ("train", "probe"), "evaluate": ("evaluate",), "checkpoint": ("checkpoint",)}
WAITING = "waiting"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--figure", type=Path, help="SVG, PNG or PDF to draw")
    given = parser.parse_args()
    rows = list(read_rows(given.folder).values())
    names = [str(row.overrides.get("method", settings(row))) for row in rows]
    of_rows = pd.DataFrame([phases(row) for row in rows], names)
    table = of_rows.groupby(level=0, sort=False).mean()
    table.loc["all"] = of_rows.mean()
    table.insert(0, "rows", [*pd.Series(names).value_counts(sort=False), len(rows)])
    print(table.round(3).to_string())
    seconds, total = read_report(given.folder)["seconds"], of_rows["total"].sum()
    print(f"{total:.1f} s of trials in {seconds:.1f} s: {total / seconds:.2f} rows at a time")
    if given.figure:
        draw(table.drop(columns=["rows", "total", "cpu"])).savefig(
            given.figure, bbox_inches="tight"
        )


def settings(row: SweepRow) -> str:
    """What tells a row from others, with the last part of each key."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row.overrides.items())


def phases(row: SweepRow) -> dict[str, float]:
    """Seconds of a row's trials by phase, which sum to `total`, and CPU seconds."""
    spent = row.seconds
    shown = {name: sum(spent.get(p, 0.0) for p in parts) for name, parts in SHOWN.items()}
    shown[WAITING] = spent.get(WAITING, 0.0)
    total = spent.get("total", 0.0)
    other = total - sum(shown.values())
    return {**shown, "other": other, "total": total, "cpu": spent.get("cpu", 0.0)}


def draw(table: pd.DataFrame) -> plt.Figure:
    """Stacked bars, one for each line of the table."""
    figure, axes = plt.subplots(figsize=(7, 1 + 0.22 * len(table)))
    table.iloc[::-1].plot.barh(stacked=True, ax=axes, color=METHODS[: len(table.columns)])
    axes.set_xlabel("seconds per row")
    axes.legend(
        frameon=False, ncols=len(table.columns), loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    return figure


if __name__ == "__main__":
    main()
