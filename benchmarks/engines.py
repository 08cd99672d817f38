"""How fast the engines train on this machine: client steps per second by engine, model and block.

python benchmarks/engines.py                           mlp200, lenet5 and flhc_cnn
python benchmarks/engines.py --models mlp200 --clients 20 100
python benchmarks/engines.py --models mlp200 --hooks sgd fedprox scaffold

Seconds are medians; CPU time, of which the least is taken, hardly depends on what else runs.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
from pytorch_lightning import LightningModule

from flray.algorithms.fedprox import FedProx
from flray.algorithms.scaffold import Scaffold
from flray.client.host import EngineName, HostSettings, default_threads, start_host
from flray.data.dataset import Dataset, Ids
from flray.data.datasets.synthetic import Synthetic
from flray.data.events import make_timeline
from flray.data.split import Split
from flray.data.splits.iid import Iid
from flray.engines.engine import Block, Engine
from flray.engines.plan import plan_clients
from flray.engines.training import Gradient, Training, plain_gradient
from flray.models import MODELS
from flray.models.bank import Params, build_seeded, params_of

DEFAULT_MODELS = ("mlp200", "lenet5", "flhc_cnn")
TRAINING = Training(lr=0.01, batch_size=10)
REPETITIONS = 3  # beside one to warm up
HOOKS: dict[str, Gradient] = {
    "sgd": plain_gradient,
    "fedprox": FedProx(mu=0.1).gradient,
    "scaffold": Scaffold().gradient,
}


@dataclass(frozen=True)
class Speed:
    """What one engine does with one model."""

    model: str
    hook: str
    engine: EngineName
    block: int
    threads: int
    steps: int  # of all clients of the block in a round
    seconds: float  # median of the rounds
    cpu_seconds: float  # of this process, least of the rounds

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=DEFAULT_MODELS, choices=sorted(MODELS))
    parser.add_argument(
        "--clients", nargs="+", type=int, default=[1, 20], help="clients of a block"
    )
    parser.add_argument("--hooks", nargs="+", default=["sgd"], choices=list(HOOKS))
    parser.add_argument("--steps", type=int, default=20, help="steps of each client")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    print(_title(options.device, options.steps))
    print("model\thook\tengine\tclients\tthreads\tclient steps/s\tseconds per round\tCPU µs/step")
    for speed in speeds(options):
        names = (speed.model, speed.hook, speed.engine, speed.block, speed.threads)
        cpu = f"{1e6 * speed.cpu_seconds / speed.steps:,.0f}"
        print(*names, f"{speed.steps_per_second:,.0f}", f"{speed.seconds:.4f}", cpu, sep="\t")


def speeds(options: argparse.Namespace) -> Iterator[Speed]:
    steps, device = options.steps, options.device
    dataset = Synthetic(num_train=10 * steps * TRAINING.batch_size).load()
    split = Iid(clients=10, validation=0.0).split(dataset, 0)
    for model in options.models:
        module = build_seeded(lambda: MODELS[model](dataset.image_shape, 10), 0)  # noqa: B023
        asked: list[tuple[EngineName, int, int]] = [("loop", 1, 1)]
        for block in options.clients:
            cores = default_threads("vectorized", module, device)
            asked += [("vectorized", block, threads) for threads in sorted({1, cores})]
        for engine, block, threads in asked:
            settings = HostSettings(engine, device, torch.float32, block, threads, seed=0)
            for hook in options.hooks:
                found = _measure(module, hook, (dataset, split), settings)
                yield Speed(model, hook, engine, block, threads, *found)


def _measure(
    module: LightningModule, hook: str, data: tuple[Dataset, Split], settings: HostSettings
) -> tuple[int, float, float]:
    """Steps of a round, the median of its seconds, and the least of its CPU seconds."""
    dataset, split = data
    host = start_host(module, dataset, make_timeline(split, ()), settings)
    work = _block(params_of(host.module), split.train[0], settings.block)
    steps = sum(plan.num_steps for plan in work.plans)
    return steps, *_seconds(host.engine, work, settings.device, HOOKS[hook])


def _block(params: Params, examples: Ids, num_clients: int) -> Block:
    (plan,) = plan_clients([examples], TRAINING, 0, 0, np.array([0]))
    w0 = {name: leaf.clone().expand(num_clients, *leaf.shape) for name, leaf in params.items()}
    plans = tuple(replace(plan, client=k) for k in range(num_clients))
    controls = {f"{kind}/{n}": torch.zeros_like(w) for kind in ("c", "c_i") for n, w in w0.items()}
    return Block(plans, w0, controls)


def _seconds(engine: Engine, work: Block, device: str, hook: Gradient) -> tuple[float, float]:
    times, cpu_times = [], []
    for _ in range(1 + REPETITIONS):
        begin, cpu_begin = perf_counter(), process_time()
        engine.train(work, TRAINING, hook)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(perf_counter() - begin)
        cpu_times.append(process_time() - cpu_begin)
    return median(times[1:]), min(cpu_times[1:])


def _title(device: str, steps: int) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} cores"
    return (
        f"{name}, torch {torch.__version__}: {steps} steps of each client, batches of "
        f"{TRAINING.batch_size} images of 28x28, median of {REPETITIONS} rounds"
    )


if __name__ == "__main__":
    main()
