import numpy as np
import pytest
import torch

from flray.models import fixed_point, sum_on_cpu
from flray.models.bank import ModelBank
from flray.models.fixed_point import Terms
from flray.models.mixing import (
    Aggregation,
    HeldModels,
    MixingRow,
    Relation,
    Weighted,
    first_and_inverse,
    mix,
    rows_of_clients,
)


def mix_bank(relation, cohort, trained, bank, aggregation) -> ModelBank:
    weighted = Weighted.of(relation.strengths, cohort, bank, aggregation.unheard)
    rows, owner = rows_of_clients(relation, weighted, bank, aggregation)
    return ModelBank(mix(rows, trained, bank.params), owner)


def row_of(strengths, previous, cohort, bank, aggregation) -> MixingRow:
    """The row of [A B] of a model that hears client j with strength strengths[j]."""
    one = Weighted.of(lambda clients: strengths[None, clients], cohort, bank, aggregation.unheard)
    return one.row(0, previous, aggregation)


def bank_of(rows: list[float], owner: list[int]) -> ModelBank:
    return ModelBank({"w": torch.tensor(rows)[:, None]}, np.array(owner))


def dense(row, num_heard: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.zeros(num_heard), np.zeros(num_rows)
    a[row.heard], b[row.kept] = row.a, row.b
    return a, b


@pytest.mark.parametrize("largest", [1, 3, 40, 200, 10**9])
def test_distinct_numbers_are_those_of_unique(largest: int) -> None:
    """Counted up to four times the number of clients, sorted above."""
    rng = np.random.default_rng(largest)
    for num in (0, 1, 2, 50):
        numbers = rng.integers(0, largest, num)
        _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
        for mine, theirs in zip(first_and_inverse(numbers), (first, place), strict=True):
            assert mine.tolist() == theirs.tolist()


def test_mean_is_weighted_by_samples_of_those_heard() -> None:
    """Clients 1 (n=10) and 3 (n=30) heard: 10/40 * 1 + 30/40 * 5 = 4."""
    bank = bank_of([100.0], [0, 0, 0, 0])
    n = np.array([5.0, 10, 20, 30])
    row = row_of(n, 0, np.array([1, 3]), bank, Aggregation())
    assert mix([row], HeldModels({"w": torch.tensor([[1.0], [5.0]])}), bank.params)["w"].item() == 4


def test_stale_clients_count_as_they_were() -> None:
    """n = 10, 10, 20; only client 2 heard: (10 * 1 + 10 * 3 + 20 * 7) / 40 = 4.5."""
    bank = bank_of([1.0, 3.0], [0, 1, 1])
    row = row_of(np.array([10.0, 10, 20]), 0, np.array([2]), bank, Aggregation("stale"))
    assert mix([row], HeldModels({"w": torch.tensor([[7.0]])}), bank.params)["w"].item() == 4.5


def test_server_lr_moves_part_of_the_way() -> None:
    """From 2 towards 6 with step 0.25: 3."""
    bank = bank_of([2.0], [0, 0])
    row = row_of(np.ones(2), 0, np.array([0, 1]), bank, Aggregation(server_lr=0.25))
    assert mix([row], HeldModels({"w": torch.tensor([[4.0], [8.0]])}), bank.params)["w"].item() == 3


@pytest.mark.parametrize("unheard", ["ignore", "stale"])
@pytest.mark.parametrize("server_lr", [0.3, 1.0, 1.5])
def test_rows_sum_to_one(unheard, server_lr) -> None:
    rng = np.random.default_rng(0)
    bank = bank_of([1.0, 2.0, 3.0], [0, 1, 2, 0, 1, 2, 0, 1])
    for _ in range(20):
        relation = rng.random(8) * (rng.random(8) < 0.6)
        cohort = np.sort(rng.choice(8, 3, replace=False))
        row = row_of(relation, 1, cohort, bank, Aggregation(unheard, server_lr=server_lr))
        a, b = dense(row, 3, 3)
        assert a.sum() + b.sum() == pytest.approx(1, abs=1e-12)
        if not relation[cohort].any():
            assert b.tolist() == [0, 1, 0]  # a row that hears nobody stays


def test_a_copied_model_keeps_every_bit_and_nothing_received_changes() -> None:
    trained = {"w": torch.tensor([[-0.0], [5.0]])}
    bank = bank_of([1.0], [0, 0])
    row = row_of(np.array([1.0, 0.0]), 0, np.array([0, 1]), bank, Aggregation())
    mixed = mix([row], HeldModels(trained), bank.params)["w"]
    assert torch.signbit(mixed).all()
    mixed.fill_(9)
    assert trained["w"].tolist() == [[-0.0], [5.0]]
    assert bank.params["w"].tolist() == [[1.0]]


def test_hash_sees_models_not_rows() -> None:
    shared, split = bank_of([1.0, 2.0], [0, 0, 1]), bank_of([2.0, 1.0, 1.0], [1, 2, 0])
    assert shared.sha256() == split.sha256()
    assert shared.sha256() != bank_of([1.0, 2.0], [0, 1, 1]).sha256()
    assert shared.sha256() != bank_of([1.0, 2.0 + 1e-6], [0, 0, 1]).sha256()


def test_the_models_of_some_clients_by_hand() -> None:
    bank = bank_of([1.0, 2.0, 3.0], [2, 0, 2, 1])
    some = bank.of_some(np.array([0, 1]))
    assert some.params["w"].flatten().tolist() == [1.0, 3.0]
    assert some.owner[[0, 1]].tolist() == [1, 0]
    assert bank.of_some(np.arange(4)) is bank
    assert some.digests(np.array([0, 1])) == bank.digests(np.array([0, 1]))
    assert len(set(bank.digests(np.arange(4)))) == 3


def test_rows_of_a_relation_by_hand() -> None:
    """FLT's Case I, everybody heard: w_m = sum_j R_mj n_j w_j / sum_j R_mj n_j."""
    strengths = np.array([[1.0, 1, 0], [1, 1, 1], [0, 1, 1]]) * np.array([1.0, 2, 3])  # R_ij n_j
    trained = {"w": torch.tensor([[1.0], [4.0], [10.0]], dtype=torch.float64)}
    bank = ModelBank({"w": torch.zeros(1, 1, dtype=torch.float64)}, np.zeros(3, np.int64))
    mixed = mix_bank(
        Relation.of_matrix(strengths), np.arange(3), HeldModels(trained), bank, Aggregation()
    )
    got = mixed.of_clients(np.arange(3))["w"].flatten().tolist()
    assert got == pytest.approx([9 / 3, 39 / 6, 38 / 5])


def test_who_hears_nobody_keeps_its_model_beside_the_others() -> None:
    """Clients 0 and 1 are a cluster with different models; 2 is another; nobody hears 3."""
    bank = ModelBank({"w": torch.tensor([[1.0], [2.0]])}, np.array([0, 1, 1, 0]))
    relation = Relation.of_clusters(np.array([0, 0, 1, -1]))
    seven = HeldModels({"w": torch.tensor([[7.0]])})
    quiet = mix_bank(relation, np.array([2]), seven, bank, Aggregation())
    assert quiet.of_clients(np.arange(4))["w"].flatten().tolist() == [1.0, 2.0, 7.0, 1.0]
    loud = mix_bank(relation, np.array([1]), seven, bank, Aggregation())
    assert loud.of_clients(np.arange(4))["w"].flatten().tolist() == [7.0, 7.0, 2.0, 1.0]
    assert loud.owner[0] == loud.owner[1]


def test_a_small_server_step_starts_from_each_ones_own() -> None:
    bank = ModelBank({"w": torch.tensor([[0.0], [2.0]])}, np.array([0, 1]))
    joint = Relation.joint(2)
    half = Aggregation(server_lr=0.5)
    mixed = mix_bank(joint, np.array([0]), HeldModels({"w": torch.tensor([[4.0]])}), bank, half)
    assert mixed.of_clients(np.arange(2))["w"].flatten().tolist() == [2.0, 3.0]


def random_rows(num_heard: int, num_kept: int, num_rows: int) -> list[MixingRow]:
    """Rows of different lengths with negative weights, one that copies, one that keeps."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(num_rows):
        heard = np.flatnonzero(rng.random(num_heard) < 0.5)
        kept = np.flatnonzero(rng.random(num_kept) < 0.5)
        weights = rng.normal(size=len(heard) + len(kept))
        rows.append(MixingRow(heard, weights[: len(heard)], kept, weights[len(heard) :]))
    one, none = np.ones(1), np.empty(0)
    rows.append(MixingRow(np.array([2]), one, np.empty(0, np.int64), none))
    rows.append(MixingRow(np.empty(0, np.int64), none, np.array([1]), one))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixing_is_the_matrix_product_and_does_not_depend_on_order(dtype) -> None:
    """Leaves of sizes far apart, so that each needs a scale of its own."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"large": 1e4, "small": 1e-20, "zero": 0.0}
    trained, bank = (
        {n: s * torch.randn(k, 3, 5, generator=draw, dtype=dtype) for n, s in sizes.items()}
        for k in (30, 4)
    )
    rows = random_rows(30, 4, 6)
    mixed = mix(rows, HeldModels(trained), bank)
    order = np.random.default_rng(0).permutation(30)
    place = np.argsort(order)
    shuffled = {n: leaf[torch.from_numpy(order)] for n, leaf in trained.items()}
    again = mix(
        [MixingRow(place[r.heard][::-1].copy(), r.a[::-1].copy(), r.kept, r.b) for r in rows],
        HeldModels(shuffled),
        bank,
    )
    a, b = np.zeros((len(rows), 30)), np.zeros((len(rows), 4))
    for v, row in enumerate(rows):
        a[v, row.heard], b[v, row.kept] = row.a, row.b
    tolerance = {torch.float32: 1e-7, torch.float64: 1e-15}[dtype]
    for name, size in sizes.items():
        assert torch.equal(mixed[name], again[name])
        exact = np.tensordot(a, trained[name].double().numpy(), 1)
        exact += np.tensordot(b, bank[name].double().numpy(), 1)
        # Weights of float32 have 24 bits and the sums of 30 terms here reach about 30 times `size`.
        np.testing.assert_allclose(mixed[name].double().numpy(), exact, atol=30 * size * tolerance)
    assert torch.equal(mixed["large"][-2], trained["large"][2])
    assert torch.equal(mixed["large"][-1], bank["large"][1])
    assert mixed["large"].abs().max() > 1e3


def test_parts_of_a_sum_add_up_to_the_whole() -> None:
    """As hosts do it that have some of the models each."""
    draw = torch.Generator().manual_seed(0)
    models = {"w": torch.randn(7, 4, generator=draw)}
    weights = np.random.default_rng(1).random(7)
    terms = Terms(
        (np.arange(7), np.array([5, 1])), (weights, weights[:2]), {"w": np.array([20, 9])}
    )
    place = np.array([0, -1, 1, -1, 2, -1, 3])
    here = terms.at(place)({"w": models["w"][[0, 2, 4, 6]]})["w"]
    there = terms.at(np.array([-1, 0, -1, 1, -1, 2, -1]))({"w": models["w"][[1, 3, 5]]})["w"]
    assert torch.equal(here + there, terms(models)["w"])
    assert here.abs().sum() > 0
    assert there.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [("ELEMENTS_ON_CPU", 1), ("WORTH_COMPILING", 0)])
