"""What clustering without D costs in agreement with the exact methods, on updates of clients.

    python benchmarks/partitions.py                                   500 clients, all data
    python benchmarks/partitions.py --clients 2000 --groups 500 --size 16

Clients of 60 synthetic images, of 28×28 unless --size is given, send the update of MLP-200 after
ten rounds of FedAvg; `random` are Gaussian vectors without clusters. One JSON line for each
approximation and data set: `ari_exact` is its agreement with the exact method (`against`) for the
same points and number of clusters, `ari_groups` that with the planted groups, `exact_ari_groups`
that of the exact method.
"""

import argparse
import json
from time import perf_counter
from typing import Any

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from flray.clustering.distances import L2
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.neighbours import Neighbours
from flray.clustering.partitions import KMeans
from flray.clustering.points import Points
from flray.clustering.related import Related
from flray.clustering.sketch import Sketch
from flray.clustering.two_level import TwoLevel
from flray.clustering.update import Update
from flray.config.experiment import parse_experiment
from flray.data.dataset import Ids
from flray.engines.training import plain_gradient
from flray.execution.federation import Cohort
from flray.models.mixing import Relation
from flray.runs.assemble import build_federation, start_executor
from flray.runs.preparing import prepare

SPLITS: dict[str, Any] = {
    "label_swap": {"name": "label_swap", "groups": 4},
    "rotation": {"name": "rotation"},
    "pathological": {"name": "pathological"},
}
IMAGES, ROUNDS, DIM, NUMBER = 60, 10, 256, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--data", nargs="+", default=[*SPLITS, "random"])
    parser.add_argument("--size", type=int, default=28, help="of an image, in pixels")
    parser.add_argument("--groups", type=int, default=100, help="of two_level")
    arguments = parser.parse_args()
    for data in arguments.data:
        points, groups = observed(data, arguments.clients, arguments.size)
        for line in compared(points, groups, arguments.groups):
            print(json.dumps({"data": data, "clients": arguments.clients, **line}), flush=True)


def observed(data: str, clients: int, size: int) -> tuple[Points, Ids | None]:
    """The updates of all clients, and their planted groups."""
    if data == "random":
        rng = torch.Generator().manual_seed(0)
        return Points.vectors(np.arange(clients), torch.randn(clients, 2000, generator=rng)), None
    experiment = parse_experiment(
        {
            "dataset": {
                "name": "synthetic",
                "num_train": clients * IMAGES,
                "num_test": clients,
                "size": size,
            },
            "split": {**SPLITS[data], "clients": clients},
            "model": "mlp200",
            "algorithm": "fedavg",
            "train": {"lr": 0.1, "batch_size": 10, "epochs": 5},
            "participation": min(1.0, 50 / clients),
            "rounds": 1,
            "execution": {"device": "cpu"},
        }
    )
    parts = prepare(experiment)
    fed = build_federation(experiment, parts, start_executor(parts))
    bank = fed.initial_bank()
    for t in range(1, ROUNDS + 1):
        cohort = Cohort(t, fed.sample(t, fed.clients))
        bank, _ = fed.average(Relation.joint(fed.num_clients), bank, cohort, plain_gradient)
    points, _ = Update()(fed, bank, Cohort(ROUNDS, fed.clients), {})
    planted = parts.payload.timeline.at(1).groups
    return points, None if planted is None else planted[points.clients]


def compared(points: Points, groups: Ids | None, small: int) -> list[dict[str, Any]]:
    """Each approximation beside the exact partition of the same points."""
    sketches = Sketch(DIM)(points, seed=0)
    points = points.moved_to(points.principal)  # as many coordinates as clients, equal distances
    ward, average = Hierarchical("ward", number=NUMBER), Hierarchical("average", number=NUMBER)
    cases = [
        ("sketch, ward", (sketches, ward), ("ward", points, ward)),
        ("sketch, average", (sketches, average), ("average", points, average)),
        ("kmeans, batch", (points, KMeans(NUMBER, batch=256)), ("kmeans", points, KMeans(NUMBER))),
        (
            "two_level, ward",
            (points, TwoLevel(small, "ward", number=NUMBER)),
            ("ward", points, ward),
        ),
        (
            "two_level, average",
            (points, TwoLevel(small, "average", number=NUMBER)),
            ("average", points, average),
        ),
        (
            "sketch, two_level, ward",
            (sketches, TwoLevel(small, "ward", number=NUMBER)),
            ("ward", points, ward),
        ),
        (
            "sketch, two_level, average",
            (sketches, TwoLevel(small, "average", number=NUMBER)),
            ("average", points, average),
        ),
        ("sketch, neighbours", (sketches, Neighbours()), ("ward", points, ward)),
    ]
    lines = []
    for name, (near, rule), (against, exact_points, exact_rule) in cases:
        exact, _ = labels(exact_points, exact_rule)
        found, seconds = labels(near, rule)
        line = {"name": name, "against": against, "ari_exact": score(exact, found)}
        if groups is not None:
            line |= {"ari_groups": score(groups, found), "exact_ari_groups": score(groups, exact)}
        clusters = len(np.unique(found))
        lines.append({**line, "clusters": clusters, "seconds": round(seconds, 2)})
    return lines


def labels(points: Points, rule: Any) -> tuple[Ids, float]:  # Any: a partition stage
    """The clusters of the points, and the seconds that it took, D included where it is needed."""
    begin = perf_counter()
    distance = None if getattr(rule, "takes_points", False) else L2()(points)
    rng = np.random.default_rng(0)
    partition = rule(Related(points, distance, None, rng, lambda: points.clients, measure=L2()))
    return partition.labels, perf_counter() - begin


def score(first: Ids, second: Ids) -> float:
    return round(float(adjusted_rand_score(first, second)), 3)


if __name__ == "__main__":
    main()
