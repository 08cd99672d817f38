"""Prepare a run: deal the data, build the module, and plan the memory of its processes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytorch_lightning import LightningModule

from flray.client.footprint import bytes_of_steps, models_at_once
from flray.client.host import HostSettings, default_threads
from flray.config.binding import look_up
from flray.config.experiment import Experiment
from flray.config.objects import Given
from flray.data.dataset import Dataset
from flray.data.events import Timeline, make_timeline
from flray.data.global_test import with_global_test
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.execution.federation import cohort_size
from flray.execution.ray_pool import Payload
from flray.execution.resources import ActorPlan, Actors, Load
from flray.execution.settings import default_block
from flray.measures.measure import RunData
from flray.models.bank import build_seeded
from flray.randomness import torch_seed

if TYPE_CHECKING:
    pass  # whose import delays a start


@dataclass(frozen=True)
class Prepared:
    """Data dealt and module built, nothing started."""

    payload: Payload
    plan: ActorPlan | None  # of the client actors, where there are any

    @property
    def device(self) -> str:
        """Where the server keeps models."""
        return "cpu" if self.plan else self.payload.settings.device


def prepare(experiment: Experiment, pool: Actors | None = None) -> Prepared:
    """Deal the data and build the module.

    Args:
        pool: actors of the run's own, among which the default block divides a cohort.
    """
    settings, execution = experiment.settings, experiment.settings.execution
    with experiment.dataset.reported():
        dataset: Dataset = experiment.dataset.build().load()
    split = deal(experiment, dataset)
    module = draw_module(experiment, dataset)
    device = execution.resolve_device()
    num_params = sum(p.numel() for p in module.parameters())
    num_heard = cohort_size(len(split.clients), settings.participation)
    own_actors = pool if execution.executor == "ray" else None
    num_hosts = own_actors.number(split.num_clients) if own_actors else 1
    block = execution.block or default_block(num_params, num_heard, device, num_hosts)
    threads = execution.threads or (
        1 if execution.executor == "ray" else default_threads(execution.engine, module, device)
    )
    host = HostSettings(
        engine=execution.engine,
        device=device,
        dtype=execution.dtype,
        num_slots=block,
        threads=threads,
        seed=settings.seed,
        callbacks=tuple(look_up("callback", {}, name) for name in execution.callbacks),
    )
    timeline = with_global_test(make_timeline(split, settings.events), dataset)
    for measure in settings.evaluate.measures:
        timeline = measure.prepare(run_data(experiment, dataset, timeline))
    if settings.evaluate.on == "global" and not len(timeline.at(1).global_test):
        raise ExperimentError(
            f"evaluate.on=global needs test images, and the dataset {experiment.dataset.name} has "
            "none; choose evaluate.on=local or a dataset with a test part"
        )
    payload = Payload(module, dataset, timeline, host)
    if execution.executor == "inline":
        return Prepared(payload, None)
    num_actors = execution.actors.number(split.num_clients)
    load = load_of(payload, settings.train.batch_size, num_heard, num_actors)
    plan = ActorPlan.of(execution.actors, execution.server, num_actors, load)
    return Prepared(payload, plan)


def run_data(experiment: Experiment, dataset: Dataset, timeline: Timeline) -> RunData:
    """The data of the run as measures see it."""
    settings = experiment.settings
    split = experiment.split.build()
    return RunData(split, dataset, timeline, bool(settings.events), settings.seed)


def load_of(payload: Payload, batch_size: int, num_heard: int, num_actors: int) -> Load:
    """What a run puts into the memory of its actors.

    Args:
        num_heard: clients of a round.
    """
    settings, split = payload.settings, payload.timeline.at(1)
    leaves = [*payload.module.parameters(), *payload.module.buffers()]
    arrays = [payload.dataset.images, split.image_ids, split.labels]
    arrays += [] if split.new_images is None else [split.new_images]
    shape = payload.dataset.image_shape
    return Load(
        data=sum(array.nbytes for array in arrays),
        model=sum(leaf.numel() * leaf.element_size() for leaf in leaves),
        block=settings.num_slots,
        at_once=models_at_once(payload.module, settings),
        activations=bytes_of_steps(payload.module, shape, batch_size, settings),
        cohort=num_heard,
        actor_blocks=-(-num_heard // (settings.num_slots * num_actors)),
        on_gpu=settings.device != "cpu",
    )


def draw_module(experiment: Experiment, dataset: Dataset, *number: int) -> LightningModule:
    """The module with its initial weights; with a number, weights drawn independently of them."""
    settings = experiment.settings
    if number and isinstance(experiment.model.target, Given):
        raise ExperimentError(
            f"{experiment.algorithm.name} draws several initial models, and a module that is built "
            "already has one: give model= a function that builds it, or its class"
        )
    return build_seeded(
        lambda: experiment.model.build(
            image_shape=dataset.image_shape, num_classes=dataset.num_classes
        ),
        torch_seed(settings.seed, "initial model", *number),
    ).to(dtype=settings.execution.dtype)


def deal(experiment: Experiment, dataset: Dataset) -> Split:
    """The split of the experiment, from its seed."""
    with experiment.split.reported():
        split: Split = experiment.split.build().split(dataset, experiment.settings.seed)
    if not any(len(split.test[i]) for i in split.clients):
        raise ExperimentError(
            f"no client has test examples (split.test={experiment.split.plain.get('test')!r}): "
            "give clients more samples or set split.test=proportional"
        )
    return split
