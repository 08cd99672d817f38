"""Seconds per round of whole runs, through the server loop with records and checkpoints.

    python benchmarks/rounds.py [--cases A B600 C] [--where inline 1x1 10x0.1] [--rounds N]
        [key=value ...]

| case | model | clients | cohort | images each | steps per round |
|------|-------|---------|--------|-------------|-----------------|
| A    | MLP, 159,010 parameters | 100 | 20 | 600 | 1,200 |
| B    | CNN, 1,663,370 | 100 | 20 | 120 | 240 |
| B600 | CNN | 100 | 20 | 600 | 1,200 |
| C    | MLP | 1,000 | 100 | 60 | 600 |

`--where inline` runs in process, `N` on N client actors of one CPU each, `NxG` on N actors of G GPU
each. One JSON line per run: the median of rounds that are neither first nor last (the last is
evaluated) and of its phases, CPU seconds of this process per round (which other work on the machine
hardly changes), the seconds from the start of the process to the end of round 1, and the final
model: its hash, and its dot product with a fixed random vector, which may differ in the last digits
between devices. key=value sets other keys of the experiment.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import process_time, time
from typing import Any

CASES = {  # model, clients, cohort, images of each client, rounds
    "A": ("mlp200", 100, 20, 600, 10),
    "B": ("flhc_cnn", 100, 20, 120, 4),
    "B600": ("flhc_cnn", 100, 20, 600, 6),
    "C": ("mlp200", 1000, 100, 60, 10),
}
PHASES = ("train", "mix", "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["A", "B", "C"], choices=list(CASES))
    parser.add_argument("--where", nargs="+", default=["inline", "2"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    chosen = [(case, where) for case in arguments.cases for where in arguments.where]
    if len(chosen) == 1:
        return measure(*chosen[0], arguments.rounds, arguments.overrides)
    rest = ["--rounds", str(arguments.rounds)] if arguments.rounds else []
    for case, where in chosen:  # each in a process of its own, so that every start is a cold one
        one = ["--cases", case, "--where", where, *rest, *arguments.overrides]
        subprocess.run([sys.executable, __file__, *one], check=True)
    return None


def experiment(case: str, where: str, num_rounds: int | None) -> dict[str, Any]:  # Any: YAML
    model, clients, cohort, images, rounds = CASES[case]
    num_rounds = num_rounds or rounds
    return {
        "dataset": {"name": "synthetic", "num_train": clients * images, "num_test": clients},
        "split": {"name": "iid", "clients": clients, "validation": 0.0},
        "model": model,
        "algorithm": "fedavg",
        "train": {"lr": 0.01, "batch_size": 10},
        "participation": cohort / clients,
        "rounds": num_rounds,
        "evaluate": {"every": num_rounds},
        "execution": execution(where),
    }


def execution(where: str) -> dict[str, Any]:  # Any: YAML
    if where == "inline":
        return {}
    count, _, gpus = where.partition("x")
    return {"executor": "ray", "actors": {"count": int(count), "num_gpus": float(gpus or 0)}}


def measure(case: str, where: str, num_rounds: int | None, overrides: list[str]) -> None:
    begin, load = time(), os.getloadavg()[0]
    # Here: importing torch and Lightning is part of the start.
    import numpy as np

    from flray.config.experiment import parse_experiment
    from flray.config.overrides import override
    from flray.records.run_directory import RunDirectory
    from flray.runs.conduct import Monitor
    from flray.runs.launch import run_experiment

    ends: list[tuple[float, float]] = []
    chosen = parse_experiment(override(experiment(case, where, num_rounds), overrides))
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(lambda _: ends.append((time(), process_time())))
        summary = run_experiment(chosen, Path(folder), monitor=monitor)
        rounds = RunDirectory(folder).rounds()
        probe = dot_product(Path(folder))
    assert summary is not None  # nobody stopped it
    later = rounds.iloc[1:-1] if len(rounds) > 2 else rounds  # the last is evaluated
    medians = {n: later[f"seconds_{n}"].median() for n in PHASES if f"seconds_{n}" in later}
    found = {
        "case": case,
        "where": where,
        "s_per_round": round(float(later["seconds"].median()), 4),
        **{name: round(float(value), 4) for name, value in medians.items()},
        "cpu_s_per_round": round(median(np.diff([cpu for _, cpu in ends])[:-1]), 4),
        "first_round_s": round(ends[0][0] - begin, 1),
        "sha256": summary["params_sha256"][:12],
        "w_probe": round(probe, 5),
        "block": summary["block"],
        "load_before": round(load, 1),
    }
    print(json.dumps(found), flush=True)


def dot_product(run: Path) -> float:
    """Of the final model and a fixed random vector."""
    import numpy as np

    from flray.clustering.update import flatten
    from flray.records.checkpoint import CheckpointStore

    found = CheckpointStore(run / "checkpoints").load_latest()
    assert found is not None
    w = flatten(found.state.bank.params)[0].double().numpy()
    return float(w @ np.random.default_rng(6).standard_normal(len(w)))


if __name__ == "__main__":
    main()
