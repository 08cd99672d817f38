"""The rows of a sweep: one for each configuration that its space describes.

A grid or a random search has all its rows before anything runs (`expand`). With Optuna only the
baselines are known; `known_and_examples` adds examples of the rest, to refuse a faulty space early.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
from ray.tune.search.sample import Categorical, Domain, Float, Integer

from flray.algorithms.algorithm import Branching
from flray.algorithms.fedavg import FedAvg
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.merges import MergePoint
from flray.columns import MERGE_PLACE
from flray.config.deciding import is_below
from flray.config.experiment import Experiment, also_evaluated, parse_experiment
from flray.config.overrides import THRESHOLD, with_value
from flray.config.reading import Plain
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.sweeps.forms import BetweenMerges, Grid, Values
from flray.sweeps.keys import canonical
from flray.sweeps.space import EXPERIMENT, METHOD, OptunaSearch, RandomSearch, Space

ROUNDS_BEFORE = "algorithm.rounds_before"
STAND_IN = 1.0  # for a threshold that is not known before the row's tree

_EXPERIMENTS: dict[str, Experiment] = {}  # by the text of their resolved configuration


def experiment_of(plain: Plain) -> Experiment:
    """The experiment of a row's resolved configuration, parsed once per process.

    >>> given = {"dataset": "digits", "split": {"name": "iid", "clients": 4}, "model": "mlp200"}
    >>> row = SweepRow(0, {}, parse_experiment({**given, "algorithm": "fedavg"}).plain)
    >>> experiment_of(row.plain) is experiment_of(row.plain)
    True
    """
    text = canonical(plain)
    return _EXPERIMENTS.get(text) or _remembered(parse_experiment(plain))


def _remembered(experiment: Experiment) -> Experiment:
    return _EXPERIMENTS.setdefault(canonical(experiment.plain), experiment)


@dataclass(frozen=True)
class SweepRow:
    """A configuration of a sweep and its state so far, which `trials/<number>.json` records.

    The status is first `unfinished`, then `done`, `shared` (its records were copied from another
    row with the same run), `failed`, or `stopped` by a scheduler.

    >>> row = SweepRow(0, {"train.lr": 0.1, "seed": 3}, plain={})
    >>> row.is_done, row.settings_without_seed()
    (False, {'train.lr': 0.1})
    """

    number: int
    overrides: Mapping[str, Any]  # Any: YAML; without a threshold that is still to be found
    plain: Plain  # resolved configuration, with a stand-in for such a threshold
    merge_point: MergePoint | None = None  # the threshold, where the row's own tree decides it
    status: str = "unfinished"
    error: str | None = None  # message of a failed row
    run: str | None = None  # key of its run, which rows may share
    is_whole: bool = False  # its algorithm has metrics that prefix and groups lack
    groups: list[str] = field(default_factory=list)  # keys of the groups that its clients are in
    steps_found: int = 0  # client steps in the records of its run that cache entries account for
    # Seconds of its trials by phase; `total`: all of them; `cpu`: those of its process's threads
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True if the row has a summary: it ran to its end, or shares a run that did."""
        return self.status in ("done", "shared")

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the space's keys; for a threshold of its own tree, where it lies there.

        What Optuna is told of a row: the position in the tree, not the threshold, is its choice.
        """
        point = {} if self.merge_point is None else {THRESHOLD: self.merge_point}
        return {**self.overrides, **point}

    def settings_without_seed(self) -> dict[str, Any]:
        """The settings without the seed: equal for rows that differ in their seed alone."""
        settings = {key: value for key, value in self.overrides.items() if key != "seed"}
        if self.merge_point is None:
            return settings
        settings.pop(THRESHOLD, None)  # each seed has a tree of its own
        return {**settings, MERGE_PLACE: self.merge_point.place}

    def at(self, threshold: float) -> "SweepRow":
        """The row once its threshold is known, with `overrides` and `plain` that have it."""
        plain = parse_experiment(with_value(self.plain, THRESHOLD, threshold)).plain
        return replace(self, overrides={**self.overrides, THRESHOLD: threshold}, plain=plain)


def expand(space: Space) -> tuple[SweepRow, ...]:
    """The rows that are known before anything runs, numbered from 0, the baselines last.

    A configuration that repeats is one row. With Optuna these are the baselines alone, of which
    there may be none.

    >>> from flray.sweeps.space import parse_space
    >>> experiment = {"dataset": "digits", "split": {"name": "iid", "clients": 5}}
    >>> experiment |= {"model": "mlp200", "algorithm": "fedavg"}
    >>> space = parse_space({"experiment": experiment, "space": {"train.lr": [0.1, 1.0]}})
    >>> [(row.number, row.overrides) for row in expand(space)]
    [(0, {'train.lr': 0.1}), (1, {'train.lr': 1.0})]
    """
    return known_and_examples(space)[0]


def suggested_row(
    space: Space, number: int, chosen: Mapping[str, Any], rounds: Collection[int]
) -> SweepRow:
    """The row of values that were suggested for the keys of the space.

    Args:
        space: A space with one experiment, as Optuna requires.
        number: The number that the row gets.
        chosen: A value for each key that the space varies.
        rounds: Those of `rounds_to_cluster_after`, after each of which the row is evaluated.

    Raises:
        ExperimentError: The values do not make a valid experiment.
    """
    (name,) = space.experiments
    row = _row(space, {EXPERIMENT: name, **chosen})
    return replace(row, number=number, plain=_evaluated(experiment_of(row.plain), rounds))


def is_suggested(space: Space, key: str) -> bool:
    """True if Optuna decides this key: seeds repeat, and a single value is no choice."""
    values = space.varied[key]
    is_single = isinstance(values, Grid) and len(values.values) == 1
    return isinstance(space.options.search, OptunaSearch) and key != "seed" and not is_single


def is_excluded(space: Space, chosen: Mapping[str, Any]) -> bool:
    """True if `except` leaves this combination out: a pattern of it matches in all its keys.

    Args:
        chosen: A value for each key that the space varies, and `experiment` and `method` where the
            space has several.
    """
    return any(all(chosen.get(k) in v for k, v in out.items()) for out in space.excluded)


def rounds_to_cluster_after(space: Space, experiments: Sequence[Experiment]) -> frozenset[int]:
    """The rounds after which a row of the space may cluster, 0 for a clustering before round 1.

    Prefixes stop at these rounds, and rows that share them are evaluated in the round after each.

    Args:
        space: Needed for rounds that are drawn: all of their range may come.
        experiments: The experiments of `known_and_examples`.
    """
    algorithms = [experiment.algorithm.build() for experiment in experiments]
    rounds = {a.rounds_before for a in algorithms if isinstance(a, Branching)}
    drawn = space.varied.get(ROUNDS_BEFORE)
    if rounds and isinstance(drawn, Integer) and is_suggested(space, ROUNDS_BEFORE):
        rounds |= set(range(int(drawn.lower), int(drawn.upper)))
    return frozenset(rounds)


def known_and_examples(space: Space) -> tuple[tuple[SweepRow, ...], tuple[SweepRow, ...]]:
    """The rows that are known before and, with Optuna, examples of those that may be suggested.

    Examples have each value of each list and the ends of each range, one at a time. They are for
    checks; only rows of `expand` and suggestions are run.

    Methods that cluster and FedAvg are evaluated in the round after each clustering that may be, so
    that they can be compared there and share their prefix.
    """
    is_adaptive = isinstance(space.options.search, OptunaSearch)
    varied = () if is_adaptive else _varied(space)
    known = _distinct(itertools.chain(varied, _baselines(space)))
    examples = list(_at_the_ends(space, len(known))) if is_adaptive else []
    if not known and not is_adaptive:
        raise ExperimentError("the space has no rows: `except` leaves no combination")
    rows = [*known, *examples]
    experiments = [experiment_of(row.plain) for row in rows]
    rounds = rounds_to_cluster_after(space, experiments)
    plains = (_evaluated(experiment, rounds) for experiment in experiments)
    evaluated = tuple(replace(row, plain=plain) for row, plain in zip(rows, plains, strict=True))
    return evaluated[: len(known)], evaluated[len(known) :]


def _evaluated(experiment: Experiment, rounds: Collection[int]) -> Plain:
    """The configuration, with an evaluation in the round after each of these.

    As it is for methods that neither share FedAvg's rounds nor are compared with it there.
    """
    algorithm = experiment.algorithm.build()
    if not (isinstance(algorithm, Branching) or type(algorithm) is FedAvg):
        return experiment.plain
    return _remembered(also_evaluated(experiment, {t + 1 for t in rounds})).plain


def _at_the_ends(space: Space, number: int) -> Iterator[SweepRow]:
    """Rows that differ from the first values of all keys in one value each."""
    (name,) = space.experiments
    ends = {key: ends_of(values) for key, values in space.varied.items()}
    first = {key: values[0] for key, values in ends.items()}
    others = ({**first, key: v} for key, values in ends.items() for v in values[1:])
    for chosen in (first, *others):
        if not is_excluded(space, chosen):
            yield replace(_row(space, {EXPERIMENT: name, **chosen}), number=number)


def _distinct(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Each configuration once, numbered in order."""
    distinct: dict[str, SweepRow] = {}
    for row in rows:
        key = canonical([row.plain, row.merge_point and astuple(row.merge_point)])
        distinct.setdefault(key, replace(row, number=len(distinct)))
    return list(distinct.values())


