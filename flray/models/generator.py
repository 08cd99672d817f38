"""torch's global generator, seeded for a while: layers and initialisers of users draw from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

# The generator belongs to the process: of two runs in threads, one waits for the other.
_IN_USE = RLock()


@contextmanager
def seeded_generator(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators of the CPU and of this device during the `with` block.

    Their states before are restored.

    Args:
        seed: None leaves the generators as they are, for work that draws nothing.

    >>> with seeded_generator(3):
    ...     a = torch.rand(2)
    >>> with seeded_generator(3):
    ...     b = torch.rand(2)
    >>> bool((a == b).all())
    True
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with _IN_USE, torch.random.fork_rng(devices=devices):
        if seed is not None:
            # torch.manual_seed would also seed, and so start, GPUs that were not named.
            (torch.random.manual_seed if devices else torch.default_generator.manual_seed)(seed)
        yield
