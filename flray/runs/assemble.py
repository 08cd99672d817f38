"""Assemble a run: from prepared data and module to a server in its run directory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytorch_lightning import LightningModule

from flray.algorithms.algorithm import check_requirements
from flray.client.host import Payload, choose_engine, start_host
from flray.columns import PARAMS_SHA256, SEED
from flray.config.deciding import with_block_of
from flray.config.experiment import Experiment, parse_experiment
from flray.errors import ExperimentError
from flray.execution.executor import Executor, Inline
from flray.execution.federation import Federation
from flray.execution.ray_pool import start_pool
from flray.models.bank import ModelBank, buffers_of, params_of, stack
from flray.records.environment import environment
from flray.records.run_directory import RunDirectory
from flray.server.evaluation import RoundRow
from flray.server.loop import Server, packages_of

if TYPE_CHECKING:
    pass  # whose import delays a start
from flray.runs.preparing import Prepared, draw_module, prepare, run_data


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
    settings, payload = experiment.settings, parts.payload
    data = run_data(experiment, payload.dataset, payload.timeline)
    algorithm = experiment.algorithm.build()
    check_requirements(algorithm, fed)
    return Server(
        algorithm=algorithm,
        fed=fed,
        timeline=payload.timeline,
        evaluation=settings.evaluate,
        num_rounds=settings.rounds,
        directory=directory,
        facts=facts_of(experiment, payload),
        device=parts.device,
        measurements=[measure.start(data) for measure in settings.evaluate.measures],
    )


def start_executor(
    parts: Prepared, clients: Sequence[Any] | None = None
) -> Executor:  # Any: actor handles
    if parts.plan:
        return start_pool(parts.payload, parts.plan, clients)
    payload = parts.payload
    return Inline(start_host(payload.module, payload.dataset, payload.timeline, payload.settings))


def build_federation(experiment: Experiment, parts: Prepared, executor: Executor) -> Federation:
    settings = experiment.settings
    initial = stack([params_of(parts.payload.module)])
    return Federation(
        timeline=parts.payload.timeline,
        # On the server's device, whether or not a host has moved the module there yet.
        initial={k: leaf.to(parts.device) for k, leaf in initial.items()},
        executor=executor,
        training=settings.train,
        aggregation=settings.aggregate,
        participation=settings.participation,
        block=parts.payload.settings.num_slots,
        seed=settings.seed,
        on_client_failure=settings.on_client_failure,
        uses_ground_truth=settings.uses_ground_truth,
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
