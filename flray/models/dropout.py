"""Dropout whose mask is a function of (run seed, round, client, step, element)."""

import torch
from torch import Tensor, nn

from flray.randomness import counter_hash, keep_mask


class KeyedDropout(nn.Module):
    """Dropout drawn from a key that the engine sets before each step; no generator, no state.

    The key is a buffer, so that stacked clients each bring their own under `vmap`.
    """

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must be in [0, 1), got {p}")
        self.p = p
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = keep_mask(self.key, x.numel(), self.p).view(x.shape)
        return torch.where(keep, x / (1 - self.p), torch.zeros_like(x))


def dropout_keys(module: nn.Module, step_key: Tensor) -> dict[str, Tensor]:
    """The key buffer of every KeyedDropout by name, each layer hashed separately.

    step_key may be one key or one per stacked client; the keys have its shape.
    """
    dropouts = {n: m for n, m in module.named_modules() if isinstance(m, KeyedDropout)}
    if not any(layer.p for layer in dropouts.values()):
        return {}  # nothing is drawn
    layers = list(dropouts)
    counters = torch.arange(2 * len(layers), device=step_key.device)
    words = counter_hash(step_key[..., None], counters)  # (..., 2 layers)
    keys = words[..., 0::2] >> 1 << 32 | words[..., 1::2]
    return {f"{name}.key" if name else "key": keys[..., i] for i, name in enumerate(layers)}
