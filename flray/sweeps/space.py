"""A space: experiments, the keys that a sweep varies, and how it searches; read from YAML.

docs/spaces.md has the keys of a space; `forms.py` has the values that it may give a key.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ray.tune.search.sample import Categorical, Domain

from flray.columns import VALIDATION_ACCURACY_MEAN, ScoreColumn, score_column
from flray.config.binding import bind_dataclass
from flray.config.experiment import parse_experiment, read_yaml
from flray.config.overrides import override
from flray.config.reading import Plain, read_mapping
from flray.config.shipped import SPACES, require_file
from flray.errors import ExperimentError
from flray.measures.settings import Evaluation
from flray.sweeps.forms import Grid, Values, parse_values
from flray.sweeps.parts import overridden, part_of
from flray.values import Seed, require_at_least, shown
from flray.wording import suggestion


@dataclass(frozen=True)
class GridSearch:
    """Every combination of the lists once; nothing may be drawn."""


@dataclass(frozen=True)
class RandomSearch:
    """The same draws for every combination of the lists, so that rows can be compared in pairs.

    Draw k depends on `seed`, k and the drawn keys: more samples add draws and change none.
    """

    samples: int  # Number of draws
    seed: Seed = 0  # Seed of the draws

    def __post_init__(self) -> None:
        require_at_least(self, samples=1, seed=0)


@dataclass(frozen=True)
class OptunaSearch(RandomSearch):
    """Each sample is suggested by those before it; lists are choices, every sample has all seeds.

    Akiba et al.: Optuna. KDD 2019, arXiv 1907.10902; its sampler is TPE.
    """


@dataclass(frozen=True)
class NoScheduler:
    """Every trial runs to its end; rows may share what they train."""


@dataclass(frozen=True)
class Asha:
    """Stop the worse trials early (Li 2020, arXiv:1810.05934); every row is then a run.

    Trials are compared by their metric after 1, r, r², ... times `grace` rounds, where r is
    `reduction`: `scheduler: {name: asha, grace: 5, reduction: 3}`.
    """

    grace: int = 1  # Rounds that every trial runs before it may be stopped
    reduction: int = 3  # One in this many trials continues at each rung

    def __post_init__(self) -> None:
        require_at_least(self, grace=1, reduction=2)


SEARCHES: dict[str, type] = {
    "grid": GridSearch,
    "random": RandomSearch,
    "optuna": OptunaSearch,
}
SCHEDULERS: dict[str, type] = {"asha": Asha, "none": NoScheduler}


@dataclass(frozen=True)
class Options:
    """How a sweep searches, and what counts as best: the keys beside `experiment` and `space`.

        experiment: flhc/mnist_label_swap
        space: {algorithm.rounds_before: [5, 10], seeds: 3}
        baseline: {algorithm: fedavg}
        search: {name: optuna, samples: 20}
        metric: validation_accuracy_mean

    >>> space = read_space({"experiment": {"dataset": "digits"}, "space": {"train.lr": [0.1, 1]}},
    ...                    ["search={name: optuna, samples: 20}", "concurrency=4"])
    >>> space.options.search, space.options.mode
    (OptunaSearch(samples=20, seed=0), 'max')
    """

    # Key of summary.json by which rows are ranked; test data choose nothing. Unless given, the
    # first of evaluate.scores on validation parts
    metric: str = VALIDATION_ACCURACY_MEAN
    # Whether large (max) or small (min) values of the metric are better. Unless given, the
    # direction of its score
    mode: Literal["max", "min"] = "max"
    # Any: one of the registered classes above

    # How configurations are chosen from the space
    search: Annotated[Any, "search", SEARCHES] = field(default_factory=GridSearch)
    # Whether and how worse trials are stopped early
    scheduler: Annotated[Any, "scheduler", SCHEDULERS] = field(default_factory=NoScheduler)
    concurrency: int | None = None  # Trials that run at a time. None: as many as fit
    # Folder of shared work, which other sweeps may use. None: a folder of this sweep
    cache: str | None = None

    def __post_init__(self) -> None:
        require_at_least(self, concurrency=1)


@dataclass(frozen=True)
class Space:
    """What a sweep varies, checked.

    >>> space = parse_space({"experiment": {"dataset": "digits"}, "space": {"train.lr": [0.1, 1]}})
    >>> space.varied, space.options.metric
    ({'train.lr': Grid(values=(0.1, 1))}, 'validation_accuracy_mean')
    """

    experiments: dict[str, Plain]  # by name
    varied: dict[str, Values]  # by dotted key
    methods: dict[str, dict[str, Values]]  # keys that each sets, by name; {"": {}}: none are named
    excluded: tuple[dict[str, tuple[Any, ...]], ...]  # a row that matches all keys of one is out
    baselines: tuple[Plain, ...]  # keys that further rows set
    options: Options
    plain: Plain = field(repr=False)  # resolved space, for space.yaml

    @property
    def is_scheduled(self) -> bool:
        """True if a scheduler stops trials by their rank; each row then has a run of its own.

        Sharing is off because a scheduler compares rounds as they happen.
        """
        return not isinstance(self.options.scheduler, NoScheduler)


OPTIONS = tuple(Options.__dataclass_fields__)
KNOWN = ("experiment", "methods", "space", "except", "baseline", *OPTIONS)
METHOD, EXPERIMENT, TOLD = "method", "experiment", "told"


def read_space(given: Path | Plain, overrides: Sequence[str] = ()) -> Space:
    """The space of a file or a mapping, with overrides applied and every key checked.

    Experiment files are looked for from the space's folder, or the current one.

    Args:
        given: A file, the name of a space that comes with flray, or the content of one.
        overrides: `key=value`, for a key of the space, of its `space`, or of its experiments, where
            it holds for methods and baselines with values of their own too;
            `methods=[...]` and `splits=[...]` choose some of its methods and experiments.

    Raises:
        ExperimentError: There is no such file, or a key or value is wrong.

    >>> space = read_space({"experiment": {"dataset": "digits"}, "space": {"train.lr": [0.1, 1]}},
    ...                    ["train.lr=[0.5]", "concurrency=2", "rounds=3"])
    >>> space.varied, space.options.concurrency, space.experiments["experiment"]["rounds"]
    ({'train.lr': Grid(values=(0.5,))}, 2, 3)
    """
    folder = Path()
    if isinstance(given, Path):
        file = require_file(given, SPACES)
        given, folder = read_mapping(file, "the space"), file.resolve().parent
    plain, rest = _overridden(*part_of(given, overrides))
    return parse_space(overridden(plain, rest), folder, rest)


def parse_space(plain: Plain, folder: Path = Path(), overrides: Sequence[str] = ()) -> Space:
    """The space of a mapping, with every key checked; `read_space` also applies its overrides.

    Experiments themselves are checked when rows are made of them (`flray.sweeps.rows`).

    Args:
        folder: Where files of experiments are looked for.
        overrides: `key=value` for keys of the experiments.

    Raises:
        ExperimentError: A key or value is wrong.
    """
    for key in plain:
        if key not in KNOWN:
            raise ExperimentError(_unknown_key(key, KNOWN, "of a space"))
    given = _require_mapping("space", plain.get("space", {}))
    experiments = _experiments(plain, folder, overrides)
    varied = {key: parse_values(key, value) for key, value in given.items() if key != "seeds"}
    if "seeds" in given:
        varied["seed"] = _seeds(given, experiments)
    plain_options = {key: plain[key] for key in OPTIONS if key in plain}
    options, resolved = bind_dataclass(Options, _ranking(experiments, plain_options), "")
    methods = _methods(plain.get("methods", {}))
    _check_search(varied, options, len(experiments) * len(methods))
    names = {EXPERIMENT: Grid(tuple(experiments)), METHOD: Grid(tuple(methods))}
    excluded = _excluded(plain.get("except", []), {**varied, **names})
    baselines = _baselines(plain.get("baseline", []))
    kept = {key: plain[key] for key in ("methods", "except") if plain.get(key)}
    kept = {"except": [], "baseline": list(baselines)} | kept
    everything = {"experiment": experiments, "space": given} | kept | resolved
    return Space(experiments, varied, methods, excluded, baselines, options, everything)


def _ranking(experiments: Mapping[str, Plain], given: Plain) -> Plain:
    """The options with the metric and the mode that follow from `evaluate.scores`."""
    evaluate = next(iter(experiments.values())).get("evaluate", {})
    scores = bind_dataclass(Evaluation, evaluate, "evaluate")[0].score_columns
    metric = given.get("metric", str(scores[0].validation))
    column = score_column(str(metric), scores)
    mode = column.score.mode if isinstance(column, ScoreColumn) else "max"
    return {"metric": metric, "mode": mode} | given


def _overridden(plain: Plain, overrides: Sequence[str]) -> tuple[Plain, list[str]]:
    """The space with its own overrides set, and the overrides of its experiments."""
    plain = override(plain, [item for item in overrides if item.startswith("space=")])
    varied = dict(_require_mapping("space", plain.get("space") or {}))
    of_space: list[str] = []
    of_experiments: list[str] = []
    for item in overrides:
        key, separator, text = item.partition("=")
        name = key.removeprefix("space.")
        if not separator or not name:
            raise ExperimentError(f"expected key=value, got {shown(item)}, as in train.lr=0.1")
        if key != name or name in (*varied, "seeds"):
            for same in {"seed": ("seeds",), "seeds": ("seed",)}.get(name, ()):
                varied.pop(same, None)
            varied[name] = override({}, [f"value={text}"])["value"]
        elif key.split(".")[0] in KNOWN:
            of_space.append(item)
        else:
            of_experiments.append(item)
    return override(plain, of_space) | {"space": varied}, of_experiments


def _experiments(plain: Plain, folder: Path, overrides: Sequence[str]) -> dict[str, Plain]:
    """The experiments by name: of files, of one experiment's keys, or of a resolved space."""
    given = plain.get("experiment")
    if isinstance(given, Mapping) and given and not _is_experiment(given):
        named = {str(name): dict(_require_mapping(name, keys)) for name, keys in given.items()}
    elif isinstance(given, Mapping) and given:
        named = {"experiment": dict(given)}
    else:
        files = [given] if isinstance(given, str) else given
        if not isinstance(files, list) or not files or not all(isinstance(f, str) for f in files):
            raise ExperimentError(
                "experiment must be a file, a list of files or an experiment's keys, "
                f"got {shown(given)}; files are looked for from the folder of the space"
            )
        named = {Path(file).stem: read_yaml(_beside(file, folder)) for file in files}
        if len(named) < len(files):
            raise ExperimentError(f"two experiment files have one name: {files}; rename one")
    return {name: override(keys, overrides) for name, keys in named.items()}


