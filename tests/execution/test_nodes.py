"""Three nodes on one machine: one actor on each, and the same bits as one process."""

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import flray
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.execution.cluster import connected
from flray.records.changes import Changes
from flray.records.run_directory import RunDirectory

from scenarios import TINY, run_experiment

pytestmark = pytest.mark.slow

HARD = ["algorithm=fedprox", "train.momentum=0.9", "model.dropout=0.5", "execution.block=1"]


@pytest.fixture
def three_nodes(request, monkeypatch):
    """One CPU each; the head, where the driver is, has as many as the test says."""
    request.getfixturevalue("without_cluster")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = {"num_cpus": getattr(request, "param", 1)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


@pytest.mark.long
@pytest.mark.usefixtures("three_nodes")
def test_three_nodes_give_the_bits_of_one_process(tmp_path) -> None:
    plain = override(TINY, HARD)
    # One CPU a node and one CPU an actor: three actors fit only on three nodes.
    pool = "execution={executor: ray, block: 1, actors: {count: 3, num_cpus: 1}}"
    spread = flray.run(plain, tmp_path / "spread", [pool])
    alone = flray.run(plain, tmp_path / "alone")
    assert spread.summary["params_sha256"] == alone.summary["params_sha256"]
    assert not ray.is_initialized()
    with connected():  # a cluster that was there before is left alone
        assert sum(node["Alive"] for node in ray.nodes()) == 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_is_lost_and_one_that_joins_change_no_bit(three_nodes, tmp_path) -> None:
    """A node with an actor at work is killed after round 2, another one comes some rounds later."""
    rounds, directory = 40, RunDirectory(tmp_path / "run")
    plain = override(TINY, [*HARD, f"rounds={rounds}", "evaluate.every=40"])
    pool = "execution={executor: ray, block: 1, actors: {count: 3, num_cpus: 1}}"
    lost = next(iter(three_nodes.worker_nodes))
    done: dict[str, int] = {}  # rounds that were known to be done when something had happened

    def lose_and_join(row) -> None:
        if row["round"] == 2:
            three_nodes.remove_node(lost, allow_graceful=False)
            done["lost"] = max(row["round"], len(directory.rows()))
        elif "joined" not in done and row["round"] > done.get("lost", rounds) + 2:
            three_nodes.add_node(num_cpus=1)
            assert directory.summary() is None  # the run is still going on
            done["joined"] = row["round"]

    disturbed = run_experiment(
        parse_experiment(override(plain, [pool])), directory.path, on_round=lose_and_join
    )
    alone = flray.run(plain, tmp_path / "alone")
    assert disturbed.summary["params_sha256"] == alone.summary["params_sha256"]
    assert done["lost"] + 2 < done["joined"] < rounds


@pytest.mark.long
@pytest.mark.parametrize("three_nodes", [0], indirect=True)
@pytest.mark.usefixtures("three_nodes")
def test_the_server_may_sit_on_another_node(tmp_path, monkeypatch) -> None:
    """The driver's node has no CPU for it: its records come to the driver, also when it goes on."""
    apply_to, fetched = Changes.apply_to, []

    def count(changes, folder) -> None:
        apply_to(changes, folder)
        fetched.append(len(RunDirectory(folder).rows()))

    monkeypatch.setattr(Changes, "apply_to", count)
    plain = override(TINY, [*HARD, "algorithm={name: flhc, rounds_before: 2}"])
    server = "server: {num_cpus: 1}, actors: {count: 1, num_cpus: 1}"
    experiment = parse_experiment(
        override(plain, [f"execution={{executor: ray, block: 1, {server}}}"])
    )
    directory = RunDirectory(tmp_path / "spread")
    run_experiment(experiment, directory.path, should_stop=lambda: True)
    assert directory.summary() is None
    begun = len(directory.rows())
    assert 1 <= begun < plain["rounds"]
    rest = run_experiment(experiment, directory.path, resume=True)
    assert fetched[-1] == plain["rounds"]
    alone = flray.run(plain, tmp_path / "alone")
    assert rest.summary["params_sha256"] == alone.summary["params_sha256"]
    assert files(directory.path) == files(alone.path)


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}
