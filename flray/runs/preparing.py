"""Prepare a run: deal the data, build the module, and plan the memory of its processes.

Nothing is started or written. What is prepared can be pickled, so that it is computed once and sent
to where the run is computed.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from pytorch_lightning import LightningModule

from flray.client.footprint import bytes_of_steps, models_at_once
from flray.client.host import HostSettings, Payload, choose_engine, default_threads
from flray.client.scores import SCORES, ModuleScore, Score
from flray.config.binding import look_up
from flray.config.experiment import Experiment
from flray.config.objects import ReadyObject
from flray.data.dataset import Dataset
from flray.data.events import Timeline, make_timeline
from flray.data.global_test import with_global_test
from flray.data.split import Split
from flray.engines.plan import steps_per_epoch
from flray.engines.stacked_plan import slots_for
from flray.engines.training import Training
from flray.engines.vectorized import refusal
from flray.errors import ExperimentError
from flray.execution.cohort import cohort_size
from flray.execution.resources import ActorPlan, Actors, Load
from flray.execution.settings import default_block, slots_on_cpu
from flray.measures.measure import RunData
from flray.measures.settings import Evaluation
from flray.models.bank import build_seeded, trainable
from flray.models.inputs import OTHERS, given_to
from flray.randomness import torch_seed


@dataclass(frozen=True)
class Prepared:
    """Data dealt and module built; nothing is started.

    `payload` is what a host needs to train any client. `plan` tells what client actors and server
    ask of a cluster.
    """

    payload: Payload
    plan: ActorPlan | None  # Plan of the client actors; None: in process

    @property
    def device(self) -> str:
        """Where the server keeps models: on the CPU if clients are actors, else with the host."""
        return "cpu" if self.plan else self.payload.settings.device

    @property
    def engine_remark(self) -> str | None:
        """Why models are trained one after another, and how much longer that takes; None: not so.

        Not so either for models that are too large to gain by being stacked.
        """
        module, settings = self.payload.module, self.payload.settings
        reason = refusal(module)
        if not reason or choose_engine(settings.engine, module, settings.device) != "loop":
            return None
        slower = "twice" if settings.device == "cpu" else "50 times"
        return f"models are not stacked, which takes about {slower} as long: {reason}"

    def in_process(self, block: int | None = None) -> "Prepared":
        """The same run with one host in this process instead of actors.

        On a machine without a GPU the host computes on the CPU, whatever the run would use.

        Args:
            block: Clients of a job; None: as in the run.
        """
        settings = self.payload.settings
        device = settings.device if torch.cuda.is_available() else "cpu"
        settings = replace(settings, device=device)
        if block:
            settings = replace(settings, block=block, num_slots=None)
        return Prepared(replace(self.payload, settings=settings), None)


def prepare(
    experiment: Experiment, pool: Actors | None = None, dealt: tuple[Dataset, Split] | None = None
) -> Prepared:
    """Load and split the data, build the module and plan the memory of the run's processes.

    Writes and starts nothing. Equal experiments give equal data and weights, whatever `pool` is.

    Args:
        pool: Actors of the run's own; the default block divides a cohort among them. None: the
            block does not depend on the actors, as in a sweep.
        dealt: What `load_dataset` and `deal` gave an experiment with the same data and seed.

    Raises:
        ExperimentError: The parts of the experiment do not fit each other, or data are missing.
    """
    settings, execution = experiment.settings, experiment.settings.execution
    dataset = dealt[0] if dealt else load_dataset(experiment)
    split = dealt[1] if dealt else deal(experiment, dataset)
    module = draw_module(experiment, dataset)
    dataset = given_to(module, dataset, experiment.model.name)
    num_sampled = cohort_size(len(split.clients), settings.participation)
    num_actors = execution.actors.number(split.num_clients)
    is_on_ray = execution.executor == "ray"
    num_hosts = num_actors if pool is not None and is_on_ray else 1
    host = _host_settings(experiment, module, num_sampled, num_hosts)
    host = replace(host, scores=_computed_scores(experiment, dataset, module))
    host = replace(host, num_slots=_num_slots(host, split, settings.train))
    if dataset.scaled is not None and dataset.scaled.any():
        dataset = dataset.standardised(split.trained_rows)
    payload = Payload(module, dataset, _timeline(experiment, dataset, split), host)
    if not is_on_ray:
        return Prepared(payload, None)
    load = load_of(payload, settings.train.batch_size, num_sampled, num_actors)
    return Prepared(payload, ActorPlan.of(execution.actors, execution.server, num_actors, load))


def _host_settings(
    experiment: Experiment, module: LightningModule, num_sampled: int, num_hosts: int
) -> HostSettings:
    """How a host computes; what the experiment leaves open follows from model, device and cohort.

    Args:
        module: Its model, whose size decides the default block.
        num_sampled: Clients that train in a round.
        num_hosts: Hosts among which the default block divides them.
    """
    execution = experiment.settings.execution
    device = execution.resolve_device()
    num_params = sum(p.numel() for p in module.parameters())
    threads = execution.threads
    if threads is None:
        is_on_ray = execution.executor == "ray"
        threads = 1 if is_on_ray else default_threads(execution.engine, module, device)
    return HostSettings(
        engine=execution.engine,
        device=device,
        dtype=execution.dtype,
        block=execution.block or default_block(num_params, num_sampled, device, num_hosts),
        threads=threads,
        seed=experiment.settings.seed,
        callbacks=tuple(look_up("callback", {}, name) for name in execution.callbacks),
        tf32=execution.precision == "tf32",
    )


def _num_slots(host: HostSettings, split: Split, training: Training) -> int:
    """Clients of a block that are trained together, by the cache of a CPU or the split's sizes."""
    if host.device == "cpu":
        return slots_on_cpu(host.block)
    sizes = np.array([len(split.trained_on(i)) for i in split.clients])
    return slots_for(steps_per_epoch(sizes, training), host.block)


