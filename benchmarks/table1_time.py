"""Where the time of many runs goes: the recorded seconds of all runs below a folder, by phase.

FL+HC's Table I, 20 rows side by side, on a GPU, and a toy version of it on any machine:

    flray sweep tune_spaces/flhc_table1.yaml evaluate.every=5 concurrency=7 --out table1
    flray run experiments/demo/fedavg.yaml experiments/demo/flhc.yaml --out toy

    python benchmarks/table1_time.py table1

One line per run and one for all: seconds of its rounds, and the percentage of each phase. `other`
is what no phase accounts for: sampling, records, and waiting for the writer or the GPU.
"""

import argparse
from pathlib import Path

import pandas as pd

from flray.records.run_directory import RunDirectory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = {
        str(file.parent.relative_to(folder)): phases(file.parent)
        for file in sorted(folder.rglob("rounds.parquet"))
    }
    table = pd.DataFrame(found).T.fillna(0.0)
    table.loc["all"] = table.sum()
    shares = table.drop(columns="seconds").div(table["seconds"], axis=0).mul(100).round(1)
    print(shares.assign(seconds=table["seconds"].round(2)).to_string())


def phases(run: Path) -> pd.Series:
    """Seconds of a run's rounds, by phase."""
    columns = RunDirectory(run).rounds().filter(regex="^seconds").fillna(0.0).sum()
    of_phases = columns.drop("seconds").rename(lambda name: name.removeprefix("seconds_"))
    of_phases = of_phases.drop("probe", errors="ignore")  # a part of the signatures
    other = columns["seconds"] - of_phases.sum()
    return pd.concat([of_phases, pd.Series({"other": other, "seconds": columns["seconds"]})])


if __name__ == "__main__":
    main()