def _beside(file: str, folder: Path) -> str | Path:
    """The file in the folder of the space, or else a shipped experiment of that name."""
    return folder / file if os.path.isfile(folder / file) else file


def _is_experiment(given: Mapping[str, Any]) -> bool:
    """True for the keys of one experiment; a resolved space has several by name."""
    return "dataset" in given or not all(isinstance(value, Mapping) for value in given.values())


def _seeds(given: Mapping[str, Any], experiments: Mapping[str, Plain]) -> Grid:
    """The seeds that `seeds: n` stands for, from the experiments' own seed on."""
    if "seed" in given:
        raise ExperimentError("space names both seed and seeds; leave one out")
    number = given["seeds"]
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ExperimentError(f"seeds must be a whole number >= 1, got {shown(number)}")
    firsts = {parse_experiment(plain).settings.seed for plain in experiments.values()}
    if len(firsts) > 1:
        raise ExperimentError(
            f"seeds counts from the experiment's seed, but the experiments start at "
            f"{sorted(firsts)}; list the seeds instead"
        )
    first = firsts.pop()
    return Grid(tuple(range(first, first + number)))


def _check_search(varied: Mapping[str, Values], options: Options, num_experiments: int) -> None:
    """Refuse a search that does not fit what the space varies."""
    drawn = [key for key, values in varied.items() if isinstance(values, Domain)]
    if drawn and isinstance(options.search, GridSearch):
        raise ExperimentError(
            f"space.{drawn[0]} is drawn at random, but search is grid; give a list, linspace or "
            "logspace, or set search={name: random, samples: 20} or {name: optuna, samples: 20}"
        )
    if not isinstance(options.search, OptunaSearch):
        if not drawn and isinstance(options.search, RandomSearch):
            raise ExperimentError(
                "search is random, but the space has nothing to draw; use uniform, loguniform, "
                "choice or randint, or leave search out"
            )
        return
    if num_experiments > 1:
        raise ExperimentError(
            "search optuna looks for the best of one experiment and method, got "
            f"{num_experiments} of them"
        )
    if all(isinstance(v, Grid) and len(v.values) < 2 for k, v in varied.items() if k != "seed"):
        raise ExperimentError("search is optuna, but the space has nothing to choose from")


