"""An experiment: everything that decides a result, read from YAML and checked.

`read_yaml` reads a file, `parse_experiment` binds its keys to the classes that they configure. From
Python the values may be objects: a LightningModule, a dataset, a dataclass of settings.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from flray.algorithms import ALGORITHMS
from flray.algorithms.algorithm import Branching
from flray.clustering.encoder import Encoder
from flray.config.binding import Component, bind_component, bind_dataclass
from flray.config.objects import object_component
from flray.config.overrides import with_value
from flray.config.parameters import Registry
from flray.config.reading import Plain, read_mapping
from flray.config.shipped import require_file
from flray.config.tracking import TRACKING, NoTracking
from flray.data import DATASETS, SPLITS
from flray.data.events import Event
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.execution.federation import OnClientFailure
from flray.execution.settings import Execution
from flray.measures.settings import Evaluation
from flray.measures.stopping import Stop
from flray.models import MODELS
from flray.models.mixing import Aggregation
from flray.values import FROM_DATASET, Seed, require_at_least

COMPONENTS: dict[str, Registry] = {
    "dataset": DATASETS,
    "split": SPLITS,
    "model": MODELS,
    "algorithm": ALGORITHMS,
}
INJECTED = {"model": FROM_DATASET}  # parameters that a component receives when it is built


@dataclass(frozen=True)
class Settings:
    """The keys of an experiment beside its four components; each field is a key of the YAML.

    They configure how clients train, how the server averages, how long the run takes, when models
    are evaluated and where everything is computed. `flray keys` lists them with their defaults.

    >>> settings = Settings(train=Training(lr=0.1), participation=0.1, rounds=20)
    >>> settings.train.epochs, settings.evaluate.every, settings.execution.executor
    (1, 1, 'inline')
    >>> Settings(rounds=0)
    Traceback (most recent call last):
    ValueError: rounds must be >= 1, got 0
    """

    keys_beside: ClassVar = tuple(COMPONENTS)  # further keys of the file, for messages
    train: Training = field(default_factory=Training)  # Local training of every client
    # How the server averages the clients' models
    aggregate: Aggregation = field(default_factory=Aggregation)
    participation: float = 1.0  # Share ρ of the clients that train in a round, in (0, 1]
    rounds: int = 100  # Number of rounds T
    # When the run ends before its last round. None: never
    stop: Stop | None = None
    seed: Seed = 0  # Seed of every random draw of the run
    # Changes in time: clients that join or leave, exchange their data or swap labels
    events: tuple[Event, ...] = ()
    # When and how the clients' models are evaluated
    evaluate: Evaluation = field(default_factory=Evaluation)
    # Where and how the run is computed; the method does not depend on it
    execution: Execution = field(default_factory=Execution)
    # What to do if a client crashes or its loss is not finite. drop: leave it out and count it
    on_client_failure: OnClientFailure = "raise"
    # Allow stages to read labels, planted groups or test data; such runs are marked
    uses_ground_truth: bool = False
    # Tracker that mirrors the run directory
    tracking: Annotated[Any, "tracking", TRACKING] = field(default_factory=NoTracking)

    def __post_init__(self) -> None:
        if not 0 < self.participation <= 1:
            raise ValueError(
                f"participation must be in (0, 1], got {self.participation}: "
                "it is the share of clients that train in a round"
            )
        require_at_least(self, rounds=1, seed=0)
        object.__setattr__(self, "train", self.train.over(self.rounds))
        if self.stop is not None:
            self.evaluate.check_target("stop.target", self.stop.target)
        tuning = self.evaluate.fine_tune
        if tuning is not None and tuning.lr is not None and self.train.optimizer == "module":
            raise ValueError(
                f"evaluate.fine_tune.lr does nothing with train.optimizer=module, got {tuning.lr}; "
                "leave it out or choose train.optimizer=sgd or adam"
            )


@dataclass(frozen=True)
class Experiment:
    """A checked experiment: four components that are not built yet, and the settings.

    Made by `parse_experiment`, consumed by `flray.runs`. The components are built when a run is
    assembled, because models need the shape of the dataset's images and its number of classes.
    `plain` describes the experiment completely: written as YAML and parsed again it is the same.

    >>> given = {"dataset": "digits", "split": {"name": "iid", "clients": 4}, "model": "mlp200"}
    >>> experiment = parse_experiment({**given, "algorithm": "fedavg", "rounds": 5})
    >>> experiment.settings.rounds, experiment.plain["model"]
    (5, {'name': 'mlp200', 'hidden': 200, 'dropout': 0.0})
    >>> parse_experiment(experiment.plain).plain == experiment.plain
    True
    """

    dataset: Component
    split: Component
    model: Component
    algorithm: Component
    settings: Settings
    plain: Plain = field(repr=False)  # resolved, every default filled in


def read_yaml(path: str | Path) -> Plain:
    """The keys of an experiment file, or of a shipped one by its name.

    Nothing is checked but the YAML itself; `parse_experiment` comes next.

    >>> read_yaml("demo/flhc")["dataset"]
    'digits'
    """
    return read_mapping(require_file(path), "the experiment")


def parse_experiment(plain: Plain) -> Experiment:
    """Check every key of an experiment.

    Args:
        plain: keys and values, as `read_yaml` returns them or as a Python caller writes them; a
            component is a name, a mapping with `name`, or an object.

    Raises:
        ExperimentError: if a key is unknown, missing or has a value that is not allowed. The
            message names the key, what came and what is expected.

    >>> parse_experiment({"dataset": "digits"})
    Traceback (most recent call last):
    flray.errors.ExperimentError: missing key 'split': an experiment names a dataset, a split, ...
    """
    for kind, registry in COMPONENTS.items():
        if kind not in plain:
            raise ExperimentError(
                f"missing key {kind!r}: an experiment names a dataset, a split, a model and an "
                f"algorithm; known: {', '.join(sorted(registry))}"
            )
        if is_list_of_components(plain[kind]):
            raise ExperimentError(
                f"{kind} must be one component here, got a list: a list means several experiments "
                "of `flray run` and flray.run; in a space it belongs below `space:`"
            )
    parts = {
        kind: object_component(kind, plain[kind])
        or bind_component(kind, registry, plain[kind], kind, INJECTED.get(kind, ()))
        for kind, registry in COMPONENTS.items()
    }
    rest = {key: value for key, value in plain.items() if key not in COMPONENTS}
    settings, plain_rest = bind_dataclass(Settings, rest, "")
    for kind in ("dataset", "split", "algorithm"):
        parts[kind].build()  # its own checks, now rather than after the data was loaded
    resolved = {kind: part.plain for kind, part in parts.items()} | plain_rest
    return Experiment(**parts, settings=settings, plain=resolved)


def parse_encoder(plain: Plain) -> Encoder:
    """The encoder of a file, as `flray pretrain` reads it and a signature may name it."""
    encoder: Encoder = bind_dataclass(Encoder, plain, "")[0]
    return encoder


def is_list_of_components(given: object) -> bool:
    """True for a list of names and mappings, which means one experiment for each."""
    return isinstance(given, list) and all(isinstance(item, str | dict) for item in given)


def evaluated_together(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments, each also evaluated in the rounds right after any of them clusters.

    A method is compared with FedAvg in the round after its clustering, so FedAvg needs that round
    too. Experiments that need no further round are returned as they are.
    """
    algorithms = [experiment.algorithm.build() for experiment in experiments]
    after = {a.rounds_before + 1 for a in algorithms if isinstance(a, Branching)}
    return [also_evaluated(experiment, after) for experiment in experiments]


def also_evaluated(experiment: Experiment, rounds: Collection[int]) -> Experiment:
    """The experiment with the rounds in `evaluate.also` that `evaluate.every` leaves out."""
    evaluation, last = experiment.settings.evaluate, experiment.settings.rounds
    missing = {t for t in rounds if t < last and not evaluation.is_regular(t, last)}
    if not missing:
        return experiment
    also = sorted({*evaluation.also, *missing})
    settings = replace(experiment.settings, evaluate=replace(evaluation, also=tuple(also)))
    plain = with_value(experiment.plain, "evaluate.also", also)
    return replace(experiment, settings=settings, plain=plain)
