"""Sketches keep inner products in expectation, and clients send no more than them."""

import numpy as np
import pytest
import torch

from flray.algorithms.flhc import Flhc, UpdateClustering
from flray.client.sketching import SketchRows, count_sketch
from flray.clustering import update
from flray.clustering.gradient_memory import GradientMemory
from flray.clustering.pipeline import Pipeline
from flray.clustering.sketch import Sketch
from flray.clustering.statistics import Statistics
from flray.clustering.update import Update, Weights
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank
from flray.randomness import generator

from scenarios import TINY, run_experiment, tiny_federation

CLIENTS = np.array([0, 2, 5])
DIM = 32


@pytest.fixture(scope="module")
def fed() -> Federation:
    return tiny_federation()


def sent(signature, fed: Federation, embed=None) -> tuple[torch.Tensor, dict]:
    """The points of a pipeline's clients, and what the meter counted."""
    fed.meter.read_and_reset()
    pipeline = Pipeline(signature) if embed is None else Pipeline(signature, embed)
    points, _ = pipeline.observe(fed, fed.initial_bank(), Cohort(1, CLIENTS), {})
    return points.values, fed.meter.read_and_reset()


class TestCountSketch:
    def test_is_a_linear_map_with_one_sign_per_coordinate(self) -> None:
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(5, 70, generator=rng, dtype=torch.float64)
        S = count_sketch(torch.eye(70, dtype=torch.float64), 16, seed=3)  # (p, dim)
        assert (S.abs().sum(1) == 1).all()
        assert (S.abs().max(1).values == 1).all()
        torch.testing.assert_close(count_sketch(x, 16, seed=3), x @ S)
        assert not torch.equal(count_sketch(x, 16, seed=4), count_sketch(x, 16, seed=3))

    def test_each_coordinate_is_added_to_its_bucket(self) -> None:
        """h(j) = (j + shift of j div dim) mod dim, one coordinate after the other."""
        p, dim, seed = 70, 16, 3
        x = torch.randn(3, p, generator=torch.Generator().manual_seed(0))
        rng = generator(seed, "sketch", p, dim)
        signs, shifts = rng.integers(2, size=p) * 2 - 1, rng.integers(dim, size=5)
        expected = np.zeros((3, dim))
        for j in range(p):
            expected[:, (j + shifts[j // dim]) % dim] += signs[j] * x[:, j].double().numpy()
        np.testing.assert_allclose(count_sketch(x, dim, seed), expected, rtol=1e-12, atol=1e-12)
        leaves = [x[:, :30].reshape(3, 5, 6), x[:, 30], x[:, 31:]]
        assert torch.equal(count_sketch(leaves, dim, seed), count_sketch(x, dim, seed))

    def test_rows_do_not_depend_on_the_rows_beside_them(self) -> None:
        x = torch.randn(230, 500, generator=torch.Generator().manual_seed(0))
        whole = count_sketch(x, 16, seed=0)
        assert torch.equal(count_sketch(x[97:141], 16, seed=0), whole[97:141])

    def test_a_parameter_may_be_one_number(self) -> None:
        models = {"scale": torch.tensor([2.0, 3.0]), "w": torch.ones(2, 2, 2)}
        found = SketchRows(np.array([1]), ["scale", "w"], dim=4, seed=0)(models)["sketch"]
        vector = torch.tensor([[3.0, 1.0, 1.0, 1.0, 1.0]])
        assert torch.equal(found, count_sketch(vector, 4, seed=0))

    def test_inner_products_are_right_in_expectation(self) -> None:
        """E <Sx, Sy> = <x, y> with a variance of at most 2 |x|² |y|² / dim, over 200 seeds."""
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(2, 300, generator=rng, dtype=torch.float64) + 1  # signs have to cancel
        for i, j in ((0, 0), (0, 1)):
            products = []
            for seed in range(200):
                s = count_sketch(x, 24, seed)
                products.append(float(s[i] @ s[j]))
            bound = float(2 * (x[i] @ x[i]) * (x[j] @ x[j]) / 24)
            assert abs(np.mean(products) - float(x[i] @ x[j])) < 4 * np.sqrt(bound / 200)
            assert np.var(products) < 1.4 * bound


@pytest.mark.parametrize("signature", [Update(), Weights(), Update(layers="last")])
class TestOnTheClient:
    def test_the_server_receives_the_sketch_of_the_signature(self, fed, signature) -> None:
        whole, _ = sent(signature, fed)
        sketches, _ = sent(signature, fed, Sketch(DIM))
        assert sketches.shape == (3, DIM)
        assert sketches.dtype == whole.dtype
        expected = count_sketch(whole, DIM, fed.seed).to(whole.dtype)
        torch.testing.assert_close(sketches, expected, atol=1e-6, rtol=1e-5)

    def test_only_the_sketch_is_counted(self, fed, signature) -> None:
        _, whole = sent(signature, fed)
        _, counts = sent(signature, fed, Sketch(DIM))
        assert counts["bytes_up_signature"] == len(CLIENTS) * DIM * 4 < whole["bytes_up_signature"]
        assert counts["bytes_down_signature"] == whole["bytes_down_signature"]

    def test_bits_do_not_depend_on_how_many_train_at_a_time(
        self, fed, signature, monkeypatch
    ) -> None:
        together, _ = sent(signature, fed, Sketch(DIM))
        monkeypatch.setattr(update, "HELD_BYTES", 1)
        alone = tiny_federation("execution.block=1")
        by_one, counts = sent(signature, alone, Sketch(DIM))
        torch.testing.assert_close(by_one, together, atol=1e-6, rtol=1e-5)
        assert counts["bytes_up_signature"] == len(CLIENTS) * DIM * 4
        monkeypatch.setattr(update, "HELD_BYTES", 2**30)
        assert torch.equal(sent(signature, alone, Sketch(DIM))[0], by_one)


@pytest.mark.parametrize("dim", [DIM, 10**6])
def test_the_memory_of_gradients_is_of_sketches(fed, dim) -> None:
    """Means of sketches are sketches of the means; models of two rows take turns as the start."""
    rows = {name: torch.cat([leaf, leaf + 0.05]) for name, leaf in fed.initial.items()}
    bank = ModelBank(rows, np.arange(fed.num_clients) % 2)
    memory, memory_of_sketches = {}, {}
    pipeline = Pipeline(GradientMemory(), Sketch(dim))
    for _ in range(2):
        whole, memory = GradientMemory()(fed, bank, Cohort(1, CLIENTS), memory)
        short, memory_of_sketches = pipeline.observe(
            fed, bank, Cohort(1, CLIENTS), memory_of_sketches
        )
        expected = whole.values if dim > DIM else count_sketch(whole.values, dim, fed.seed)
        torch.testing.assert_close(short.values.double(), expected.double(), atol=1e-5, rtol=1e-5)


def test_short_signatures_stay_as_they_are(fed) -> None:
    whole, before = sent(Update(), fed)
    kept, after = sent(Update(), fed, Sketch(10**6))
    assert torch.equal(whole, kept)
    assert before["bytes_up_signature"] == after["bytes_up_signature"]


def test_other_signatures_are_sketched_at_the_server(fed) -> None:
    values, counts = sent(Statistics(), fed, Sketch(4))
    assert torch.equal(values, sent(Statistics(), fed)[0])
    assert counts["bytes_up_signature"] == sent(Statistics(), fed)[1]["bytes_up_signature"]


def test_whole_updates_are_needed_to_keep_the_pass() -> None:
    with pytest.raises(ValueError, match="keep_pass needs whole updates"):
        Flhc(keep_pass=True, clustering=UpdateClustering(embed=Sketch()))


def test_a_run_clusters_and_places_by_sketches(tmp_path) -> None:
    """Holdout clients are placed by sketches too; rounds are recorded with the sketch's bytes."""
    clustering = {
        "embed": {"name": "sketch", "dim": DIM},
        "partition": {"name": "kmeans", "number": 2},
    }
    plain = override(TINY, ["rounds=2", "split.holdout=1"]) | {
        "algorithm": {"name": "flhc", "rounds_before": 1, "clustering": clustering}
    }
    run = run_experiment(parse_experiment(plain), tmp_path)
    assert run.summary["clusters"] == 2
    clients = run.summary["clients"] + 1
    assert run.rounds["bytes_up_signature"].sum() == clients * DIM * 4
