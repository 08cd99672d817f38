"""Every random number is a function of (run seed, purpose, ...): no global generator, no order.

Two sources: numpy generators for what is decided before anything executes (cohorts, batch orders,
splits), and a counter hash for what is drawn per element while training (dropout, crops), which is
the same integer arithmetic on every engine, block and device.
"""

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 0xFFFFFFFF

# Constants of numpy's SeedSequence and PCG64.
_POOL_SIZE = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HALF = np.uint32(16)
_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_UINT128 = (1 << 128) - 1


def _purpose_id(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


def generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """The generator of one purpose and position, for example (seed, "order", round, client).

    Args:
        seed: the seed of the run.
        purpose: a word for what is drawn; different words give independent streams.
        where: whole numbers that name the position.

    >>> a, b = generator(0, "order", 3, 7), generator(0, "order", 3, 7)
    >>> bool(a.integers(1 << 30) == b.integers(1 << 30))
    True
    """
    return np.random.default_rng(np.random.SeedSequence([seed, _purpose_id(purpose), *where]))


class Generators:
    """`generator(seed, purpose, *where, client)` for many clients, at a quarter of its cost.

    It repeats numpy's SeedSequence for all clients at once. There is one stream that is seeded
    anew: a generator is valid until another one is asked for.

    Args:
        purposes: words for what is drawn.
        where: the position before the client, such as the round.
        clients: (m,) ids below 2^32.

    >>> many = Generators(0, ("order", "step"), 3, clients=np.array([7, 9]))
    >>> bool(many.of("step", 1).random() == generator(0, "step", 3, 9).random())
    True
    """

    def __init__(
        self, seed: int, purposes: tuple[str, ...], *where: int, clients: NDArray[np.int64]
    ) -> None:
        ids = np.repeat([_purpose_id(purpose) for purpose in purposes], len(clients))
        between = [word for number in where for word in _words(number)]
        entropy: list[int | NDArray[np.int64]] = []
        entropy += [*_words(seed), ids, *between, np.tile(clients, len(purposes))]
        self._states = _seed_states(entropy, len(ids)).tolist()
        self._first = {purpose: k * len(clients) for k, purpose in enumerate(purposes)}
        self._stream = np.random.Generator(np.random.PCG64(0))

    def of(self, purpose: str, k: int) -> np.random.Generator:
        """The generator of the k-th client, at its start."""
        high, low, inc_high, inc_low = self._states[self._first[purpose] + k]
        inc = ((inc_high << 64 | inc_low) << 1 | 1) & _UINT128
        state = ((inc + (high << 64 | low)) * _PCG_MULTIPLIER + inc) & _UINT128
        self._stream.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": inc},
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._stream


def _words(number: int) -> list[int]:
    """The words of 32 bits of a number, the lowest first, as SeedSequence takes them."""
    words = [number & _WORD]
    while number := number >> 32:
        words.append(number & _WORD)
    return words


def _seed_states(entropy: list[int | NDArray[np.int64]], length: int) -> NDArray[np.uint64]:
    """(length, 4): SeedSequence(entropy).generate_state(4, uint64) for each element of entropy."""
    columns = [np.broadcast_to(np.asarray(word).astype(np.uint32), length) for word in entropy]
    constant = _INIT_A

    def hashed(value: NDArray[np.uint32]) -> NDArray[np.uint32]:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * _MULT_A & _WORD
        value = value * np.uint32(constant)
        return value ^ (value >> _HALF)

    def mixed(x: NDArray[np.uint32], y: NDArray[np.uint32]) -> NDArray[np.uint32]:
        result: NDArray[np.uint32] = _MIX_LEFT * x - _MIX_RIGHT * y
        return result ^ (result >> _HALF)

    zero = np.zeros(length, np.uint32)
    pool = [hashed(columns[i] if i < len(columns) else zero) for i in range(_POOL_SIZE)]
    for source in range(_POOL_SIZE):
        for into in range(_POOL_SIZE):
            if source != into:
                pool[into] = mixed(pool[into], hashed(pool[source]))
    for column in columns[_POOL_SIZE:]:
        for into in range(_POOL_SIZE):
            pool[into] = mixed(pool[into], hashed(column))
    state = np.empty((length, 2 * _POOL_SIZE), "<u4")
    constant = _INIT_B
    for k in range(2 * _POOL_SIZE):
        value = pool[k % _POOL_SIZE] ^ np.uint32(constant)
        constant = constant * _MULT_B & _WORD
        value = value * np.uint32(constant)
        state[:, k] = value ^ (value >> _HALF)
    return state.view("<u8")


def torch_seed(seed: int, purpose: str, *where: int) -> int:
    """A seed for a torch.Generator, from the same streams as `generator`.

    >>> torch_seed(0, "initial model") == torch_seed(0, "initial model", 1)
    False
    """
    return int(generator(seed, purpose, *where).integers(1 << 62))


def step_keys(stream: np.random.Generator, num_steps: int) -> NDArray[np.int64]:
    """One 62-bit key for each local step of a client in a round, for the counter hash.

    The stream is that of (seed, "step", round, client).
    """
    raw = stream.bit_generator.random_raw(num_steps)
    return (raw >> 2).astype(np.int64)  # as integers(1 << 62) does, at a fifth of the cost


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's finaliser; words of 32 bits in int64, whose wrapped products end exactly."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _WORD
    return h ^ (h >> 16)


def counter_hash(key: Tensor, counter: Tensor) -> Tensor:
    """Uniform 32-bit integers (in int64), one for each broadcast pair of key and counter.

    >>> key = torch.tensor(5)
    >>> h = counter_hash(key, torch.arange(4))
    >>> bool(torch.equal(h[:2], counter_hash(key, torch.arange(2))))
    True
    """
    low, high = key & _WORD, key >> 32 & _WORD
    return _mix32(_mix32(counter * 0x9E3779B1 + low & _WORD) + high & _WORD)


def keep_mask(key: Tensor, num_elements: int, drop: float) -> Tensor:
    """(num_elements,) True with probability 1 - drop; every device decides alike.

    >>> keep_mask(torch.tensor(5), 1000, drop=0.25).sum().item()
    740
    """
    counter = torch.arange(num_elements, device=key.device)
    return counter_hash(key, counter) >= int(drop * 2**32)
