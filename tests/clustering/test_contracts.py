"""What every registered stage promises."""

import dataclasses
import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from flray.clustering import DISTANCES, EMBEDS, PARTITIONS, RELATIONS, SIGNATURES, STAGES
from flray.clustering.encoder import Encoder
from flray.clustering.points import Points, by_smallest_member
from flray.clustering.related import Related
from flray.data.datasets.synthetic import Synthetic
from flray.execution.federation import Cohort, Federation
from flray.models.conv_ae import ConvAe

from scenarios import tiny_federation

ALL = [(kind, name) for kind, registry in STAGES.items() for name in registry]
# Fields without a default, or whose default asks for more than these few clients.
FIELDS = {
    "pca": {"n_components": 2},
    "kmeans": {"number": 3},
    "random": {"number": 3},
    "spectral": {"number": 3},
    "svd_directions": {"number": 3},
    "hierarchical": {"number": 3},
    "hdbscan": {"min_cluster_size": 3},
    "neighbours": {"nearest": 3},
    "sketch": {"dim": 2},
    "two_level": {"groups": 6, "number": 3},
}
ENCODER = Encoder(
    Synthetic(num_train=64, num_test=32, size=8, seed=5),
    functools.partial(ConvAe, latent=6),
    epochs=1,
    batch_size=16,
)
# Small enough for clients with a few 8x8 images.
SIGNATURE_FIELDS = {
    "encoder_centres": {"encoder": ENCODER, "k": 2, "epochs": 1},
    "metadata": {"file": str(Path(__file__).with_name("clients.csv"))},
    "pca_centres": {"components": 4, "k": 2},
}


def make(kind: str, name: str):
    return STAGES[kind][name](**FIELDS.get(name, {}))


def vectors(num_clients: int = 12) -> Points:
    """Three far groups of four clients, in ascending order."""
    rng = np.random.default_rng(3)
    centres = np.repeat(np.eye(3) * 20, num_clients // 3, axis=0)
    values = centres + rng.normal(size=centres.shape)
    return Points.vectors(np.arange(num_clients) * 5, torch.from_numpy(values))


def related(points: Points) -> Related:
    distance = DISTANCES["l2"]()(points)
    labels = np.repeat(np.arange(4), 3)[: len(points.clients), None]
    counts = (labels == np.arange(4)).astype(np.int64)
    return Related(
        points, distance, RELATIONS["threshold"](gamma=8.0)(distance),
        np.random.default_rng(0), lambda: counts,
        lambda: np.repeat(np.arange(3), 4)[: len(points.clients)],
        DISTANCES["l2"](),
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), ALL)
class TestEveryStage:
    def test_is_a_frozen_dataclass_that_travels(self, kind, name) -> None:
        stage = make(kind, name)
        assert dataclasses.is_dataclass(stage)
        assert type(stage).__dataclass_params__.frozen
        assert pickle.loads(pickle.dumps(stage)) == stage

    def test_says_what_it_is(self, kind, name) -> None:
        said = STAGES[kind][name].__doc__ or ""
        assert said
        assert not said.startswith(f"{STAGES[kind][name].__name__}(")


@pytest.mark.parametrize("name", sorted(set(EMBEDS) - {"umap"}))
def test_an_embedding_keeps_clients_and_input(name) -> None:
    points = vectors()
    before = points.values.clone()
    embedded = make("embed", name)(points, 0)
    assert torch.equal(points.values, before)
    assert (embedded.clients == points.clients).all()
    assert (embedded.owner == points.owner).all()
    assert torch.equal(embedded.values, make("embed", name)(points, 0).values)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distance_is_one(name) -> None:
    points = vectors()
    before = points.values.clone()
    distance = make("distance", name)(points)
    assert torch.equal(points.values, before)
    assert distance.dtype == np.float64
    assert (distance == distance.T).all()
    assert (np.diag(distance) == 0).all()
    off = distance[~np.eye(len(distance), dtype=bool)]
    assert (off > 0).all()
    assert np.isfinite(off).all()


@pytest.mark.parametrize("name", RELATIONS)
def test_a_relation_is_symmetric_and_reflexive(name) -> None:
    distance = make("distance", "l2")(vectors())
    before = distance.copy()
    relation = make("relate", name)(distance)
    assert (distance == before).all()
    if relation is not None:
        assert (relation == relation.T).all()
        assert (np.diag(relation) == 1).all()
        assert relation.min() >= 0


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_covers_everybody_in_order(name) -> None:
    found = make("partition", name)(related(vectors()))
    assert found.labels.shape == (12,)
    assert found.labels.dtype == np.int64
    assert (by_smallest_member(found.labels) == found.labels).all()
    assert 1 < len(np.unique(found.labels)) <= 12
    again = make("partition", name)(related(vectors()))
    assert (again.labels == found.labels).all()


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"random", "label_counts"}))
def test_three_far_groups_are_found(name) -> None:
    labels = make("partition", name)(related(vectors())).labels
    assert (labels == np.repeat(np.arange(3), 4)).all()


@pytest.mark.parametrize("name", PARTITIONS)
def test_one_client_is_one_cluster(name) -> None:
    one = {"number": 1} if "number" in FIELDS.get(name, {}) else {}
    stage = PARTITIONS[name](**one)
    alone = related(Points.vectors(np.array([4]), torch.ones(1, 3, dtype=torch.float64)))
    assert stage(alone).labels.tolist() == [0]


def federation() -> Federation:
    """Six ragged clients; ground truth is not for their methods."""
    return tiny_federation("split.server=50")


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_describes_the_cohort_and_changes_nothing(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path))
    signature = SIGNATURES[name](**SIGNATURE_FIELDS.get(name, {}))
    clients = np.array([0, 2, 5])
    fed = federation()
    bank = fed.initial_bank()
    before = {leaf: values.clone() for leaf, values in bank.params.items()}
    points, memory = signature(fed, bank, Cohort(1, clients), {})
    assert points.clients.tolist() == clients.tolist()
    assert torch.isfinite(points.values).all()
    assert len(torch.unique(points.means(), dim=0)) == 3  # it tells clients apart
    assert all(torch.equal(bank.params[leaf], values) for leaf, values in before.items())
    assert fed.meter.counts["bytes_up_signature"] > 0
    other = federation()
    again, _ = signature(other, other.initial_bank(), Cohort(1, clients), {})
    assert torch.equal(again.values, points.values)
    kept = {leaf: values.clone() for leaf, values in memory.items()}
    signature(fed, bank, Cohort(2, clients), memory)
    assert all(torch.equal(memory[leaf], values) for leaf, values in kept.items())