def test_sums_do_not_depend_on_how_models_lie_or_how_they_are_read(dtype, way, monkeypatch) -> None:
    draw = np.random.default_rng(3)
    sizes = [3, 0, 6, 1]
    places = tuple(draw.permutation(7)[:size] for size in sizes)
    weights = (*(draw.random(size) for size in sizes[:3]), np.ones(1))
    terms = Terms(places, weights, {"w": np.full(4, 20)})
    leaf = torch.from_numpy(draw.normal(size=(7, 2, 3))).to(dtype)
    leaf[:, 0] = torch.tensor([0.5, 1.5, -2.5]) / 2.0**20  # halfway between two integers
    turned = leaf.transpose(1, 2).contiguous().transpose(1, 2)
    assert turned.stride() != leaf.stride()
    with_room = leaf.repeat_interleave(2, 2)[:, :, ::2]
    expected = terms({"w": leaf})["w"]
    assert expected[3, 0].tolist() == [0, 2, -2]
    assert expected[2, 1].abs().min() > 0
    monkeypatch.setattr(fixed_point, *way)
    monkeypatch.setattr(sum_on_cpu, "PIECE", 4)
    for models in (leaf, turned, with_room):
        found = terms({"w": models})["w"]
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        assert torch.equal(found, expected)
    largest = fixed_point.largest_values
    assert np.array_equal(largest({"w": turned})["w"], largest({"w": leaf})["w"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sums_on_a_gpu_are_those_of_a_cpu() -> None:
    draw = np.random.default_rng(3)
    places = tuple(draw.permutation(7)[:size] for size in (3, 0, 6, 1))
    terms = Terms(
        places, tuple(draw.random(len(each)) for each in places), {"w": np.array([9, 20, 17, 3])}
    )
    leaf = torch.from_numpy(draw.normal(size=(7, 500, 3))).float()
    leaf[0] = torch.arange(1500).view(500, 3) / 2.0**10  # products of any size
    for models in (leaf, leaf.double(), leaf.transpose(1, 2)):
        summed = terms({"w": models.cuda()})["w"].cpu()
        assert torch.equal(summed, terms({"w": models})["w"])
