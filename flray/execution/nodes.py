"""The nodes of a cluster: what each has, and whether a plan fits on them."""

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import ray
import yaml
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.util import get_current_placement_group

from flray.errors import ExperimentError
from flray.execution.resources import ActorPlan, check_resources

BOOTSTRAP = "ray_bootstrap_config.yaml"  # left on a head by `ray up`
FREE_TIMEOUT_S = 10.0

Resources = dict[str, float]  # amounts by kind, as Ray counts them: CPU, GPU, memory, ...


def whole_nodes() -> list[Resources]:
    """What each node of the connected cluster has in all, taken or free."""
    ask: Callable[[], dict[str, Resources]] = ray._private.state.total_resources_per_node
    return list(ask().values())


def free_nodes() -> list[Resources]:
    """What is free on each node."""
    ask: Callable[[], dict[str, Resources]] = ray._private.state.available_resources_per_node
    return list(ask().values())


def coming_nodes() -> list[Resources]:
    """What machines may still be started for us, by the file that `ray up` leaves on a head.

    Each kind is counted as if all that may come were of it. A machine whose memory the file does
    not name is taken to have enough.
    """
    file = Path.home() / BOOTSTRAP
    if "RAY_ADDRESS" not in os.environ or not file.is_file():
        return []
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    num_present = len(whole_nodes()) - 1  # beside the head
    most = max(0, plain.get("max_workers", 0) - num_present)
    return [
        {"memory": float("inf"), **kind.get("resources", {})}
        for name, kind in plain.get("available_node_types", {}).items()
        if name != plain.get("head_node_type")
        for _ in range(min(most, kind.get("max_workers", most)))
    ]


def reachable_nodes() -> list[Resources]:
    """What each node has in all, taken or free, those that may still be started included."""
    return [*whole_nodes(), *coming_nodes()]


def this_machine() -> Resources:
    """What a local cluster would have on this machine, by Ray's own arithmetic; starts nothing."""
    spec = ResourceAndLabelSpec().resolve(is_head=True, node_ip_address="127.0.0.1")
    ask: Callable[[], Resources] = spec.to_resource_dict
    return ask()


def wait_for_resources(plan: ActorPlan) -> None:
    """Refuse at once what the cluster does not have; wait a little for what others give back.

    Does nothing inside a placement group, whose resources are reserved already.

    Raises:
        ExperimentError: The cluster does not have the resources, or they are not free in time.
    """
    if get_current_placement_group() is not None:
        return  # made for us, and counted as taken
    check_resources(plan, reachable_nodes())
    if coming_nodes():
        return  # machines are started when actors ask for them
    deadline = monotonic() + FREE_TIMEOUT_S
    while True:
        try:
            return check_resources(plan, free_nodes())
        except ExperimentError:
            if monotonic() > deadline:
                raise
            sleep(0.1)