def _varied(space: Space) -> Iterator[SweepRow]:
    """The rows of each experiment and method, in all combinations of the values of both."""
    for name, (method, values) in itertools.product(space.experiments, space.methods.items()):
        for chosen in _combinations(space, {**values, **space.varied}):
            named = {EXPERIMENT: name, METHOD: method, **chosen}
            if not is_excluded(space, named):
                yield _row(space, named)


def _baselines(space: Space) -> Iterator[SweepRow]:
    """With Optuna nothing is suggested for a baseline: it has the experiment's own values."""
    for name, changes in itertools.product(space.experiments, space.baselines):
        applying = {
            key: values
            for key, values in space.varied.items()
            if not (is_below(key, changes) or is_suggested(space, key))
        }
        for chosen in _combinations(space, applying):
            named = {EXPERIMENT: name, **changes, **chosen}
            if not is_excluded(space, named):
                yield _row(space, named)


def _combinations(space: Space, varied: Mapping[str, Values]) -> Iterator[dict[str, Any]]:
    """Mappings with a value for each key: all combinations of the lists, each with all draws."""
    lists = {key: ends_of(v) for key, v in varied.items() if not isinstance(v, Domain)}
    for values in itertools.product(*lists.values()):
        for drawn in _draws(space, varied):
            chosen = dict(zip(lists, values, strict=True)) | drawn
            yield {key: chosen[key] for key in varied}