def evaluation_of(experiment: Experiment, dataset: Dataset) -> Evaluation:
    """How an experiment is evaluated, with the default score of the dataset's task."""
    return experiment.settings.evaluate.of_task(has_classes=dataset.num_classes > 0)


def _computed_scores(
    experiment: Experiment, dataset: Dataset, module: LightningModule
) -> tuple[Score, ...]:
    """The scores that hosts compute.

    Refuses scores that do not fit the targets, or that the module does not define.
    """
    has_classes, evaluation = dataset.num_classes > 0, evaluation_of(experiment, dataset)
    fitting = [n for n, s in SCORES.items() if s.needs_classes in (None, has_classes)]
    kinds = {True: "classes", False: "numbers"}
    for score in evaluation.scores:
        if getattr(score, "needs_classes", None) is (not has_classes):
            raise ExperimentError(
                f"evaluate.scores: {score.name} is a score of {kinds[not has_classes]}, and the "
                f"targets of {dataset.name} are {kinds[has_classes]}; choose among "
                f"{', '.join(fitting)}"
            )
        if isinstance(score, ModuleScore) and not hasattr(module, "scores"):
            raise ExperimentError(
                f"evaluate.scores: {score.key} is a score of the module's own, and the model "
                f"{experiment.model.name} does not define scores(batch) -> {{name: (B,) values}}"
            )
    return evaluation.computed


def _timeline(experiment: Experiment, dataset: Dataset, split: Split) -> Timeline:
    """The splits of all phases of a run, with what its evaluation needs beside the clients' own."""
    settings, evaluate = experiment.settings, experiment.settings.evaluate
    timeline = with_global_test(make_timeline(split, settings.events), dataset)
    for measure in evaluate.measures:
        timeline = measure.prepare(run_data(experiment, dataset, timeline))
    if evaluate.on == "global" and not len(timeline.at(1).global_test):
        raise ExperimentError(
            f"evaluate.on=global needs test images that nobody trains on, and the dataset "
            f"{experiment.dataset.name} has none; choose evaluate.on=local, or a dataset with a "
            "test part and split.pool=train"
        )
    return timeline


