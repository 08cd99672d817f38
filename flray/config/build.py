"""Build an experiment: from checked configuration to a server ready to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pytorch_lightning import LightningModule

from flray.algorithms.algorithm import check_requirements
from flray.client.footprint import bytes_of_steps, models_at_once
from flray.client.host import HostSettings, choose_engine, default_threads, start_host
from flray.columns import PARAMS_SHA256, SEED
from flray.config.binding import look_up
from flray.config.experiment import Experiment, parse_experiment
from flray.config.objects import Given
from flray.data.dataset import Dataset
from flray.data.events import make_timeline, with_global_test
from flray.data.similar import with_similar
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.execution.executor import Executor, Inline
from flray.execution.federation import Federation, Oracle, cohort_size
from flray.execution.ray_pool import Payload, start_pool
from flray.execution.resources import ActorPlan, Actors, Load
from flray.execution.settings import default_block
from flray.models.bank import ModelBank, buffers_of, build_seeded, params_of, stack
from flray.randomness import torch_seed
from flray.records.deciding import with_block_of
from flray.records.environment import environment
from flray.records.lock import locked
from flray.records.run_directory import RunDirectory
from flray.server.actor import Run, run_on_actors, start_processes
from flray.server.evaluation import RoundRow
from flray.server.loop import Server, ignore, never, packages_of
from flray.server.summary import checked_summary

if TYPE_CHECKING:
    import pandas as pd  # whose import delays a start


@dataclass(frozen=True)
class Result:
    """A run directory read back."""

    path: Path
    summary: dict[str, Any] | None  # Any: JSON; None when the run was stopped before its last round
    rounds: "pd.DataFrame"
    clients: "pd.DataFrame"


def run_experiment(
    experiment: Experiment,
    out: Path,
    resume: bool = False,
    on_round: Callable[[RoundRow], None] = ignore,
    should_stop: Callable[[], bool] = never,
) -> Result:
    """Run an experiment into the folder `out`; with resume, go on where it stopped."""
    directory = RunDirectory(out.absolute())
    (directory.check_resume if resume else directory.check_start)(experiment.plain)
    if not directory.is_finished(experiment.plain):
        build = partial(build_server, experiment)
        with locked(directory.path):
            if experiment.settings.execution.executor == "ray":
                threads = experiment.settings.execution.threads or 1
                processes = start_processes(plan_of(experiment, directory), threads)
                run_on_actors(Run(build, directory.path, on_round, should_stop), processes)
            else:
                build(directory, on_round, should_stop).run()
    return Result(out, checked_summary(directory), directory.rounds(), directory.clients())


def plan_of(experiment: Experiment, directory: RunDirectory) -> ActorPlan:
    """What the actors of an experiment ask for; its data are dealt to know it."""
    recorded = with_recorded_block(experiment, directory)
    plan = prepare(recorded, recorded.settings.execution.actors).plan
    assert plan is not None  # of executor ray
    return plan


def build_server(
    experiment: Experiment,
    directory: RunDirectory,
    on_round: Callable[[RoundRow], None],
    should_stop: Callable[[], bool],
    clients: Sequence[Any] | None = None,  # Any: actor handles
) -> Server:
    """Everything an experiment needs; refuses before the run directory is made.

    Args:
        clients: client actors that were started for it and have no data yet.
    """
    experiment = with_recorded_block(experiment, directory)
    parts = prepare(experiment, experiment.settings.execution.actors)
    fed = build_federation(experiment, parts, start_executor(parts, clients))
    server = assemble(experiment, parts, fed, directory)
    open_directory(experiment, parts, directory)
    return replace(server, on_round=on_round, should_stop=should_stop)


def with_recorded_block(experiment: Experiment, directory: RunDirectory) -> Experiment:
    """The experiment with the block that its directory has recorded, unless it names one.

    The default follows the number of actors, with which a run may go on; its bits follow the block.
    """
    if experiment.settings.execution.block is not None or not directory.holds_run():
        return experiment
    return parse_experiment(dict(with_block_of(directory.config(), experiment.plain)))


def open_directory(experiment: Experiment, parts: "Prepared", directory: RunDirectory) -> None:
    """Make the run directory, or check that it holds this experiment."""
    recorded = environment() | {
        "plan": str(parts.plan) if parts.plan else None,
        "threads": parts.payload.settings.threads,
    }
    execution = {**experiment.plain["execution"], "block": parts.payload.settings.num_slots}
    plain = {**experiment.plain, "execution": execution}
    directory.resume(plain, recorded, parts.payload.timeline.digest())


def assemble(
    experiment: Experiment, parts: "Prepared", fed: Federation, directory: RunDirectory
) -> Server:
    """The server of an experiment over a federation, which experiments alike but for the algorithm
    may share."""
    settings, drift, dataset = experiment.settings, None, parts.payload.dataset
    if settings.evaluate.drift is not None:
        split = experiment.split.build()
        drift = settings.evaluate.drift.between_clients(split, dataset, settings.seed)
    algorithm = experiment.algorithm.build()
    check_requirements(algorithm, fed)
    return Server(
        algorithm=algorithm,
        fed=fed,
        timeline=parts.payload.timeline,
        evaluation=settings.evaluate,
        num_rounds=settings.rounds,
        directory=directory,
        facts=facts_of(experiment, parts.payload),
        device=parts.device,
        drift=drift,
    )


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
    if settings.evaluate.drift is not None:
        settings.evaluate.drift.check(experiment.split.build(), dataset, bool(settings.events))
    if settings.evaluate.robustness is not None:
        timeline = with_similar(timeline, settings.evaluate.robustness, settings.seed)
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


def start_executor(
    parts: Prepared, clients: Sequence[Any] | None = None
) -> Executor:  # Any: actor handles
    if parts.plan:
        return start_pool(parts.payload, parts.plan, clients)
    payload = parts.payload
    return Inline(start_host(payload.module, payload.dataset, payload.timeline, payload.settings))


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


def build_federation(experiment: Experiment, parts: Prepared, executor: Executor) -> Federation:
    settings, split = experiment.settings, parts.payload.timeline.at(1)
    initial = stack([params_of(parts.payload.module)])
    return Federation(
        clients=split.clients,
        holdout=np.setdiff1d(split.holdout, split.absent),
        num_clients=split.num_clients,
        num_public=len(split.server),
        num_examples=split.num_train_examples,
        # On the server's device, whether or not a host has moved the module there yet.
        initial={k: leaf.to(parts.device) for k, leaf in initial.items()},
        executor=executor,
        training=settings.train,
        aggregation=settings.aggregate,
        participation=settings.participation,
        block=parts.payload.settings.num_slots,
        seed=settings.seed,
        on_client_failure=settings.on_client_failure,
        ground_truth=Oracle(split) if settings.uses_ground_truth else None,
        has_example_losses=hasattr(parts.payload.module, "example_losses"),
        buffers=buffers_of(parts.payload.module),
        draw=lambda n: params_of(draw_module(experiment, parts.payload.dataset, n)),
    )


def deployed_models(
    experiment: Experiment, directory: RunDirectory
) -> tuple[LightningModule, ModelBank]:
    """The module of a run, and the model that each client uses after its last round so far.

    Both are on the CPU. An algorithm whose clients choose among models lets them choose again.
    """
    execution = replace(experiment.settings.execution, executor="inline", device="auto")
    inline = replace(experiment, settings=replace(experiment.settings, execution=execution))
    parts = prepare(inline)
    server = assemble(
        inline, parts, build_federation(inline, parts, start_executor(parts)), directory
    )
    found = directory.store(packages_of(server.algorithm)).load_latest(server.device)
    if found is None:
        raise ExperimentError(
            f"{directory.path} holds no checkpoint, so its models are not there: run it again"
        )
    bank = server.deployed(found.state, found.round)
    summary = directory.summary()
    if summary is not None and summary.get(PARAMS_SHA256) != bank.sha256():
        raise ExperimentError(
            f"the checkpoint of round {found.round} in {directory.checkpoints} does not give the "
            f"models with the params_sha256 of summary.json: restore it from a copy, or run the "
            "experiment again"
        )
    params = {name: leaf.cpu() for name, leaf in bank.params.items()}
    return parts.payload.module.cpu(), ModelBank(params, bank.owner)


def facts_of(experiment: Experiment, payload: Payload) -> dict[str, str | int]:
    """What a summary says of the run beside its numbers: names, and what decides its bits."""
    names = {
        kind: experiment.plain[kind]["name"] for kind in ("algorithm", "dataset", "split", "model")
    }
    host = payload.settings
    return {
        **names,
        SEED: experiment.settings.seed,
        "engine": choose_engine(host.engine, payload.module, host.device),
        "device": host.device,
        "block": host.num_slots,
    }
