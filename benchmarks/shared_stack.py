"""Many runs on one GPU: one after another in one process, and side by side as `flray run` does it.

    python benchmarks/shared_stack.py            18 runs: 3 methods x 2 scenarios x 3 seeds
    python benchmarks/shared_stack.py --rounds 2 --seeds 1 --scenarios 1 --together 2 \\
        execution.device=cpu

The runs are FLT's scenarios on MNIST (FLRAY_DATA). Prints seconds of both, the ratio, how much
longer the training of a round takes side by side, and whether all hashes of final models agree;
exits with 1 if they do not. Imports and figures are not counted, everything else is: data, graphs,
records. With `--seeds-alone 1` only the first seed of each is run one after another, and its
seconds count for all seeds.
key=value sets other keys of all experiments.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pandas as pd

METHODS = ("fedavg", "local", "pca")  # `flt` needs an encoder: flray pretrain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--scenarios", nargs="+", default=["1", "2"], choices=["1", "2"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seeds-alone", type=int, help="[default: all of them]")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--together", type=int, help="runs at a time  [default: that of flray run]")
    parser.add_argument("--only", choices=["alone", "together"], help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    if arguments.only:
        print(json.dumps(measure(arguments)), flush=True)
        return
    found = {}
    for how in ("alone", "together"):  # each in a process of its own: a fork needs one without CUDA
        command = [sys.executable, __file__, "--only", how, *sys.argv[1:]]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[how] = json.loads(ended.stdout.splitlines()[-1])
        shown = {key: value for key, value in found[how].items() if key != "hashes"}
        print(how, json.dumps(shown), flush=True)
    alone, together = found["alone"], found["together"]
    are_equal = alone["hashes"].items() <= together["hashes"].items()
    all_alone = alone["seconds"] * len(together["hashes"]) / len(alone["hashes"])
    result = {
        "runs": len(together["hashes"]),
        "run_alone": len(alone["hashes"]),
        "alone_s": round(all_alone, 2),
        "together_s": together["seconds"],
        "ratio": round(all_alone / together["seconds"], 2),
        "wait_per_round_s": round(together["train"] - alone["train"], 4),
        "hashes_equal": are_equal,
    }
    print(json.dumps(result), flush=True)
    sys.exit(0 if are_equal else 1)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:  # Any: JSON
    from flray.config.experiment import parse_experiment, read_yaml
    from flray.config.overrides import override
    from flray.records.run_directory import RunDirectory
    from flray.runs.conduct import Monitor
    from flray.runs.launch import run_experiment
    from flray.runs.together import ForkedRun, run_together, runs_at_a_time

    names = [
        f"flt/mnist_scenario{s}" + ("" if method == "flt" else f"_{method}")
        for s in arguments.scenarios
        for method in arguments.methods
    ]
    told = [f"rounds={arguments.rounds}", *arguments.overrides]
    is_alone = arguments.only == "alone"
    seeds = (arguments.seeds_alone if is_alone else None) or arguments.seeds
    runs = [(name, seed) for name in names for seed in range(seeds)]
    experiments = [
        parse_experiment(override(read_yaml(f"experiments/{name}.yaml"), [*told, f"seed={seed}"]))
        for name, seed in runs
    ]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            ForkedRun(experiment, Path(folder) / str(number))
            for number, experiment in enumerate(experiments)
        ]
        at_a_time = 1
        begin = perf_counter()
        ended: dict[int, list[float]] = {number: [] for number in range(len(jobs))}  # rounds

        def note(number: int, _row: dict[str, Any]) -> None:
            ended[number].append(perf_counter() - begin)

        if is_alone:
            for number, job in enumerate(jobs):
                monitor = Monitor(partial(note, number))
                run_experiment(job.experiment, job.out, monitor=monitor)
        else:
            at_a_time = runs_at_a_time(experiments, arguments.together)
            run_together(jobs, at_a_time, note, lambda: False)
        seconds = perf_counter() - begin
        directories = [RunDirectory(job.out) for job in jobs]
        rounds = [directory.rounds().iloc[1:] for directory in directories]
        all_rounds = pd.concat(rounds)  # a method without mixing has no such column
        hashes = {
            f"{name} {seed}": (directory.summary() or {}).get("params_sha256")
            for (name, seed), directory in zip(runs, directories, strict=True)
        }
    return {
        "at_a_time": at_a_time,
        "seconds": round(seconds, 2),
        "first_round_s": [round(each[0], 1) for each in ended.values()],
        "last_round_s": [round(each[-1], 1) for each in ended.values()],
        "round": round(median(float(each["seconds"].median()) for each in rounds), 4),
        "train": round(median(float(each["seconds_train"].median()) for each in rounds), 4),
        "evaluate": round(median(float(each["seconds_evaluate"].median()) for each in rounds), 4),
        "phases": {
            name: round(float(all_rounds[name].sum()) / len(rounds), 2)
            for name in all_rounds.columns
            if name.startswith("seconds")
        },
        "hashes": hashes,
    }


if __name__ == "__main__":
    main()