def _excluded(
    given: object, varied: Mapping[str, Values]
) -> tuple[dict[str, tuple[Any, ...]], ...]:
    """What `except` leaves out: the values of each key, a list or a single one."""
    if not isinstance(given, list):
        raise ExperimentError(f"except must be a list of mappings from keys, got {shown(given)}")
    patterns = []
    for index, item in enumerate(given):
        where = f"except[{index}]"
        pattern = _require_mapping(where, item)
        patterns.append({k: tuple(v) if isinstance(v, list) else (v,) for k, v in pattern.items()})
        for key, wanted in patterns[-1].items():
            if key not in varied:
                raise ExperimentError(_unknown_key(key, varied, f"in {where}"))
            values = varied[key]
            if not isinstance(values, Grid | Categorical):
                raise ExperimentError(f"{where}: the values of {key} are not known before")
            choices = values.values if isinstance(values, Grid) else values.categories
            if absent := [value for value in wanted if value not in choices]:
                raise ExperimentError(
                    f"{where}: {key} is never {shown(absent[0])}; it is one of "
                    f"{', '.join(map(str, choices))}"
                )
    return tuple(patterns)


def _methods(given: object) -> dict[str, dict[str, Values]]:
    """The values of each key that a method sets, by its name; `told` is for readers alone."""
    methods = {}
    for name, keys in _require_mapping("methods", given).items():
        method = _require_mapping(f"methods.{name}", keys)
        if not any(str(key).split(".")[0] == "algorithm" for key in method):
            raise ExperimentError(
                f"methods.{name} must name its algorithm, as in {{algorithm: fedavg}}, got "
                f"{shown(dict(method))}"
            )
        values = {k: parse_values(k, v) for k, v in method.items() if k != TOLD}
        for key, domain in values.items():
            if isinstance(domain, Domain):
                raise ExperimentError(f"methods.{name}.{key}: a method's values are listed")
        methods[str(name)] = values
    return methods or {"": {}}


def _baselines(given: object) -> tuple[Plain, ...]:
    listed = given if isinstance(given, list) else [given]
    return tuple(dict(_require_mapping("baseline", keys)) for keys in listed)


def _require_mapping(where: object, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ExperimentError(f"{where} must be a mapping from keys to values, got {shown(given)}")
    return given


def _unknown_key(key: str, known: Collection[str], where: str) -> str:
    names = ", ".join(known) or "none"
    return f"unknown key {shown(key)} {where}{suggestion(key, known)}; known: {names}"
