"""Several experiments of one mapping of keys: a list of components, and `seeds`.

`algorithm: [fedavg, flhc]` means two experiments, `seeds: 3` three runs of each, with the seeds
`seed`, `seed + 1` and `seed + 2`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from flray.config.deciding import leaves
from flray.config.experiment import COMPONENTS, Experiment, is_list_of_components, parse_experiment
from flray.config.reading import Plain
from flray.config.reference import SEEDS
from flray.errors import ExperimentError
from flray.values import shown


@dataclass(frozen=True)
class NamedExperiment:
    """One of the experiments that a command runs.

    Experiments that differ only in the seed share a name; results are averaged over them.
    """

    name: str
    experiment: Experiment

    @property
    def folder(self) -> Path:
        """Where its run is, from the folder of all of them: NAME/seed_N."""
        return Path(self.name, f"seed_{self.experiment.settings.seed}")


def named_experiments(given: Mapping[str, Plain]) -> list[NamedExperiment]:
    """Each variant of each mapping of keys, with each of its seeds.

    Args:
        given: keys by name; a variant of the only mapping has the variant's name, of one among
            several both names.

    >>> plain = {"dataset": "digits", "split": {"name": "iid", "clients": 4}, "model": "mlp200"}
    >>> runs = named_experiments({"mine": {**plain, "algorithm": ["fedavg", "local"], "seeds": 2}})
    >>> [str(run.folder) for run in runs]
    ['fedavg/seed_0', 'fedavg/seed_1', 'local/seed_0', 'local/seed_1']
    """
    experiments: dict[str, list[Experiment]] = {}
    for name, plain in given.items():
        for variant, keys in _variants(plain).items():
            parts = (name, variant) if len(given) > 1 or not variant else (variant,)
            full_name = "_".join(part for part in parts if part)
            if full_name in experiments:
                raise ExperimentError(f"two experiments have the name {full_name!r}: rename a file")
            experiments[full_name] = _with_seeds(keys)
    return [NamedExperiment(name, seed) for name, seeds in experiments.items() for seed in seeds]


def _variants(plain: Plain) -> dict[str, Plain]:
    """One mapping for each combination of listed components, by name; by "" if none is listed.

    >>> sorted(_variants({"algorithm": ["fedavg", "ifca"], "model": "mlp200"}))
    ['fedavg', 'ifca']
    """
    listed = {kind: plain[kind] for kind in COMPONENTS if is_list_of_components(plain.get(kind))}
    for kind, components in listed.items():
        if not components:
            raise ExperimentError(f"{kind} is an empty list; expected a name, or names")
    labels = [_labels(kind, components) for kind, components in listed.items()]
    combinations = product(*listed.values())
    return {
        "_".join(names): plain | dict(zip(listed, components, strict=True))
        for names, components in zip(product(*labels), combinations, strict=True)
    }


def _labels(kind: str, components: Sequence[Any]) -> list[str]:  # Any: YAML
    """The name of each component, with the keys in which it differs from others of that name.

    >>> _labels("algorithm", ["fedavg", {"name": "flhc", "rounds_before": 3}, "flhc"])
    ['fedavg', 'flhc_rounds_before_3', 'flhc']
    """
    mappings = [{"name": item} if isinstance(item, str) else item for item in components]
    names = [str(mapping.get("name")).rpartition(":")[2] for mapping in mappings]
    settings = [dict(leaves(mapping)) for mapping in mappings]
    labels = []
    for name, values in zip(names, settings, strict=True):
        rivals = [other for n, other in zip(names, settings, strict=True) if n == name]
        differing = [k for k in values if any(rival.get(k, "") != values[k] for rival in rivals)]
        parts = (f"_{key.rpartition('.')[2]}_{values[key]}" for key in differing)
        labels.append(re.sub(r"[^\w.-]+", "_", name + "".join(parts)))
    repeated = [label for label, count in Counter(labels).items() if count > 1]
    if repeated:
        raise ExperimentError(f"{kind} has {repeated[0]!r} twice in its list: leave one out")
    return labels


def _with_seeds(plain: Plain) -> list[Experiment]:
    """The experiment for each seed; `seeds` is their number, `seed` the first."""
    keys = {key: value for key, value in plain.items() if key != SEEDS}
    number = plain.get(SEEDS, 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ExperimentError(
            f"seeds must be a whole number >= 1, got {shown(number)}, as in seeds=3"
        )
    first = parse_experiment(keys).settings.seed
    return [parse_experiment({**keys, "seed": seed}) for seed in range(first, first + number)]
