"""What each method costs beside FedAvg: steps, gradients, bytes and seconds of a round.

    python benchmarks/methods.py [--methods ditto fedem ...] [--device cuda] [--model lenet5]
        [--rounds N] [--repeats N]

Twenty clients with 100 random images of 28 x 28 each, in batches of 10; everybody takes part, so a
round of FedAvg has 200 client steps. One line of a Markdown table for each method: medians of the
rounds that are neither first nor last. On a CPU seconds are CPU seconds of the thread that runs the
rounds, and `writing` those of the thread that writes records and checkpoints meanwhile; on a GPU
they are wall time, and nothing is measured of the other thread. Each is the least of `--repeats`
runs: other work on the machine only adds to it. Gradients are counted in
a run of the engine `loop`, where a hook runs once for each client and step. Methods that judge
models on data take forward passes that are no part of a gradient: `judged` is their number of
examples, once for each model. A forward pass is a third of a gradient, so what is expected are
gradients + judged / (3 x batch size), over FedAvg's gradients; `above` is how much slower a method
is than that. Other work of the server (distances, k-means, several means) is not expected.

Methods that cluster do so before or after round 1, which is left out; FLT and PCA+kM+HC send
centres of principal components, which need no encoder.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any
from unittest.mock import patch

import numpy as np

from flray.algorithms import ALGORITHMS
from flray.client.tasks import ExampleLosses, Judge, Predict
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.execution.federation import Federation
from flray.records.run_directory import RunDirectory
from flray.records.writer import RoundWriter
from flray.runs.conduct import Monitor
from flray.runs.launch import run_experiment

CENTRES = "algorithm.clustering.signature={name: pca_centres, components: 16, k: 2}"
SETTINGS = {  # what a method needs to run here
    "flt": [CENTRES, "algorithm.clustering.embed=none"],
    "pca_km_hc": [CENTRES],
    "cfl": ["algorithm.rounds_before=1"],
    "cfl_gp": ["algorithm.rounds_before=1", "algorithm.clustering.partition.number=2"],
    "feddrift": ["algorithm.every=100"],
    "fedamp": ["algorithm.alpha=0.05"],
    "fedrep": ["algorithm.head_epochs=1"],
    "flhc": ["algorithm.rounds_before=1"],
    "flis_dc": ["split.server=100"],
    "flis_hc": ["split.server=100"],
    "lg_fedavg": ["algorithm.global_layers=1"],
    "repa": [
        "algorithm.rounds_before=1",
        "algorithm.clustering.partition.number=2",
        "algorithm.clustering.signature.statistics=[mean, std]",
    ],
    "wd": ["algorithm.rounds_before=1", "algorithm.clustering.partition.number=2"],
}
BATCH = 10
HEADINGS = (
    "method | steps | gradients | judged | MB up | MB down | seconds | × FedAvg | expected | above"
    " | writing"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=sorted(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="mlp200")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    common = [f"execution.device={options.device}", f"model={options.model}"]
    common += ["execution.threads=1"] if options.device == "cpu" else []
    common += [f"rounds={options.rounds}", f"evaluate.every={options.rounds}"]
    print(f"| {HEADINGS} |\n|{'---|' * (HEADINGS.count('|') + 1)}")
    costs("fedavg", common, 1)  # the first run of a process is slower
    fedavg: dict[str, float] = {}
    for name in dict.fromkeys(["fedavg", *options.methods]):
        cost = costs(name, common, options.repeats)
        fedavg = fedavg or cost
        times = cost["seconds"] / fedavg["seconds"]
        expected = (cost["gradients"] + cost["judged"] / (3 * BATCH)) / fedavg["gradients"]
        numbers = [f"{cost[k]:,.0f}" for k in ("client_steps", "gradients", "judged")]
        numbers += [f"{cost[k] / 1e6:.2f}" for k in ("bytes_up", "bytes_down")]
        numbers += [f"{cost['seconds']:.4f}", f"{times:.2f}", f"{expected:.2f}"]
        numbers += [f"{100 * (times / expected - 1):+.0f} %", f"{cost['writing']:.4f}"]
        print(f"| `{name}` | {' | '.join(numbers)} |", flush=True)


def costs(name: str, common: list[str], repeats: int) -> dict[str, float]:
    """The medians of a method's rounds, and how often it takes a gradient in a round."""
    overrides = [*common, f"algorithm={name}", *SETTINGS.get(name, [])]
    runs = [medians(overrides) for _ in range(repeats)]
    cost = {kind: min(run[kind] for run in runs) for kind in runs[0]}
    with counted_gradients() as calls:
        medians([*overrides, "rounds=3", "evaluate.every=3", "execution.engine=loop"])
    return cost | {"gradients": float(calls[-1])}


