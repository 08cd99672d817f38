"""What actors ask Ray for: never less memory than they take, and never what no node has."""

import os
import subprocess
import sys

import pytest
import yaml

from flray.errors import ExperimentError
from flray.execution import nodes
from flray.execution.resources import (
    PROCESS_BYTES,
    ActorPlan,
    Actors,
    Load,
    Needs,
    check_resources,
)
from flray.runs.preparing import load_of, prepare

from scenarios import tiny_experiment

IMPORTED = 0.5e9  # bytes of a process that has imported everything

LARGE = [
    "dataset.size=28",
    "dataset.num_train=300",
    "dataset.num_test=1500",
    "split={name: iid, clients: 10}",
    "train.momentum=0.9",
    "train.epochs=1",
    "participation=1",
]
RAY = "execution={executor: ray, block: 10, actors: {count: 1}}"
MODELS = ["mlp200", "flhc_cnn"]


# What memory grows by while a block is trained and evaluated. VmRSS: what a process has, VmHWM:
# the most it had.
GROWTH = """
import sys
from pathlib import Path

from flray.engines.training import plain_gradient
from flray.runs.assemble import build_federation, start_executor
from flray.runs.preparing import prepare
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.execution.federation import Cohort
from flray.server.evaluation import score_clients
from scenarios import TINY


def bytes_of(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


before = bytes_of("VmRSS")
experiment = parse_experiment(override(TINY, sys.argv[1:]))
parts = prepare(experiment)
fed = build_federation(experiment, parts, start_executor(parts))
split = parts.payload.timeline.at(1)
for t in (1, 2):
    found = fed.train(fed.initial_bank(), Cohort(t, split.clients), plain_gradient)
    assert set(found.params) == set(fed.initial)
score_clients(fed, fed.initial_bank(), split.clients, split.test)
print(bytes_of("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, subprocess.Popen]:
    """Processes of their own, both at once."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    told = [*LARGE, "execution={block: 10, threads: 1}"]
    return {
        model: subprocess.Popen(
            [sys.executable, "-c", GROWTH, f"model={model}", *told],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for model in MODELS
    }


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_the_estimate_is_not_below_what_training_takes(model, measured) -> None:
    parts = prepare(tiny_experiment(*LARGE, f"model={model}", RAY))
    growth = int(measured[model].communicate(timeout=120)[0])
    model_bytes = 4 * sum(p.numel() for p in parts.payload.module.parameters())
    assert growth > 20 * model_bytes  # it held a block, and what was trained of it
    assert growth < parts.plan.per_actor.memory - IMPORTED


def test_the_estimate_follows_model_block_data_and_trainings_kept() -> None:
    """600 MB, 10 of data; models of 2 MB: one six-fold, three twice and kept twice; 5 of steps."""
    load = Load(
        data=10_000_000,
        model=2_000_000,
        block=3,
        at_once=1,
        activations=5_000_000,
        cohort=4,
        actor_blocks=1,
    )
    assert load.of_actor() == 600_000_000 + 10_000_000 + 12_000_000 + 24_000_000 + 5_000_000
    assert load.of_server() == 700_000_000 + 10_000_000 + 24_000_000


def test_a_larger_block_and_a_stacked_engine_ask_for_more() -> None:
    def asked(*overrides: str) -> int:
        ray = ["execution.executor=ray", *overrides]
        payload = prepare(tiny_experiment(*LARGE, *ray)).payload
        return load_of(payload, batch_size=10, num_sampled=3, num_actors=1).of_actor()

    small = asked("execution.block=2")
    assert PROCESS_BYTES < small < asked("execution.block=10")
    stacked = asked("execution={executor: ray, engine: vectorized, block: 10}")
    assert asked("execution={executor: ray, engine: loop, block: 10}") < stacked


def test_the_experiment_may_name_what_its_actors_need() -> None:
    own = "execution={executor: ray, actors: {memory_gb: 1.5}, server: {memory_gb: 2}}"
    plan = prepare(tiny_experiment(own)).plan
    assert (plan.per_actor.memory, plan.server.memory) == (1_500_000_000, 2_000_000_000)
    assert "client actors of 1 CPU, 1.5 GB each" in str(plan)
    with pytest.raises(ExperimentError, match=r"memory_gb must be > 0 .*got 0"):
        tiny_experiment("execution.actors.memory_gb=0")


GB = 1_000_000_000


def plan_of(num_actors: int, each: Needs) -> ActorPlan:
    return ActorPlan(num_actors, Actors(count=num_actors), 1, 1, each, Needs(memory=GB))


def test_what_no_node_has_is_refused_though_all_together_have_it() -> None:
    nodes = [{"CPU": 4.0, "memory": 8.0 * GB}] * 2
    check_resources(plan_of(2, Needs(1, 0, 7 * GB)), nodes)
    with pytest.raises(
        ExperimentError,
        match=r"1 x 12 \+ 1 for the server = 13 GB of memory, .*"
        r"at most 8 on one node: 0 such actors fit; lower .*actors\.memory_gb",
    ):
        check_resources(plan_of(1, Needs(1, 0, 12 * GB)), nodes)
    with pytest.raises(
        ExperimentError,
        match=r"3 x 6 \+ 1 for the server = 19 GB of memory, the "
        r"cluster has 16 free: 2 such actors fit",
    ):
        check_resources(plan_of(3, Needs(1, 0, 6 * GB)), nodes)
    with pytest.raises(ExperimentError, match=r"4 x 2 = 8 CPU, the cluster has 6 free: 3 such"):
        check_resources(plan_of(4, Needs(2, 0, GB)), [{"CPU": 3.0, "memory": 9.0 * GB}] * 2)


def test_machines_that_may_still_be_started_are_counted(tmp_path, monkeypatch) -> None:
    """Of two kinds and at most three machines besides the head, one of which is there."""
    kinds = {
        "head": {"resources": {"CPU": 8}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 4, "GPU": 1, "memory": 9 * GB}, "max_workers": 2},
        "cpu": {"resources": {"CPU": 2}, "max_workers": 5},
    }
    plain = {"max_workers": 3, "head_node_type": "head", "available_node_types": kinds}
    (tmp_path / nodes.BOOTSTRAP).write_text(yaml.safe_dump(plain))
    monkeypatch.setenv("HOME", str(tmp_path))
    present = [{"CPU": 8.0, "memory": float(GB)}, {"CPU": 4.0, "GPU": 1.0, "memory": 9.0 * GB}]
    monkeypatch.setattr(nodes, "whole_nodes", lambda: present)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    coming = nodes.coming_nodes()
    assert coming.count(kinds["gpu"]["resources"]) == 2
    assert coming.count({"CPU": 2, "memory": float("inf")}) == 2
    assert sum(node["CPU"] for node in nodes.reachable_nodes()) == 8 + 4 + 2 * 4 + 2 * 2
    present += present[1:] * 2  # three are there
    assert nodes.coming_nodes() == []
    del present[1:]
    assert len(nodes.coming_nodes()) == 2 + 3
    monkeypatch.delenv("RAY_ADDRESS")  # a cluster of our own
    assert nodes.coming_nodes() == []
