"""Assemble a run: from prepared data and module to a server in its run directory.

`build_server` is what a run needs. Sweeps and forecasts use its parts: one executor may serve
several federations, and one federation the servers of several algorithms.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pytorch_lightning import LightningModule

from flray.algorithms.algorithm import Branching, check_requirements
from flray.client.host import Payload, choose_engine, start_host
from flray.columns import PARAMS_SHA256, SCORE, SCORE_MODE, SCORE_UNIT, SEED
from flray.config.deciding import leaves
from flray.config.experiment import Experiment
from flray.data.datasets.own_files import file_digest
from flray.errors import ExperimentError
from flray.execution.executor import Executor, Inline
from flray.execution.federation import Federation
from flray.models.bank import ModelBank, buffers_of, params_of, stack
from flray.records.environment import environment
from flray.records.recorded import CLIENT_NAMES, FILES, GROUP_NAMES, SCORES
from flray.records.run_directory import RunDirectory
from flray.runs.preparing import Prepared, draw_module, evaluation_of, prepare, run_data
from flray.server.loop import Server, packages_of


def build_server(
    experiment: Experiment,
    parts: Prepared,
    directory: RunDirectory,
    clients: Sequence[Any] | None = None,  # Any: actor handles
) -> Server:
    """The server of a run, in its run directory, ready for its next round.

    An experiment that its method cannot run is refused before config.yaml is written. A directory
    that holds the run already is checked, and gets a further entry in environment.json.

    Args:
        experiment: The experiment, with the block that its directory has recorded.
        parts: Data and module of this experiment, from `prepare_in` for this directory.
        directory: The run directory, which may not exist yet.
        clients: Client actors that were started for it and have no data yet; None: they are started
            here if the experiment needs any.

    Raises:
        ExperimentError: The method lacks something, or the directory holds another experiment.
    """
    fed = build_federation(experiment, parts, start_executor(parts, clients))
    server = assemble(experiment, parts, fed, directory)
    open_directory(experiment, parts, directory)
    return server


def prepare_in(directory: RunDirectory, experiment: Experiment) -> tuple[Experiment, Prepared]:
    """Prepare a run that has client actors of its own, to go on with what its directory holds.

    Returns:
        The experiment with the block that the directory has recorded, if it has one, and its data
        and module.
    """
    experiment = with_recorded_block(experiment, directory)
    return experiment, prepare(experiment, experiment.settings.execution.actors)


def with_recorded_block(experiment: Experiment, directory: RunDirectory) -> Experiment:
    """The experiment with the block that its directory has recorded, unless it names one.

    The default depends on the number of actors, which may change when a run goes on; the bits of
    the run depend on the block.
    """
    if experiment.settings.execution.block is not None or not directory.holds_run():
        return experiment
    recorded = directory.config().get("execution", {})
    return _with_execution(experiment, block=recorded.get("block"))


def _with_execution(experiment: Experiment, **changes: Any) -> Experiment:  # Any: fields
    """The experiment with other values of `execution`, which change where it runs."""
    execution = replace(experiment.settings.execution, **changes)
    return replace(experiment, settings=replace(experiment.settings, execution=execution))


def open_directory(experiment: Experiment, parts: Prepared, directory: RunDirectory) -> None:
    """Make the run directory, or check that it holds this experiment, split and files.

    Records configuration, environment, the plan of the actors, the number of threads and digests of
    the user's own files: the dataset, and metadata of clients.

    Raises:
        ExperimentError: The directory holds another experiment, or one with another split or with
            other files.
    """
    evaluation = evaluation_of(experiment, parts.payload.dataset)
    recorded = environment() | {
        "plan": str(parts.plan) if parts.plan else None,
        "threads": parts.payload.settings.threads,
    }
    if evaluation.computed:  # else accuracy, for which nothing is recorded
        recorded[SCORES] = [asdict(score) for score in evaluation.score_columns]
    if names := parts.payload.timeline.at(1).client_names:
        recorded[CLIENT_NAMES] = list(names)
        if kinds := parts.payload.dataset.group_names:
            recorded[GROUP_NAMES] = list(kinds)
    if files := digests_of_files(experiment):
        recorded[FILES] = files
    execution = {**experiment.plain["execution"], "block": parts.payload.settings.block}
    plain = {**experiment.plain, "execution": execution}
    directory.resume(plain, recorded, parts.payload.timeline.digest())


def digests_of_files(experiment: Experiment) -> dict[str, str | None]:
    """SHA-256 of the files that an experiment names, by key; None: not there."""
    named = [item for item in leaves(experiment.plain).items() if item[0].endswith(".file")]
    return {key: file_digest(file) for key, file in named if isinstance(file, str)}


def assemble(
    experiment: Experiment, parts: Prepared, fed: Federation, directory: RunDirectory
) -> Server:
    """The server of an experiment; refuses what its algorithm lacks, and starts nothing.

    Args:
        fed: A federation; experiments that differ in the algorithm only may share it.
        directory: The run directory, which may not exist yet.

    Raises:
        ExperimentError: The algorithm, or one of its stages, needs what the experiment does not
            have.
    """
    settings, payload = experiment.settings, parts.payload
    data = run_data(experiment, payload.dataset, payload.timeline)
    algorithm = experiment.algorithm.build()
    check_method(experiment, fed)
    return Server(
        algorithm=algorithm,
        fed=fed,
        timeline=payload.timeline,
        evaluation=evaluation_of(experiment, payload.dataset),
        num_rounds=settings.rounds,
        directory=directory,
        facts=facts_of(experiment, payload),
        device=parts.device,
        measurements=[measure.start(data) for measure in settings.evaluate.measures],
        stop=settings.stop,
        stop_after=getattr(algorithm, "rounds_before", 0),
    )


def check_method(experiment: Experiment, fed: Federation) -> None:
    """Refuse an experiment that lacks what its method, or its `stop`, needs.

    Raises:
        ExperimentError: The message says what is missing.
    """
    settings, algorithm = experiment.settings, experiment.algorithm.build()
    check_requirements(algorithm, fed)
    check_requirements(settings.stop, fed)
    if getattr(algorithm, "rounds_before", 0) > settings.rounds:
        return
    if isinstance(algorithm, Branching):
        clustered = fed.during(max(algorithm.rounds_before, 1)).clients
        algorithm.clustering.require_number(len(clustered))
    if isinstance(algorithm, Branching) or getattr(algorithm, "returns_clusterings", False):
        for measure in settings.evaluate.measures:
            measure.check_algorithm(algorithm)


def start_executor(
    parts: Prepared, clients: Sequence[Any] | None = None
) -> Executor:  # Any: actor handles
    """Start what computes for the clients: one host in this process, or the planned client actors.

    The caller closes it.

    Args:
        parts: Data and module of an experiment; its plan decides between the two.
        clients: Client actors that were started before and have no data yet.
    """
    if parts.plan:
        from flray.execution.ray_pool import start_pool  # imports Ray

        return start_pool(parts.payload, parts.plan, clients)
    payload = parts.payload
    return Inline(start_host(payload.module, payload.dataset, payload.timeline, payload.settings))


def build_federation(experiment: Experiment, parts: Prepared, executor: Executor) -> Federation:
    """The clients of an experiment as its algorithm sees them, in round 1.

    Args:
        parts: Its data and module; the initial models are the module's weights.
        executor: Where clients are computed; several federations may share it, one at a time.
    """
    settings = experiment.settings
    initial = stack([params_of(parts.payload.module)])
    return Federation(
        timeline=parts.payload.timeline,
        # A host may not have moved the module to the server's device yet.
        initial={k: leaf.to(parts.device) for k, leaf in initial.items()},
        executor=executor,
        training=settings.train,
        aggregation=settings.aggregate,
        participation=settings.participation,
        block=parts.payload.settings.block,
        seed=settings.seed,
        on_client_failure=settings.on_client_failure,
        uses_ground_truth=settings.uses_ground_truth,
        has_example_losses=hasattr(parts.payload.module, "example_losses"),
        input_shape=parts.payload.dataset.input_shape,
        buffers=buffers_of(parts.payload.module),
        draw=lambda n: params_of(draw_module(experiment, parts.payload.dataset, n)),
    ).during(1)


def deployed_models(
    experiment: Experiment, directory: RunDirectory
) -> tuple[LightningModule, ModelBank]:
    """The module of a run, and the models that its clients use after the last round so far.

    Both are on the CPU. If clients choose among models, as in IFCA, they choose again.

    Returns:
        The module with its initial weights, and a bank: U models, and the row of each client.

    Raises:
        ExperimentError: There is no checkpoint, or its models do not have the digest of the
            summary.
    """
    inline = _with_execution(experiment, executor="inline", device="auto")
    parts = prepare(inline)
    fed = build_federation(inline, parts, start_executor(parts))
    server = assemble(inline, parts, fed, directory)
    checkpoint = directory.store(packages_of(server.algorithm)).load_latest(server.device)
    if checkpoint is None:
        raise ExperimentError(
            f"{directory.path} holds no checkpoint, so its models are not there: run it again"
        )
    bank = server.deployed(checkpoint.state, checkpoint.round)
    summary = directory.summary()
    if summary is not None and summary.get(PARAMS_SHA256) != bank.sha256():
        raise ExperimentError(
            f"the checkpoint of round {checkpoint.round} in {directory.checkpoints} does not give "
            "the models with the params_sha256 of summary.json: restore it from a copy, or run the "
            "experiment again"
        )
    params = {name: leaf.cpu() for name, leaf in bank.params.items()}
    return parts.payload.module.cpu(), replace(bank, params=params)


def facts_of(experiment: Experiment, payload: Payload) -> dict[str, str | int]:
    """What a summary contains in addition to numbers: names, and what decides the bits.

    Names of the four components, `seed`, `engine`, `device` and `block`.
    """
    names = {
        kind: experiment.plain[kind]["name"] for kind in ("algorithm", "dataset", "split", "model")
    }
    host, score = payload.settings, evaluation_of(experiment, payload.dataset).score_columns[0]
    of_score = {SCORE: score.name, SCORE_UNIT: score.unit, SCORE_MODE: score.mode}
    return {
        **names,
        **(of_score if host.scores else {}),
        SEED: experiment.settings.seed,
        "engine": choose_engine(host.engine, payload.module, host.device),
        "device": host.device,
        "block": host.block,
    }
