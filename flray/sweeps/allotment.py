"""Resources of a trial: bundles of CPUs and GPUs, and the refusal of what can never fit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flray.config.experiment import Experiment
from flray.errors import ExperimentError
from flray.execution.resources import ROUNDING, check_resources
from flray.runs.preparing import prepare
from flray.sweeps.keys import device_of
from flray.sweeps.space import Options

Bundle = dict[str, float]
Nodes = Sequence[Mapping[str, float]]  # the resources of each machine of the cluster


def bundles(experiment: Experiment, options: Options, nodes: Nodes) -> list[Bundle]:
    """The resources of a trial, as Tune asks for them.

    The trial's own process comes first, then a bundle for each client actor it will start. A trial
    in process has `execution.threads` CPUs and, if the cluster has GPUs, a share of one: with
    `concurrency` trials at a time, an equal share of all GPUs, at most one.

    Args:
        experiment: The experiment of the trial's row.
        options: Options of the space, of which `concurrency` counts here.
        nodes: The resources of each machine of the cluster.

    Raises:
        ExperimentError: The cluster can never provide them; the message has the sum.
    """
    if experiment.settings.execution.executor == "inline":
        return [_in_process(experiment, options.concurrency, nodes)]
    plan = prepare(experiment).plan
    assert plan is not None  # executor ray has a plan
    plan = replace(plan, server=replace(plan.server, num_cpus=1.0))
    check_resources(plan, nodes)
    return [plan.server.bundle, *[plan.per_actor.bundle] * plan.num_actors]


def total(nodes: Nodes, kind: str) -> float:
    """The amount of a resource in the whole cluster.

    >>> total([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0}], "CPU")
    12.0
    """
    return sum(node.get(kind, 0.0) for node in nodes)


def _in_process(experiment: Experiment, concurrency: int | None, nodes: Nodes) -> Bundle:
    """The bundle of a trial that trains its clients in its own process."""
    execution, num_gpus = experiment.settings.execution, total(nodes, "GPU")
    if execution.device not in ("auto", "cpu", "cuda"):
        raise ExperimentError(
            f"execution.device must be auto, cpu or cuda in a sweep, got {execution.device}: "
            "Ray gives each trial its GPU"
        )
    asked = {"CPU": float(execution.threads or 1)}
    if device_of(experiment, has_gpu=num_gpus > 0) == "cuda":
        asked["GPU"] = min(1.0, max(num_gpus, 1.0) / (concurrency or 1))
    for kind, amount in asked.items():
        most = max(node.get(kind, 0.0) for node in nodes)
        if amount > most + ROUNDING:
            raise ExperimentError(
                f"a trial asks for {amount:g} {kind}, the largest machine has {most:g}: it would "
                "wait for ever; lower execution.threads or change execution.device"
            )
    return asked
