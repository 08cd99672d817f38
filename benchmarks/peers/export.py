"""Write the folder of a case (see work.py) from flray's own experiment file.

python benchmarks/peers/export.py CASE FOLDER
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from flray.config.experiment import parse_experiment, read_yaml
from flray.data.pixels import place_examples
from flray.engines.plan import plan_clients
from flray.execution.executor import LazyExecutor
from flray.models.bank import params_of
from flray.runs.assemble import build_federation
from flray.runs.preparing import prepare


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    experiment = parse_experiment(read_yaml(Path(__file__).parent / "cases" / f"{case}.yaml"))
    parts = prepare(experiment)
    settings, split = experiment.settings, parts.payload.timeline.at(1)
    fed = build_federation(experiment, parts, LazyExecutor(_never))
    cohorts = np.stack([fed.sample(t, fed.clients) for t in range(1, settings.rounds + 1)])
    orders = np.stack(
        [
            [_order(split.trained_on(i), settings, t, int(i)) for i in cohort]
            for t, cohort in enumerate(cohorts, 1)
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    examples = place_examples(parts.payload.dataset, split, torch.device("cpu"), torch.float32)
    x, y = examples.batch(torch.arange(len(split.labels)))
    np.save(folder / "images.npy", x.numpy())
    np.save(folder / "labels.npy", y.numpy())
    np.save(folder / "cohorts.npy", cohorts)
    np.save(folder / "orders.npy", orders)
    weights = {name: leaf.numpy() for name, leaf in params_of(parts.payload.module).items()}
    np.savez(folder / "initial.npz", **weights)
    facts = {
        "case": case,
        "model": experiment.model.name,
        "lr": settings.train.lr,
        "batch_size": settings.train.batch_size,
        "clients": split.num_clients,
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def _order(examples, settings, t, client):
    clients = np.array([client])
    (plan,) = plan_clients([examples], settings.train, settings.seed, t, clients)
    return plan.ids[plan.mask]


def _never():
    raise AssertionError("nothing is executed here")


if __name__ == "__main__":
    main()
