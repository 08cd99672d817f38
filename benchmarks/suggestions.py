"""How often Optuna's suggestions find what a grid finds, from a sweep that has run every row.

    flray sweep tune_spaces/flhc_digits.yaml --out all \\
        algorithm.rounds_before='[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]'
    python benchmarks/suggestions.py tune_spaces/flhc_optuna_digits.yaml all --seeds 40

Asks flray's own search with many seeds of its sampler and looks the results up: nothing is trained.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from flray.columns import MERGE_PLACE
from flray.config.experiment import parse_experiment
from flray.config.overrides import THRESHOLD
from flray.sweeps.rows import SweepRow, known_and_examples, rounds_to_cluster_after
from flray.sweeps.search import Suggestions
from flray.sweeps.space import Space, read_space

IN_FLIGHT = 2  # trials at a time, as on two cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("space", type=Path)
    parser.add_argument("sweep", type=Path, help="the folder of a sweep of all its rows")
    parser.add_argument("--seeds", type=int, default=40, help="of the sampler")
    arguments = parser.parse_args()
    table = pd.read_parquet(arguments.sweep / "rows.parquet")
    found = []
    for seed in range(arguments.seeds):
        space = read_space(arguments.space, [f"search.seed={seed}"])
        found.append(best_suggestion(space, looked_up(space, table)))
    values, counts = np.unique(np.round(found, 4), return_counts=True)
    print(f"best of {space.options.search.samples} suggestions, over {arguments.seeds} seeds:")
    print(f"median {np.median(found):.4f}, mean {np.mean(found):.4f}")
    for value, count in zip(values[::-1], counts[::-1].cumsum(), strict=True):
        print(f"at least {value:.4f}: {count / len(found):.0%}")


def looked_up(space: Space, table: pd.DataFrame) -> Callable[[SweepRow], float]:
    """The metric of a suggested row, as the sweep of all rows has it."""
    columns = [MERGE_PLACE if key == THRESHOLD else key for key in space.varied]
    by_settings = table.dropna(subset=columns).set_index(columns)[space.options.metric]

    def value(row: SweepRow) -> float:
        assert row.merge_point is not None
        chosen = row.chosen | {THRESHOLD: row.merge_point.place}
        return float(by_settings.loc[tuple(chosen[key] for key in space.varied)])

    return value


def best_suggestion(space: Space, value: Callable[[SweepRow], float]) -> float:
    known, examples = known_and_examples(space)
    experiments = [parse_experiment(row.plain) for row in known + examples]
    search = Suggestions(space, rounds_to_cluster_after(space, experiments), 0, ())
    waiting: list[tuple[str, float]] = []
    values: list[float] = []
    while search.num_left or waiting:
        if search.num_left and len(waiting) < IN_FLIGHT:
            name = f"trial {len(values) + len(waiting)}"
            waiting.append((name, float(np.mean([value(row) for row in search.ask(name)]))))
            continue
        name, found = waiting.pop(0)
        search.tell(name, {space.options.metric: found}, error=False)
        values.append(found)
    return max(values)


if __name__ == "__main__":
    main()
