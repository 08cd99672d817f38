"""Three nodes on one machine: one actor on each, and the same bits as one process."""

import pytest
import ray
from ray.cluster_utils import Cluster

import flray
from flray.config.experiment import override
from flray.execution.cluster import connected

from scenarios import TINY

pytestmark = pytest.mark.slow

HARD = ["algorithm=fedprox", "train.momentum=0.9", "model.dropout=0.5", "execution.block=1"]


@pytest.fixture
def three_nodes(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
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
