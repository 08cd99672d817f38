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


def _purpose_id(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


def generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """The generator of one purpose at one place, for example (seed, "order", round, client).

    >>> a, b = generator(0, "order", 3, 7), generator(0, "order", 3, 7)
    >>> bool(a.integers(1 << 30) == b.integers(1 << 30))
    True
    """
    return np.random.default_rng(np.random.SeedSequence([seed, _purpose_id(purpose), *where]))


def torch_seed(seed: int, purpose: str, *where: int) -> int:
    """A seed for a torch.Generator, from the same streams as `generator`."""
    return int(generator(seed, purpose, *where).integers(1 << 62))


def step_keys(seed: int, t: int, client: int, num_steps: int) -> NDArray[np.int64]:
    """One 62-bit key for each local step of a client in round t, for the counter hash."""
    return generator(seed, "step", t, client).integers(1 << 62, size=num_steps, dtype=np.int64)


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
    """True with probability 1 - drop; compares integers, so every device decides alike."""
    counter = torch.arange(num_elements, device=key.device)
    return counter_hash(key, counter) >= int(drop * 2**32)