def medians(overrides: list[str]) -> dict[str, float]:
    """Steps, bytes, judged examples and seconds of rounds that are neither first nor last."""
    chosen = parse_experiment(override(experiment(), overrides))
    is_cpu = chosen.settings.execution.device == "cpu"
    ends: list[tuple[float, ...]] = []  # seconds, examples judged and seconds of writing so far
    with (
        tempfile.TemporaryDirectory() as folder,
        counted_examples() as judged,
        timed_writing() as writing,
    ):
        now = thread_time if is_cpu else perf_counter
        monitor = Monitor(lambda _: ends.append((now(), judged.total(), sum(writing))))
        run_experiment(chosen, Path(folder), monitor=monitor)
        rounds = RunDirectory(folder).rounds().iloc[1:-1]
    columns = {
        kind: rounds.filter(regex=f"^{kind}").sum(axis=1)
        for kind in ("client_steps$", "bytes_up", "bytes_down")
    }
    cost = {kind.removesuffix("$"): float(values.median()) for kind, values in columns.items()}
    rounds_of = np.diff(ends, axis=0)[:-1]
    seconds, judged_in, _ = np.median(rounds_of, axis=0)
    # A write may end rounds later, and one may hold several rounds.
    written = float(rounds_of[:, 2].mean()) if is_cpu else np.nan
    return cost | {"seconds": float(seconds), "judged": float(judged_in), "writing": written}


def experiment() -> dict[str, Any]:  # Any: YAML
    return {
        "dataset": {"name": "synthetic", "num_train": 2200, "num_test": 100},
        "split": {"name": "iid", "clients": 20, "samples_per_client": 100, "validation": 0.0},
        "model": "mlp200",
        "algorithm": "fedavg",
        "train": {"lr": 0.01, "batch_size": BATCH},
    }


@contextmanager
def counted_gradients() -> Iterator[list[int]]:
    """Calls of `grad` in each round so far, while everything runs in this process."""
    train, calls, rounds = Federation.train, [0], [0]

    # Any: as `Federation.train` and hooks have them
    def counting(fed: Any, bank: Any, cohort: Any, gradient: Any, *rest: Any, **more: Any) -> Any:
        if cohort.t != rounds[0]:
            rounds[0] = cohort.t
            calls.append(0)

        def hook(grad: Any, w: Any, batch: Any, w0: Any, memo: Any) -> Any:
            def one(at: Any, of: Any) -> Any:
                calls[-1] += 1
                return grad(at, of)

            return gradient(one, w, batch, w0, memo)

        return train(fed, bank, cohort, hook, *rest, **more)

    with patch.object(Federation, "train", counting):
        yield calls


@contextmanager
def timed_writing() -> Iterator[list[float]]:
    """CPU seconds of each write of records and a checkpoint, which a thread of its own does."""
    commit, seconds = RoundWriter._commit, list[float]()

    def timed(*parts: Any) -> None:  # Any: as `RoundWriter._commit` has them
        begin = thread_time()
        commit(*parts)
        seconds.append(thread_time() - begin)

    with patch.object(RoundWriter, "_commit", timed):
        yield seconds


@contextmanager
def counted_examples() -> Iterator[Counter[str]]:
    """The examples that models are judged on, once for each model, by kind of question."""
    ask, judged = Federation.map, Counter[str]()

    # Any: as `Federation.map` has them
    def counting(fed: Any, task: Any, cohort: Any, params: Any = None, **more: Any) -> Any:
        split = fed.timeline.at(cohort.t)
        if isinstance(task, Predict):
            judged["predict"] += len(cohort.clients) * len(split.server)
        elif isinstance(task, Judge | ExampleLosses):
            part = getattr(split, getattr(task, "part", "train"))
            num_models = len(next(iter(params.values())))
            judged["judge"] += num_models * sum(len(part[i]) for i in cohort.clients)
        return ask(fed, task, cohort, params, **more)

    with patch.object(Federation, "map", counting):
        yield judged


if __name__ == "__main__":
    main()