def run_data(experiment: Experiment, dataset: Dataset, timeline: Timeline) -> RunData:
    """The data of a run as measures of clusterings see it, ground truth included."""
    settings = experiment.settings
    split = experiment.split.build()
    return RunData(split, dataset, timeline, bool(settings.events), settings.seed)


def load_of(payload: Payload, batch_size: int, num_sampled: int, num_actors: int) -> Load:
    """What a run keeps in the memory of its actors.

    Args:
        payload: Module, data and settings of a host.
        batch_size: Examples of a client's batch.
        num_sampled: Clients that train in a round.
        num_actors: Actors among which their blocks are divided.
    """
    settings, split = payload.settings, payload.timeline.at(1)
    leaves = [*payload.module.parameters(), *payload.module.buffers()]
    arrays = [payload.dataset.images, split.image_ids, split.labels]
    arrays += [] if split.new_images is None else [split.new_images]
    shape = payload.dataset.input_shape
    return Load(
        data=sum(array.nbytes for array in arrays),
        model=sum(leaf.numel() * leaf.element_size() for leaf in leaves),
        block=settings.block,
        at_once=models_at_once(payload.module, settings),
        activations=bytes_of_steps(payload.module, shape, batch_size, settings),
        cohort=num_sampled,
        actor_blocks=-(-num_sampled // (settings.block * num_actors)),
        on_gpu=settings.device != "cpu",
    )


def draw_module(experiment: Experiment, dataset: Dataset, *number: int) -> LightningModule:
    """The module with its initial weights, which depend on the seed and `number` alone.

    Args:
        dataset: Its data, for the shape of inputs and the number of classes.
        number: Number of a further initial model, drawn independently; none: the first one.

    Raises:
        ExperimentError: A further model is asked for, and the experiment has a module built
            already; or the module has nothing to train.
    """
    settings = experiment.settings
    if number and isinstance(experiment.model.target, ReadyObject):
        raise ExperimentError(
            f"{experiment.algorithm.name} draws several initial models, and a module that is built "
            "already has one: give model= a function that builds it, or its class"
        )
    facts = experiment.model.asked_of(dataset)
    if facts.get("num_classes") == 0:
        raise ExperimentError(
            f"model {experiment.model.name} classifies, and the targets of {dataset.name} are "
            f"numbers; {OTHERS}, or a model of your own with num_outputs"
        )
    seed = torch_seed(settings.seed, "initial model", *number)
    module = build_seeded(lambda: experiment.model.build(**facts), seed)
    if not trainable(module):
        raise ExperimentError(
            f"model {experiment.model.name} has no parameter that can be trained; assign layers to "
            "attributes of the module, and leave requires_grad true for at least one parameter"
        )
    return module.to(dtype=settings.execution.dtype)


def load_dataset(experiment: Experiment) -> Dataset:
    """The dataset of an experiment, which its seed does not change."""
    with experiment.dataset.reported():
        dataset = experiment.dataset.build().load()
    if not isinstance(dataset, Dataset):
        raise ExperimentError(
            f"dataset {experiment.dataset.name}: load must return a Dataset, got "
            f"{type(dataset).__name__}; flray.from_tensors(x_train, y_train, x_test, y_test) "
            "makes one"
        )
    return dataset


def deal(experiment: Experiment, dataset: Dataset) -> Split:
    """Split a dataset among the clients of an experiment by its seed.

    Raises:
        ExperimentError: The split refuses the dataset, or no client has test examples.
    """
    with experiment.split.reported():
        split = experiment.split.build().split(dataset, experiment.settings.seed)
    if not isinstance(split, Split):
        raise ExperimentError(
            f"split {experiment.split.name}: split must return a Split, got {type(split).__name__}"
        )
    if not any(len(split.test[i]) for i in split.clients):
        raise ExperimentError(
            f"no client has test examples (split.test={experiment.split.plain.get('test')!r}): "
            "give clients more samples or set split.test=proportional"
        )
    return split
