"""What many clients cost: rounds, a clustering pass and distances of updates, by number of clients.

    python benchmarks/scale.py                                        small, on a CPU
    python benchmarks/scale.py --clients 1000 2000 5000 10000 --rounds 30 > scale.jsonl
    python benchmarks/scale.py --what clustering --clients 2000       FL+HC's pass over all clients
    python benchmarks/scale.py --what distances --clients 10000 --device cuda --models mlp200 \\
        flhc_cnn
    python benchmarks/scale.py --plot docs/images/scaling.svg --read scale.jsonl

Each measurement runs in a process of its own and is one JSON line: seconds, and the peak memory of
the process (of the GPU for distances on one, without the updates themselves). Rounds have 100
clients of 60 images each, MLP-200, whatever the number of clients there are.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

METHODS = ("fedavg", "scaffold", "local")
METRICS = ("l1", "l2", "cosine")
COHORT, IMAGES = 100, 60
COLUMNS = 4096  # of the updates drawn at a time

Found = dict[str, Any]  # Any: JSON


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ["rounds", "clustering", "distances"]
    parser.add_argument("--what", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--clients", nargs="+", type=int, default=[200, 400])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--models", nargs="+", default=["mlp200"], help="of distances")
    parser.add_argument("--metrics", nargs="+", default=list(METRICS), choices=METRICS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", type=Path, help="draw what --read holds")
    parser.add_argument("--read", nargs="+", type=Path, default=[])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(json.loads(given.one))), flush=True)
    elif given.plot:
        lines = [line for file in given.read for line in file.read_text().splitlines()]
        plot([json.loads(line) for line in lines if line.startswith("{")], given.plot)
    else:
        for case in cases(given):
            command = [sys.executable, __file__, "--one", json.dumps(case)]
            subprocess.run(command, check=True)


def cases(given: argparse.Namespace) -> list[Found]:
    found: list[Found] = []
    for clients in given.clients:
        each = {"clients": clients, "device": given.device, "rounds": given.rounds}
        if "rounds" in given.what:
            found += [{"what": "rounds", "method": m, **each} for m in given.methods]
        if "clustering" in given.what:
            found.append({"what": "clustering", "method": "flhc", **each})
        if "distances" in given.what:
            found += [
                {"what": "distances", "model": model, "metric": metric, **each}
                for model in given.models
                for metric in given.metrics
            ]
    return found


def measure(case: Found) -> Found:
    measured = distances(case) if case["what"] == "distances" else run(case)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**case, **{k: round(v, 4) for k, v in measured.items()}, "peak_gib": round(peak, 2)}


def run(case: Found) -> dict[str, float]:
    """Rounds of a method, or a round of FL+HC with its clustering pass."""
    from flray.config.experiment import parse_experiment
    from flray.records.run_directory import RunDirectory
    from flray.runs.launch import run_experiment

    clients, is_pass = case["clients"], case["what"] == "clustering"
    rounds = 1 if is_pass else case["rounds"]
    experiment = {
        "dataset": {"name": "synthetic", "num_train": clients * IMAGES, "num_test": clients},
        "split": {"name": "iid", "clients": clients, "validation": 0.0},
        "model": "mlp200",
        "algorithm": {"name": "flhc", "rounds_before": 1} if is_pass else case["method"],
        "train": {"lr": 0.01, "batch_size": 10},
        "participation": min(1.0, COHORT / clients),
        "rounds": rounds,
        "evaluate": {"every": rounds},
        "execution": {"device": case["device"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        run_experiment(parse_experiment(experiment), Path(folder))
        found = RunDirectory(folder).rounds()
    last = found.iloc[-1]
    if is_pass:
        return {"train_everybody_s": last["seconds_probe"], "round_s": last["seconds"]}
    later = found.iloc[1:-1] if len(found) > 2 else found  # the last is evaluated
    return {
        "round_s": later["seconds"].median(),
        "checkpoint_s": later["seconds_checkpoint"].median(),
        "evaluate_s": last["seconds_evaluate"],
    }


def distances(case: Found) -> dict[str, float]:
    """Distances of random updates of so many clients, which lie on the device."""
    import numpy as np
    import torch

    from flray.clustering import DISTANCES
    from flray.clustering.points import Points
    from flray.models import MODELS

    module = MODELS[case["model"]](image_shape=(1, 28, 28), num_classes=10)
    num_params = sum(p.numel() for p in module.parameters())
    on_gpu = case["device"] != "cpu"
    updates = torch.empty(case["clients"], num_params, device=case["device"])
    for part in torch.split(updates, COLUMNS, dim=1):
        part.normal_(std=0.01)
    points = Points.vectors(np.arange(case["clients"]), updates)
    distance = DISTANCES[case["metric"]]()
    if on_gpu:
        distance(Points.vectors(np.arange(2), updates[:2]))  # starts cuBLAS
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    begin = perf_counter()
    distance(points)
    seconds = {"seconds": perf_counter() - begin, "params": num_params}
    if on_gpu:
        seconds["gpu_beside_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return seconds


def plot(found: list[Found], file: Path) -> None:
    """Seconds of a round and peak memory against the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rounds = [each for each in found if each["what"] == "rounds"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for method in dict.fromkeys(each["method"] for each in rounds):
        own = sorted((e for e in rounds if e["method"] == method), key=lambda e: e["clients"])
        clients = [e["clients"] for e in own]
        left.plot(clients, [e["round_s"] for e in own], "o-", label=method)
        right.plot(clients, [e["peak_gib"] for e in own], "o-", label=method)
    for axes, title in ((left, "seconds of a round of 100 clients"), (right, "peak memory, GiB")):
        axes.set(xlabel="clients", title=title, xscale="log", ylim=(0, None))
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


if __name__ == "__main__":
    main()
