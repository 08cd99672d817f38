"""Signatures of models and of losses, and stages after them, against numpy and scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import SpectralClustering
from sklearn.metrics import adjusted_rand_score

from flray.algorithms.cfl import Cfl
from flray.algorithms.change import Dynamic, Flags
from flray.algorithms.fedsem import FedSem
from flray.algorithms.flhc import Flhc, UpdateClustering
from flray.clustering.embeds import Pca, SvdDirections
from flray.clustering.gradient_memory import GradientMemory
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.losses import Losses
from flray.clustering.partitions import Spectral
from flray.clustering.points import Points
from flray.clustering.related import Related
from flray.clustering.update import Update, Weights
from flray.engines.training import plain_gradient
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, layers_of

from scenarios import line_federation, tiny_experiment, tiny_federation

CLIENTS = np.array([0, 2, 5])
HEAD = 16 * 10 + 10  # parameters of the last layer of the tiny network


@pytest.fixture(scope="module")
def fed() -> Federation:
    return tiny_federation()


def observed(signature, fed: Federation, memory=None) -> torch.Tensor:
    points, _ = signature(fed, fed.initial_bank(), Cohort(1, CLIENTS), memory or {})
    return points.values


class TestLayers:
    def test_are_columns_of_all(self, fed) -> None:
        """Leaves are in the order of their names: 1.bias, 1.weight, 3.bias, 3.weight."""
        whole = observed(Update(), fed)
        first, last = observed(Update(layers="first"), fed), observed(Update(layers="last"), fed)
        assert torch.equal(torch.cat([first, last], dim=1), whole)
        assert last.shape[1] == HEAD
        names = tuple(layers_of(fed.initial))
        assert torch.equal(observed(Update(layers=names[-1:]), fed), last)
        assert torch.equal(observed(Update(layers=names), fed), whole)

    def test_of_weights_and_of_updates_have_equal_distances(self, fed) -> None:
        """From a common start w_i - w_j = Δ_i - Δ_j."""
        w, delta = observed(Weights("last"), fed), observed(Update(layers="last"), fed)
        torch.testing.assert_close(torch.cdist(w, w), torch.cdist(delta, delta), atol=1e-5, rtol=0)
        assert not torch.allclose(w, delta)

    def test_alone_are_sent(self, fed) -> None:
        fed.meter.read_and_reset()
        observed(Weights("last"), fed)
        row = fed.meter.read_and_reset()
        assert row["bytes_up_signature"] == 3 * HEAD * 4
        assert row["bytes_down_signature"] == 3 * fed.initial_bank().bytes_per_model

    def test_that_are_not_there_are_named(self, fed) -> None:
        with pytest.raises(ExperimentError, match=r"layers must be all, .*layers\.1.*, got conv9"):
            Update(layers=("conv9",)).require(fed)

    def test_in_yaml(self) -> None:
        key = "algorithm={name: flhc, clustering: {signature: {name: weights, layers: %s}}}"
        for given, layers in (("last", "last"), ("[layers.4]", ("layers.4",))):
            built = tiny_experiment(key % given).algorithm.build()
            assert built.clustering.signature.layers == layers
        with pytest.raises(ExperimentError, match=r"layers must be one of all, first, last"):
            tiny_experiment(key % "middle")


@pytest.fixture(scope="module")
def normed() -> Federation:
    model = ["model={name: lenet5, norm: batch}", "dataset.size=16", "participation=1"]
    return tiny_federation(*model)


@pytest.fixture(scope="module")
def num_params(normed) -> int:
    """All leaves but means and variances of 6 and 16 channels."""
    return sum(leaf.numel() for leaf in normed.initial.values()) - 2 * (6 + 16)


class TestBatchNorm:
    """Statistics of BatchNorm are no parameters."""

    @pytest.mark.parametrize("signature", [Update(), Weights(), GradientMemory()])
    def test_signatures_are_of_parameters(self, normed, num_params, signature) -> None:
        assert observed(signature, normed).shape == (3, num_params)

    def test_layers_have_none(self, normed) -> None:
        assert observed(Update(layers=("layers.1",)), normed).shape == (3, 2 * 6)

    def test_cfl_compares_updates_of_parameters(self, normed, num_params) -> None:
        method = Cfl(rounds_before=0, mean_norm=np.inf, max_norm=0)
        state = method.init(normed).state
        assert state.updates.default["update"].shape == (1, num_params)
        (split,) = method.round(state, method.cohort(state, 1, normed), normed).clusterings
        assert split.points.values.shape == (6, num_params)

    @pytest.mark.parametrize(("space", "size"), [("all", None), ("last_layer", 10 * 85)])
    def test_fedsem_compares_parameters(self, normed, num_params, space, size) -> None:
        method = FedSem(number=2, space=space)
        state = method.init(normed).state
        after = method.round(state, method.cohort(state, 1, normed), normed).state
        assert after.centres.shape == (2, size or num_params)

    def test_flags_are_raised_by_parameters(self, normed) -> None:
        bank, cohort = normed.initial_bank(), Cohort(1, normed.clients)
        trained = normed.train(bank, cohort, plain_gradient)
        flags = Dynamic(flags="update").updated(Flags.none(6), trained, bank, normed)
        squares = [
            (leaf - bank.params[name]).square().flatten(1).sum(1)
            for name, leaf in trained.params.items()
            if "running" not in name
        ]
        np.testing.assert_allclose(flags.last, torch.stack(squares).sum(0).sqrt(), rtol=1e-5)

    def test_clusters_that_keep_their_pass_start_with_the_joint_statistics(self, normed) -> None:
        bank, cohort = normed.initial_bank(), Cohort(1, normed.clients)
        trained = normed.train(bank, replace(cohort, is_probe=True), plain_gradient)
        method = Flhc(
            rounds_before=0,
            keep_pass=True,
            clustering=UpdateClustering(partition=Hierarchical(number=6)),
        )
        state = method.init(normed).state
        models = state.bank.of_clients(normed.clients)
        for name, leaf in models.items():
            expected = bank.params[name] if "running" in name else trained.params[name]
            torch.testing.assert_close(leaf, expected.expand_as(leaf), atol=1e-5, rtol=1e-5)


def test_losses_by_hand() -> None:
    """Client 0 has x (1, 0), y 1, client 1 x (0, 1), y 3: (w x - y)² of models (0, 0), (1, 2)."""
    fed = line_federation([(1, 0), (0, 1)], [1, 3], [2, 3], [[0, 0], [1, 2]], lr=0.1)
    bank, cohort = fed.initial_bank(), Cohort(1, np.arange(2))
    drawn, _ = Losses(number=2)(fed, bank, cohort, {})
    np.testing.assert_allclose(drawn.array(), [[1, 0], [9, 1]])
    alone, _ = Losses()(fed, bank, cohort, {})
    np.testing.assert_allclose(alone.array(), [[1], [9]])
    assert fed.meter.counts["bytes_up_signature"] == 2 * 3 * 4  # clients, models, bytes
    assert fed.meter.counts["bytes_down_signature"] == 2 * 3 * bank.bytes_per_model


class TestGradientMemory:
    """One step of size 0.1 on (w x - y)² from w: Δ = -0.2 (w x - y) x; x (1, 0), y 1 or 3."""

    def setup_method(self) -> None:
        self.fed = line_federation([(1, 0), (1, 0)], [1, 3], [1, 1], [[0, 0]], lr=0.1)
        rows = torch.tensor([[0.0, 0], [1, 0]], dtype=torch.float64)
        self.bank = ModelBank({"w": rows}, owner=np.array([0, 1]))

    def heard(self, signature, clients=(0, 1), memory=None):
        cohort = Cohort(1, np.array(clients))
        points, memory = signature(self.fed, self.bank, cohort, memory or {})
        return points.array()[:, 0], memory

    def test_all_start_from_one_row_the_next_in_each_call(self) -> None:
        first, memory = self.heard(GradientMemory(weight=1.0))
        np.testing.assert_allclose(first, [0.2, 0.6])  # from (0, 0), client 1's own row is (1, 0)
        second, memory = self.heard(GradientMemory(weight=1.0), memory=memory)
        np.testing.assert_allclose(second, [0.0, 0.4], atol=1e-12)
        third, _ = self.heard(GradientMemory(weight=1.0), memory=memory)
        np.testing.assert_allclose(third, first)

    def test_is_the_mean_of_what_was_heard(self) -> None:
        _, memory = self.heard(GradientMemory())
        second, memory = self.heard(GradientMemory(), memory=memory)
        np.testing.assert_allclose(second, [0.1, 0.5])
        third, _ = self.heard(GradientMemory(), memory=memory)
        np.testing.assert_allclose(third, [0.4 / 3, 1.6 / 3])

    def test_of_equal_updates_is_that_update(self) -> None:
        self.bank = self.bank.of_some(np.array([0]))
        first, memory = self.heard(GradientMemory(weight=0.3))
        again, _ = self.heard(GradientMemory(weight=0.3), memory=memory)
        np.testing.assert_allclose(first, again)

    def test_a_client_that_comes_later_has_its_first_update(self) -> None:
        _, memory = self.heard(GradientMemory(weight=0.5), clients=(0,))
        second, _ = self.heard(GradientMemory(weight=0.5), memory=memory)
        np.testing.assert_allclose(second, [0.1, 0.4])

    def test_refuses_a_weight_beyond_one(self) -> None:
        with pytest.raises(ValueError, match=r"weight must be in \(0, 1\] or null, got 2"):
            GradientMemory(weight=2)


def _vectors(num: int = 6, size: int = 9, seed: int = 0) -> Points:
    values = np.random.default_rng(seed).normal(size=(num, size))
    return Points.vectors(np.arange(num), torch.from_numpy(values))


class TestSvdDirections:
    def test_are_cosines_with_singular_vectors(self) -> None:
        points = _vectors()
        x = points.array()
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        V = np.linalg.svd(x)[2][:3]
        found = SvdDirections(3)(points, 0).array()
        np.testing.assert_allclose(np.abs(found), np.abs(unit @ V.T), atol=1e-12)

    def test_keep_cosines_where_there_are_enough(self) -> None:
        """||E_i - E_j||² <= 2 (1 - cos_ij), equal for as many directions as the rank."""
        x = _vectors().array()
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        bound = 2 * (1 - unit @ unit.T)
        few, all_of_them = (
            np.square(E[:, None] - E).sum(2)
            for E in (SvdDirections(n)(_vectors(), 0).array() for n in (2, 6))
        )
        assert (few <= bound + 1e-12).all()
        assert (few < bound - 1e-3).any()
        np.testing.assert_allclose(all_of_them, bound, atol=1e-12)

    def test_without_unit_are_not_centred_coordinates(self) -> None:
        """A vector added to all points changes them, but not the principal components."""
        points = _vectors()
        moved = Points.vectors(points.clients, points.values + 3)
        svd, pca = (
            [embed(p, 0).array() for p in (points, moved)]
            for embed in (SvdDirections(2, unit=False), Pca(2))
        )
        np.testing.assert_allclose(pca[0], pca[1], atol=1e-9)
        assert np.abs(svd[0] - svd[1]).max() > 1

    def test_newcomers_do_not_turn_them(self) -> None:
        known, new = _vectors(), _vectors(2, seed=1)
        again = SvdDirections(2).transform(known, known, 0).array()
        np.testing.assert_array_equal(again, SvdDirections(2)(known, 0).array())
        assert SvdDirections(2).transform(known, new, 0).array().shape == (2, 2)


class TestSpectral:
    def related(self, relation=None) -> tuple[Related, np.ndarray]:
        """Two rings around each other, which k-means does not tell apart."""
        angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        x = np.concatenate([circle, 5 * circle])
        D = np.linalg.norm(x[:, None] - x, axis=2)
        points = Points.vectors(np.arange(len(x)), torch.from_numpy(x))
        R = relation(D) if relation else None
        return Related(points, D, R, np.random.default_rng(0), None), np.repeat([0, 1], 24)

    def test_finds_rings_by_a_relation(self) -> None:
        related, rings = self.related(lambda D: (D < 2).astype(float))
        assert (Spectral(2)(related).labels == rings).all()

    def test_is_scikit_learns(self) -> None:
        related, _ = self.related()
        seed = int(np.random.default_rng(0).integers(2**31))
        library = SpectralClustering(3, affinity="precomputed", random_state=seed)
        D = related.distance
        sigma = np.median(D[np.triu_indices(len(D), 1)])
        expected = library.fit_predict(np.exp(-((D / sigma) ** 2) / 2))
        assert adjusted_rand_score(expected, Spectral(3)(related).labels) == 1.0

    def test_finds_the_client_that_differs_from_equal_ones(self) -> None:
        x = np.array([0.0, 0, 0, 0, 0, 9])  # the median distance is 0
        points = Points.vectors(np.arange(6), torch.from_numpy(x[:, None]))
        rng = np.random.default_rng(0)
        related = Related(points, np.abs(x[:, None] - x), None, rng, None)
        assert Spectral(2)(related).labels.tolist() == [0, 0, 0, 0, 0, 1]

    def test_of_equal_clients(self) -> None:
        points = Points.vectors(np.arange(4), torch.zeros(4, 2))
        related = Related(points, np.zeros((4, 4)), None, np.random.default_rng(0), None)
        assert Spectral(1)(related).labels.tolist() == [0, 0, 0, 0]
        assert Spectral(4)(related).labels.tolist() == [0, 1, 2, 3]
        assert len(Spectral(2)(related).labels) == 4
        with pytest.raises(ValueError, match="number must be at most the number of clients, 4"):
            Spectral(5)(related)
