"""How fast the engines train on this machine: client steps a second, by model and block.

    python benchmarks/engines.py [--device cuda] [--models mlp200 flhc_cnn] [--slots 1 20 100]

One step is one SGD batch of 10 images of 28x28 of one client; the median of three rounds counts.
"""

import argparse
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
import torch

from flray.algorithms.fedavg import FedAvg
from flray.client.engine import Block, Engine
from flray.client.host import HostSettings, start_host
from flray.client.plan import plan_client
from flray.client.training import Training
from flray.data.datasets.synthetic import Synthetic
from flray.data.events import make_timeline
from flray.data.splits.iid import Iid
from flray.models import MODELS
from flray.models.bank import build_seeded, params_of

TRAINING = Training(lr=0.01, batch_size=10)
EXAMPLES = 200  # of each client: 20 steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["mlp200", "lenet5", "flhc_cnn"])
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 5, 10, 20])
    arguments = parser.parse_args()
    dataset = Synthetic(num_train=2000).load()
    split = Iid(clients=10, validation=0.0).split(dataset, 0)
    print(f"{'model':10} {'engine':10} {'slots':>5} {'steps/s':>10} {'ms/round':>9}")
    for model in arguments.models:
        module = build_seeded(lambda: MODELS[model](dataset.image_shape, 10), 0)  # noqa: B023
        for engine, slots in [("loop", 1), *(("vectorized", k) for k in arguments.slots)]:
            settings = HostSettings(engine, arguments.device, torch.float32, slots, 1, 0)
            host = start_host(module, dataset, make_timeline(split, ()), settings)
            seconds = measure(host.engine, block(params_of(host.module), split.train[0], slots))
            steps = slots * EXAMPLES // TRAINING.batch_size
            print(f"{model:10} {engine:10} {slots:5d} {steps / seconds:10.0f} {1e3 * seconds:9.1f}")


def block(params: dict[str, torch.Tensor], examples: np.ndarray, slots: int) -> Block:
    plan = plan_client(examples, TRAINING, 0, 0, 0)
    w0 = {name: leaf.clone().expand(slots, *leaf.shape) for name, leaf in params.items()}
    return Block(tuple(replace(plan, client=k) for k in range(slots)), w0, {})


def measure(engine: Engine, work: Block) -> float:
    """Median seconds of three rounds, after one to warm up."""
    times = []
    for _ in range(4):
        begin = perf_counter()
        engine.train(work, TRAINING, FedAvg().gradient)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(perf_counter() - begin)
    return median(times[1:])


if __name__ == "__main__":
    main()
