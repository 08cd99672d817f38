"""Rehearse an experiment: refuse what would fail in its first round, without a round.

`flray check` describes every experiment this way.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flray.client.host import Host, choose_engine, restored_torch_settings
from flray.client.scores import Score
from flray.config.experiment import Experiment
from flray.data.dataset import Ids
from flray.engines.affine import NO_BATCH, no_gradient
from flray.engines.engine import Block
from flray.engines.losses import direction_and_loss
from flray.engines.plan import plan_clients
from flray.engines.training import Gradient, Training, plain_gradient
from flray.engines.vectorized import check_stackable
from flray.errors import ClientFailure, ExperimentError, plain_if_gpu_is_full
from flray.execution.executor import Failed, Inline
from flray.execution.federation import Federation
from flray.execution.nodes import this_machine
from flray.execution.resources import check_resources
from flray.models.bank import Params
from flray.runs.assemble import build_federation, check_method, start_executor
from flray.runs.preparing import Prepared, prepare
from flray.server.evaluation import score_globally
from flray.wording import counted


def describe(experiment: Experiment) -> str:
    """One sentence about the run that an experiment would be; refuses one that would fail.

    Deals the data and trains one batch, so what a run would refuse at its start is refused here.

    Raises:
        ExperimentError: The run would be refused, for the same reason and with the same message.
    """
    parts = prepare(experiment, experiment.settings.execution.actors)
    rehearse(experiment, parts)
    payload, split = parts.payload, parts.payload.timeline.at(1)
    engine = choose_engine(payload.settings.engine, payload.module, payload.settings.device)
    if engine == "vectorized":
        check_stackable(payload.module)
    sizes = split.num_train_examples[split.clients]
    num_params = sum(p.numel() for p in payload.module.parameters())
    text = (
        f"{counted(experiment.settings.rounds, 'round')} of {experiment.algorithm.name} with "
        f"{counted(len(split.clients), 'client')} of {sizes.min()} to {sizes.max()} training "
        f"examples, {counted(num_params, 'parameter')}, engine {engine}, blocks of "
        f"{payload.settings.block}"
    )
    if parts.engine_remark:
        text += f" ({parts.engine_remark})"
    return f"{text}; {parts.plan}" if parts.plan else text


def rehearse(experiment: Experiment, parts: Prepared) -> None:
    """Refuse an experiment that this machine, its method or its model cannot run.

    Trains one batch of one client with the engine of the run, and scores the client. Resources of a
    cluster elsewhere (RAY_ADDRESS) are not checked. Torch's settings, such as its number of
    threads, are as before when it returns.

    Args:
        parts: Its data and module, whose weights do not change.

    Raises:
        ExperimentError: The message says what does not fit.
        ClientFailure: The GPU has no memory left.
    """
    if parts.plan is not None and "RAY_ADDRESS" not in os.environ:
        check_resources(parts.plan, [this_machine()])
    with restored_torch_settings(), plain_if_gpu_is_full():
        executor = start_executor(parts.in_process(block=1))
        assert isinstance(executor, Inline)
        fed = build_federation(experiment, parts, executor)
        check_method(experiment, fed)
        split = parts.payload.timeline.at(1)
        client = split.clients[split.num_train_examples[split.clients].argmax()]
        shape = parts.payload.dataset.input_shape
        _try_one_batch(executor, fed.initial, fed.training, client, shape)
        _try_hook(executor, fed.initial, experiment.algorithm.build().gradient)
        _try_scores(fed, split.test[client], parts.payload.settings.scores)


def _try_one_batch(
    executor: Inline, initial: Params, training: Training, client: int, shape: tuple[int, ...]
) -> None:
    """Train the initial model on one batch of a client."""
    host = executor.host
    batch = host.timeline.at(1).trained_on(client)[: training.batch_size]
    once = replace(training, epochs=1)

    def train(host: Host, models: Params, examples: Ids) -> None:
        plans = plan_clients([examples], once, host.seed, 1, np.array([client]))
        w0 = {name: leaf.to(host.examples.device) for name, leaf in models.items()}
        host.engine.train(Block(plans, w0, {}), once, plain_gradient)

    (output,) = executor.map(train, initial, [batch])
    if isinstance(output, Failed):
        raise ExperimentError(
            f"model {type(host.module).__name__} cannot train on {len(batch)} examples of client "
            f"{client}, inputs of the shape {shape}: {output.reason}; change the model or the data"
        ) from output.error


def _try_hook(executor: Inline, initial: Params, hook: Gradient) -> None:
    """Refuse a local equation that never asks for a gradient, or returns no direction.

    It has no memo here and no second batch, so that its other errors are left to the first round.
    """

    def step(_: Host, w: Params, hook: Gradient) -> None:
        direction_and_loss(hook, no_gradient, w, NO_BATCH, w, {})

    executor.map(step, initial, [hook])


def _try_scores(fed: Federation, test: Ids, scores: Sequence[Score]) -> None:
    """Score the initial model on the test examples of one client."""
    try:
        score_globally(fed, fed.initial_bank(), fed.clients[:1], test, scores)
    except ClientFailure as error:
        raise ExperimentError(str(error)) from error
