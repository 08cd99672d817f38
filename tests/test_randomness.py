import numpy as np
import pytest
import torch

from flray.randomness import Generators, counter_hash, generator, keep_mask, step_keys


def reference_hash(key: int, counter: int) -> int:
    """The counter hash in Python's unbounded integers."""

    def mix(h: int) -> int:
        h = ((h ^ h >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
        h = ((h ^ h >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
        return h ^ h >> 16

    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return mix((mix((counter * 0x9E3779B1 + low) & 0xFFFFFFFF) + high) & 0xFFFFFFFF)


def test_counter_hash_is_exact_integer_arithmetic() -> None:
    keys = [0, 1, 2**32, 2**61 + 12345, 2**62 - 1]
    counters = [0, 1, 7, 2**20, 2**31 - 1]
    found = counter_hash(torch.tensor(keys)[:, None], torch.tensor(counters))
    expected = [[reference_hash(k, c) for c in counters] for k in keys]
    assert found.tolist() == expected


def test_dropout_keeps_the_asked_share_and_neighbouring_keys_are_unrelated() -> None:
    masks = torch.stack([keep_mask(torch.tensor(k), 20_000, 0.3) for k in (5, 6, 5 + 2**32)])
    assert masks.double().mean(1).tolist() == pytest.approx([0.7] * 3, abs=0.015)
    correlations = np.corrcoef(masks.double().numpy())
    assert np.abs(correlations - np.eye(3)).max() < 0.03


@pytest.mark.parametrize("other", [(1, "order", 2, 3), (0, "cohort", 2, 3), (0, "order", 3, 2)])
def test_streams_differ_by_seed_purpose_and_place(other: tuple[int, str, int, int]) -> None:
    one = generator(0, "order", 2, 3).integers(1 << 40, size=4)
    assert (one != generator(*other).integers(1 << 40, size=4)).all()


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1, 2**32, 2**62 - 1, 2**70 + 5])
@pytest.mark.parametrize("where", [(), (0,), (7,), (2, 2**33)])
def test_generators_of_many_places_are_those_of_each(seed: int, where: tuple[int, ...]) -> None:
    """From two words of entropy to seven; numpy's pool has four."""
    places = np.array([0, 1, 5, 2**31, 2**32 - 1])
    many = Generators(seed, ("step", "order"), *where, clients=places)
    found = [
        (g.permutation(50).tolist(), g.integers(1 << 62, size=3).tolist(), g.random())
        for g in (many.of("order", k) for k in (3, 1, 2, 0, 4))
    ]
    alone = [generator(seed, "order", *where, int(places[k])) for k in (3, 1, 2, 0, 4)]
    assert found == [
        (g.permutation(50).tolist(), g.integers(1 << 62, size=3).tolist(), g.random())
        for g in alone
    ]


def test_a_generator_does_not_go_on_with_half_a_word_of_the_one_before() -> None:
    """32-bit draws leave the other half of a word behind."""
    many = Generators(1, ("order",), clients=np.array([4]))
    draws = [
        many.of("order", 0).integers(1 << 20, size=3, dtype=np.int32).tolist() for _ in range(2)
    ]
    assert draws[0] == draws[1]


def test_keys_of_steps_are_integers_of_62_bits() -> None:
    drawn = generator(0, "step", 1, 2).integers(1 << 62, size=50, dtype=np.int64)
    assert step_keys(generator(0, "step", 1, 2), 50).tolist() == drawn.tolist()
