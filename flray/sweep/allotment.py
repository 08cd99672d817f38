"""What a trial may use: bundles of CPUs and GPUs, refused with the arithmetic if none ever fits."""

from collections.abc import Mapping, Sequence

from flray.config.build import prepare
from flray.config.experiment import Experiment
from flray.errors import ExperimentError
from flray.execution.resources import ROUNDING, ActorPlan
from flray.sweep.keys import device_of
from flray.sweep.space import Options

Bundle = dict[str, float]


def bundles(experiment: Experiment, options: Options, there: Mapping[str, float]) -> list[Bundle]:
    """The trial's own process first, then one bundle for each client actor it will start.

    Args:
        there: what the cluster has in all, as Ray counts it.
    """
    execution, concurrency = experiment.settings.execution, options.concurrency
    if options.client_actors == "shared":
        return [_beside_the_pool(shared_plan([experiment]), concurrency, there)]
    if execution.executor == "ray":
        plan = prepare(experiment).plan
        assert plan is not None  # of executor ray
        own = {"CPU": 1.0, "memory": float(plan.server.memory)}
        asked = [own, *(plan.each.bundle for _ in range(plan.num_actors))]
    else:
        asked = [{"CPU": float(execution.threads or 1)}]
        if execution.device not in ("auto", "cpu", "cuda"):
            raise ExperimentError(
                f"execution.device must be auto, cpu or cuda in a sweep, got {execution.device}: "
                "Ray gives each trial its GPU"
            )
        num_gpus = there.get("GPU", 0.0)
        if device_of(experiment, has_gpu=num_gpus > 0) == "cuda":
            asked[0]["GPU"] = min(1.0, max(num_gpus, 1.0) / (concurrency or 1))
    _check(asked, there)
    return asked


def shared_plan(experiments: Sequence[Experiment]) -> ActorPlan:
    """What the pool of a sweep asks for; all its experiments must ask for the same."""
    asked = {
        (execution.executor, execution.actors, execution.threads): experiment
        for experiment in experiments
        if (execution := experiment.settings.execution)
    }
    (executor, actors, _), first = next(iter(asked.items()))
    if len(asked) > 1:
        raise ExperimentError(
            "client_actors is shared, but rows differ in execution.executor, execution.actors or "
            "execution.threads: one pool has one form; choose client_actors=own"
        )
    if executor != "ray" or actors.count == "per_client":
        raise ExperimentError(
            f"client_actors is shared, but execution.executor is {executor} with "
            f"{actors.count} actors; set execution.executor=ray and a number of actors"
        )
    parts = prepare(first)
    assert parts.plan is not None  # of executor ray
    assert parts.load is not None
    execution = first.settings.execution
    return ActorPlan.of(actors, execution.server, parts.plan.num_actors, parts.load.shared())


def _beside_the_pool(
    plan: ActorPlan, concurrency: int | None, there: Mapping[str, float]
) -> Bundle:
    """A trial that trains elsewhere: what the pool leaves, divided by the trials at a time."""
    for kind, each in (("CPU", plan.actors.num_cpus), ("GPU", plan.actors.num_gpus)):
        total, has = plan.num_actors * each, there.get(kind, 0.0)
        left = has - total
        if left < -ROUNDING or (kind == "CPU" and left < ROUNDING):
            beside = " and its trials need a part of one" if kind == "CPU" else ""
            raise ExperimentError(
                f"the shared client actors ask for {plan.num_actors} x {each:g} = {total:g} "
                f"{kind}{beside}, the cluster has {has:g}; lower execution.actors"
            )
    left = there.get("CPU", 0.0) - plan.num_actors * plan.actors.num_cpus
    return {"CPU": min(1.0, left / (concurrency or 1))}


def _check(asked: list[Bundle], there: Mapping[str, float]) -> None:
    for kind, unit, scale in (("CPU", "CPU", 1.0), ("GPU", "GPU", 1.0), ("memory", "GB", 1e9)):
        first, *rest = (each.get(kind, 0.0) / scale for each in asked)
        total, free = first + sum(rest), there.get(kind, 0.0) / scale
        if total > free + ROUNDING:
            sum_of = f"{first:.3g} + {len(rest)} x {rest[0]:.3g} = " if rest else ""
            remedy = "execution.actors" if rest else "execution.threads or execution.device"
            raise ExperimentError(
                f"a trial asks for {sum_of}{total:.3g} {unit}, the cluster has {free:.3g}: it "
                f"would wait for ever; lower {remedy}"
            )