def ends_of(values: Values) -> Sequence[Any]:
    """All values of a list, the ends of a range.

    >>> from flray.sweeps.forms import parse_values
    >>> ends_of(parse_values("rounds", {"randint": [1, 9]})), ends_of(Grid((0.1, 1.0)))
    ([1, 9], (0.1, 1.0))
    """
    match values:
        case Grid():
            return values.values
        case BetweenMerges():
            return [MergePoint(index, values.number) for index in range(values.number)]
        case Categorical():
            return values.categories
        case Integer():
            return [values.lower, values.upper - 1]
        case Float():
            return [values.lower, values.upper]
    raise AssertionError(values)


def _draws(space: Space, varied: Mapping[str, Values]) -> Iterator[dict[str, Any]]:
    """The draws of a random search, each with a value for every key of `varied` that is drawn."""
    search = space.options.search
    num_samples = search.samples if type(search) is RandomSearch else 1
    for sample in range(num_samples):
        # All keys are drawn whether they apply or not, so that a baseline has the same values.
        rng = generator(getattr(search, "seed", 0), "search", sample)
        drawn = {k: _draw(v, rng) for k, v in space.varied.items() if isinstance(v, Domain)}
        yield {key: value for key, value in drawn.items() if key in varied}


def _draw(domain: Domain, rng: np.random.Generator) -> Any:
    if isinstance(domain, Categorical):  # numpy would make one array of names and numbers
        return domain.categories[int(rng.integers(len(domain.categories)))]
    value = domain.sample(random_state=rng)
    return value.item() if isinstance(value, np.generic) else value


def _row(space: Space, chosen: Mapping[str, Any]) -> SweepRow:
    """The row of the experiment and method that `chosen` names; it is not numbered yet."""
    values = {key: value for key, value in chosen.items() if key not in (EXPERIMENT, METHOD)}
    points = [value for value in values.values() if isinstance(value, MergePoint)]
    overrides = {key: value for key, value in values.items() if value not in points}
    plain = space.experiments[chosen[EXPERIMENT]]
    for key, value in values.items():
        plain = with_value(plain, key, STAND_IN if value in points else value)
    try:
        parsed = _remembered(parse_experiment(plain))
    except ExperimentError as error:
        raise ExperimentError(
            f"{error} (in the row {overrides}; `except` leaves combinations out)"
        ) from error
    if points:
        _require_tree(parsed)
    several = {EXPERIMENT: len(space.experiments) > 1, METHOD: "" not in space.methods}
    named = {key: chosen[key] for key, is_named in several.items() if is_named and key in chosen}
    return SweepRow(-1, named | overrides, parsed.plain, points[0] if points else None)


def _require_tree(experiment: Experiment) -> None:
    """Refuse a partition without a tree, between whose merges a threshold could lie."""
    pipeline = getattr(experiment.algorithm.build(), "clustering", None)
    partition = getattr(pipeline, "partition", None)
    if not isinstance(partition, Hierarchical):
        raise ExperimentError(
            f"between_merges needs partition hierarchical, got {type(partition).__name__} "
            f"({THRESHOLD})"
        )
