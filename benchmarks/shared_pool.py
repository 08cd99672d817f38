"""Rounds of trials that share one pool of client actors, beside a run alone in process.

    python benchmarks/shared_pool.py experiments/flt/mnist_scenario1_fedavg.yaml \
        [--actors 1x1] [--trials 4] [--rounds 20] [key=value ...]

The trials are seeds of one experiment, all at a time (`client_actors: shared`). One JSON line for
the run alone and one for the sweep: medians over rounds, without the first three and the last, of
the seconds of a round, of its training and of mixing. `hashes_equal`: the first seed has the same
final models in both.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

FIRST = 3  # rounds, in which graphs are recorded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("experiment")
    parser.add_argument("--actors", default="1x1", metavar="NxG")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    from flray.config.experiment import override, read_yaml

    told = [f"rounds={given.rounds}", f"evaluate.every={given.rounds}", *given.overrides]
    experiment = override(read_yaml(given.experiment), told)
    with tempfile.TemporaryDirectory() as folder:
        alone = run_alone(experiment, Path(folder) / "alone")
        print(json.dumps({"what": "alone", **alone}), flush=True)
        shared = run_shared(experiment, given, Path(folder) / "sweep")
    are_equal = alone.pop("sha256") == shared.pop("sha256")
    print(json.dumps({"what": "shared", **shared, "hashes_equal": are_equal}), flush=True)


def run_alone(experiment: dict[str, Any], out: Path) -> dict[str, Any]:  # Any: YAML and JSON
    from flray.config.build import run_experiment
    from flray.config.experiment import parse_experiment

    found = run_experiment(parse_experiment(experiment), out)
    assert found.summary is not None  # nobody stopped it
    return {**medians([found.rounds]), "sha256": found.summary["params_sha256"]}


def run_shared(
    experiment: dict[str, Any], given: argparse.Namespace, out: Path
) -> dict[str, Any]:  # Any: YAML and JSON
    from flray.records.run_directory import RunDirectory
    from flray.sweep.driver import run_sweep
    from flray.sweep.space import parse_space

    count, _, gpus = given.actors.partition("x")
    actors = {"count": int(count), "num_gpus": float(gpus or 0)}
    execution = {**experiment.get("execution", {}), "executor": "ray", "actors": actors}
    space = {
        "experiment": {**experiment, "execution": execution},
        "space": {"seed": list(range(given.trials))},
        "metric": "accuracy_mean",
        "concurrency": given.trials,
        "client_actors": "shared",
    }
    run_sweep(parse_space(space, Path.cwd()), out)
    runs = [RunDirectory(each) for each in sorted((out / "runs").iterdir(), key=lambda p: p.name)]
    summaries = [run.summary() for run in runs]
    hashes = [each["params_sha256"] for each in summaries if each is not None and not each["seed"]]
    return {**medians([run.rounds() for run in runs]), "sha256": hashes[0]}


def medians(runs: list[pd.DataFrame]) -> dict[str, float]:
    found = {}
    for name in ("seconds", "seconds_train", "seconds_mix"):
        of_runs = [float(run[name].iloc[FIRST:-1].median()) for run in runs if name in run]
        if of_runs:
            found[name] = round(median(of_runs), 4)
    return found


if __name__ == "__main__":
    main()
