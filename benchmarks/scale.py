"""What many clients cost: rounds, a clustering pass and distances of updates, by number of clients.

    python benchmarks/scale.py                                        small, on a CPU
    python benchmarks/scale.py --what rounds clustering --images 20 --rounds 30 \\
        --clients 100 1000 10000 100000 > scale.jsonl                 the curve of docs/scaling.md
    python benchmarks/scale.py --what clustering --clients 2000       FL+HC's pass over all clients
    python benchmarks/scale.py --what distances --clients 10000 --device cuda --models mlp200 \\
        flhc_cnn
    python benchmarks/scale.py --plot docs/images/scaling.svg --read scale.jsonl

Each measurement runs in a process of its own and is one JSON line: seconds, and the peak memory of
the process (of the GPU for distances on one, without the updates themselves). Rounds have 100
clients of 60 images each, MLP-200, whatever the number of clients there are; `cpu_s` is the
processor time of a round, which other programs on the machine change less than its seconds.
`dealing` is how long it takes to split the examples among clients, iid and by swapped labels.
`clustering` is FL+HC without D: updates sketched to 256 numbers, groups of groups (two_level), one
round, its evaluation on all clients, and the page of the run.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

METHODS = ("fedavg", "scaffold", "local", "ifca", "flhc")
# Methods with keys. FL+HC is measured after its clustering: clients are clustered by known groups.
ALGORITHMS: dict[str, Any] = {
    "ifca": {"name": "ifca", "number": 3},
    "flhc": {
        "name": "flhc",
        "rounds_before": 1,
        "cohort_size": "joint",
        "clustering": {"partition": "given"},
    },
}
WITHOUT_D: dict[str, Any] = {
    "embed": {"name": "sketch", "dim": 256},
    "partition": {"name": "two_level", "groups": 1000, "number": 10},
}
METRICS = ("l1", "l2", "cosine")
COHORT, SAMPLE = 100, 1000
COLUMNS = 4096  # of the updates drawn at a time

Found = dict[str, Any]  # Any: JSON


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ["rounds", "clustering", "dealing", "distances"]
    parser.add_argument("--what", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--clients", nargs="+", type=int, default=[200, 400])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--images", type=int, default=60, help="of a client")
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
        each = {
            "clients": clients,
            "device": given.device,
            "rounds": given.rounds,
            "images": given.images,
        }
        if "rounds" in given.what:
            found += [{"what": "rounds", "method": m, **each} for m in given.methods]
        if "clustering" in given.what:
            found.append({"what": "clustering", "method": "flhc", **each})
        if "dealing" in given.what:
            found += [{"what": "dealing", "method": m, **each} for m in ("fedavg", "flhc")]
        if "distances" in given.what:
            found += [
                {"what": "distances", "model": model, "metric": metric, **each}
                for model in given.models
                for metric in given.metrics
            ]
    return found


def measure(case: Found) -> Found:
    measured = {"distances": distances, "dealing": dealing}.get(case["what"], run)(case)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**case, **{k: round(v, 4) for k, v in measured.items()}, "peak_gib": round(peak, 2)}


def run(case: Found) -> dict[str, float]:
    """Rounds of a method, or a round of FL+HC with its clustering pass."""
    import flray
    from flray.config.experiment import parse_experiment
    from flray.records.run_directory import RunDirectory
    from flray.runs.conduct import Monitor
    from flray.runs.launch import run_experiment

    cpu = [process_time()]
    with tempfile.TemporaryDirectory() as folder:
        watch = Monitor(lambda _row: cpu.append(process_time()), lambda: False)
        run_experiment(parse_experiment(experiment(case)), Path(folder), False, watch)
        rounds = RunDirectory(folder).rounds()
        begin = perf_counter()
        if case["what"] == "clustering":
            flray.report(folder)
        report_s = perf_counter() - begin
    last = rounds.iloc[-1]
    if case["what"] == "clustering":
        return {
            "train_everybody_s": last["seconds_probe"],
            "sketch_s": last["seconds_signature"] - last["seconds_probe"],
            "cluster_s": last["seconds_cluster"],
            "evaluate_s": last["seconds_evaluate"],
            "report_s": report_s,
            "cpu_s": cpu[-1] - cpu[0],
        }
    later = rounds.iloc[1:-2] if len(rounds) > 3 else rounds  # the last two are evaluated
    spent = [after - before for before, after in pairwise(cpu[1:])]  # of rounds 2, 3, ...
    return {
        "start_cpu_s": cpu[1] - cpu[0],  # data dealt, first round and its clustering
        "round_s": later["seconds"].median(),
        "cpu_s": median(spent[:-2] or spent),
        "train_s": later["seconds_train"].median(),
        "mix_s": later["seconds_mix"].median() if "seconds_mix" in later else 0.0,
        "checkpoint_s": later["seconds_checkpoint"].median(),
        "evaluate_sample_s": rounds["seconds_evaluate"].iloc[-2],
        "evaluate_s": last["seconds_evaluate"],
    }


def dealing(case: Found) -> dict[str, float]:
    """Which examples clients get, without the time to draw images."""
    from flray.config.experiment import parse_experiment
    from flray.runs.preparing import deal

    given = experiment(case)
    parsed = parse_experiment({**given, "dataset": {**given["dataset"], "size": 2}})
    dataset = parsed.dataset.build().load()
    begin = process_time()
    deal(parsed, dataset)
    return {"cpu_s": process_time() - begin}


def experiment(case: Found) -> Found:
    """The experiment of a case, as YAML has it."""
    clients, is_pass = case["clients"], case["what"] == "clustering"
    rounds = 1 if is_pass else max(case["rounds"], 2)
    has_groups = case["method"] == "flhc" and not is_pass
    algorithm = ALGORITHMS.get(case["method"], case["method"])
    if is_pass:
        groups = min(WITHOUT_D["partition"]["groups"], max(clients // 4, 10))
        clustering = {**WITHOUT_D, "partition": {**WITHOUT_D["partition"], "groups": groups}}
        algorithm = {"name": "flhc", "rounds_before": 1, "clustering": clustering}
    evaluate = {"every": rounds, "also": [rounds - 1], "clients": SAMPLE}
    return {
        "dataset": {
            "name": "synthetic",
            "num_train": clients * case["images"],
            "num_test": clients,
        },
        "split": {"name": "label_swap" if has_groups else "iid", "clients": clients},
        "model": "mlp200",
        "algorithm": algorithm,
        "uses_ground_truth": has_groups,
        "train": {"lr": 0.01, "batch_size": 10},
        "participation": min(1.0, COHORT / clients),
        "rounds": rounds,
        "evaluate": {"every": 1} if is_pass else evaluate,
        "execution": {"device": case["device"]},
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
    """Seconds of a round, of a clustering pass and of everybody's evaluation by number of clients.

    Lines of a GPU are dashed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharex=True)
    titles = ("a round of 100 clients, s", "FL+HC: pass and clustering, s", "evaluation of all, s")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlabel="clients", title=title, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    colours: dict[str, str] = {}
    for what, method, device in dict.fromkeys((e["what"], e["method"], e["device"]) for e in found):
        line = [e for e in found if (e["what"], e["method"], e["device"]) == (what, method, device)]
        line.sort(key=lambda e: e["clients"])
        clients = [e["clients"] for e in line]
        style = {
            "color": colours.setdefault(method, f"C{len(colours)}"),
            "linestyle": "-" if device == "cpu" else "--",
            "marker": "o",
            "markersize": 3,
        }
        if what == "clustering":
            spent = [e["train_everybody_s"] + e["sketch_s"] + e["cluster_s"] for e in line]
            panels[1].plot(clients, spent, **style)
        else:
            label = method if device == "cpu" else None
            panels[0].plot(clients, [e["round_s"] for e in line], label=label, **style)
            judged = [(e["clients"], e["evaluate_s"]) for e in line if "evaluate_s" in e]
            panels[2].plot(*zip(*judged, strict=True), **style)
    panels[0].legend(frameon=False, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


if __name__ == "__main__":
    main()
