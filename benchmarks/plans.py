"""What `flray plan` predicts beside what the run takes: seconds of processor time, and memory.

    python benchmarks/plans.py [--cases demo flhc_rotation ifca scaffold fedavg_100k flhc_100k]

Cases of 100,000 clients take minutes and up to 4 GiB, `ifca` and `scaffold` need MNIST. Prediction
and run each have a process of their own, on one thread, in which the clock counts processor time:
other work on the machine hardly changes it. A short run comes before, because imports are part of
neither. One row per case.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MANY = [
    "dataset={name: synthetic, num_train: 2000000, num_test: 100000, size: 8}",
    "split={name: iid, clients: 100000, validation: 0.0}",
    "model=mlp200",
    "train={lr: 0.1}",
    "evaluate={every: 5, clients: 1000}",
]
SKETCHED = "{embed: {name: sketch, dim: 256}, partition: {name: two_level, threshold: 3.0}}"
FLHC = f"algorithm={{name: flhc, rounds_before: 2, clustering: {SKETCHED}}}"
CASES = {  # a shipped experiment, and changes
    "demo": ["demo/flhc"],
    "flhc_rotation": ["demo/flhc", "split={name: rotation, clients: 24}", "participation=0.25"],
    "ifca": ["flt/mnist_scenario1_fedavg", "algorithm=ifca", "rounds=6", "evaluate.every=2"],
    "scaffold": [
        *("flhc/mnist_label_swap", "algorithm=scaffold"),
        *("rounds=2", "train.epochs=1", "evaluate.every=2"),
    ],
    "fedavg_100k": ["demo/fedavg", *MANY, "algorithm=fedavg", "participation=0.01", "rounds=20"],
    "flhc_100k": ["demo/fedavg", *MANY, FLHC, "participation=0.001", "rounds=10"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=["demo", "flhc_rotation", "ifca"], choices=list(CASES)
    )
    parser.add_argument("--part", choices=["predict", "run"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        return print(json.dumps(measured(arguments.cases[0], arguments.part)))
    print("| case | predicted | measured | predicted memory | measured |\n|---|---|---|---|---|")
    for case in arguments.cases:
        command = [sys.executable, __file__, "--cases", case, "--part"]
        outputs = [subprocess.check_output([*command, part]) for part in ("predict", "run")]
        pairs = zip(*(json.loads(output.splitlines()[-1]) for output in outputs), strict=True)
        seconds, memory = ([f"{value:.3g}" for value in pair] for pair in pairs)
        print(f"| {case} | {' s | '.join(seconds)} s | {' GiB | '.join(memory)} GiB |", flush=True)


def measured(case: str, part: str) -> tuple[float, float]:
    """Seconds of processor time and GiB of memory, predicted or of the run."""
    time.perf_counter = time.process_time  # before flray takes it
    from flray.config.experiment import parse_experiment, read_yaml
    from flray.config.overrides import override
    from flray.forecast.forecast import forecast
    from flray.runs.launch import run_experiment

    name, *changes = CASES[case]
    one_thread = ["execution.device=cpu", "execution.threads=1"]
    experiment = parse_experiment(override(read_yaml(name), [*changes, *one_thread]))
    with tempfile.TemporaryDirectory() as folder:
        run_experiment(parse_experiment(read_yaml(CASES["demo"][0])), Path(folder) / "first")
        if part == "predict":
            predicted = forecast(experiment)
            return predicted.total_s, predicted.memory_per_process / 2**30
        begin = time.process_time()
        run_experiment(experiment, Path(folder) / "run")
        seconds = time.process_time() - begin
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
