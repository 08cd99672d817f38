"""Marks of gradient hooks that cost a written-out model less: `affine` and `stacked`.

The direction of an affine hook is grad(w, batch) + a w + b. FedProx has a = μ and b = -μ w0,
SCAFFOLD a = 0 and b = c - c_i. a and b do not change during a round, so a written-out step of SGD
takes the term while each layer moves, by one more pass over its weights.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from flray.engines.losses import along, direction_and_loss
from flray.engines.training import Gradient, LocalBatch
from flray.models.bank import Params

NO_BATCH = LocalBatch(torch.empty(0), torch.empty(0), None, {})  # hooks pass it to `grad` alone

Hook = TypeVar("Hook", bound=Callable[..., Params])


def affine(hook: Hook) -> Hook:
    """Mark a gradient hook that returns g + a w + b for each leaf, with g = grad(w, batch).

    a is a number that follows from the method's own settings, the same for all clients. b follows
    from w0 and memo, element by element, and is 0 where they are 0: engines read a off the hook at
    w = 1 and w0 = memo = 0. An unmarked hook is right too, but it costs about 600 µs more per step
    of an MLP.

    >>> @affine
    ... def fedprox(grad, w, batch, w0, memo):
    ...     g = grad(w, batch)
    ...     return {name: g[name] + 0.5 * (w[name] - w0[name]) for name in g}
    >>> is_affine(fedprox)
    True
    """
    hook.is_affine = True  # type: ignore[attr-defined]  # a mark on a function
    return hook


def is_affine(hook: Gradient) -> bool:
    """True if the hook, a function or a method, is marked with `affine`."""
    return bool(getattr(hook, "is_affine", False))


def stacked(hook: Hook) -> Hook:
    """Mark a gradient hook that is right for one client and for K stacked ones.

    It receives leaves (K, ...), a batch (K, B, ...) and a memo (K, ...), and `grad` returns the
    gradients of all. Arithmetic element by element needs no care; a sum over the numbers of a
    client must leave axis K, and a number per client, (K,), needs axes to meet a leaf. It must not
    ask for another loss (`batch.loss`). Hooks without the mark run under `vmap`, which costs about
    1 ms more per gradient.

    >>> @stacked
    ... def clipped(grad, w, batch, w0, memo):
    ...     return {name: g.clamp(-1, 1) for name, g in grad(w, batch).items()}
    >>> is_stacked(clipped)
    True
    """
    hook.is_stacked = True  # type: ignore[attr-defined]  # a mark on a function
    return hook


def is_stacked(hook: Gradient) -> bool:
    """True if the hook is marked with `stacked`, or with `affine`, which is element by element."""
    return bool(getattr(hook, "is_stacked", False)) or is_affine(hook)


def factors(
    hook: Gradient, leaves: Iterable[str], moved: Iterable[str], memo: Iterable[str]
) -> dict[str, float]:
    """The number a of each leaf that moves, for an affine hook.

    >>> from flray.algorithms.fedprox import FedProx
    >>> factors(FedProx(mu=0.5).gradient, ["w"], ["w"], [])
    {'w': 0.5}
    """
    zero, one = (torch.tensor(value, dtype=torch.float64) for value in (0.0, 1.0))
    zeros = dict.fromkeys(leaves, zero)
    ones = dict.fromkeys(zeros, one)
    no_memo = dict.fromkeys(memo, zero)
    direction, _ = direction_and_loss(hook, no_gradient, ones, NO_BATCH, zeros, no_memo)
    return {name: float(along(direction, name, hook)) for name in moved}


def offsets(hook: Gradient, a: dict[str, float], w0: Params, memo: Params) -> Params:
    """u = -b / a of each leaf, so that a w + b is a (w - u); b itself where a is 0.

    >>> from flray.algorithms.fedprox import FedProx
    >>> offsets(FedProx(mu=0.5).gradient, {"w": 0.5}, {"w": torch.tensor([3.0])}, {})
    {'w': tensor([3.])}
    """
    zeros = {name: leaf.new_zeros(()) for name, leaf in w0.items()}
    # What all clients share is computed once, and shown to each of them.
    w0_once, memo_once = (
        {n: leaf if leaf.stride(0) else leaf[:1] for n, leaf in leaves.items()}
        for leaves in (w0, memo)
    )
    direction, _ = direction_and_loss(hook, no_gradient, zeros, NO_BATCH, w0_once, memo_once)
    b = {name: along(direction, name, hook) for name in a}
    return {n: (b[n] / -a[n] if a[n] else b[n]).expand_as(w0[n]) for n in a}


def no_gradient(
    w: Params,
    batch: LocalBatch,  # noqa: ARG001  # as hooks call it
) -> tuple[Params, Tensor]:
    """A gradient and a loss of 0, for hooks that are called without a model."""
    return {name: torch.zeros_like(leaf) for name, leaf in w.items()}, torch.zeros(())


@dataclass(frozen=True)
class AffineTerm:
    """The term a (w - u) of stacked clients, or b where a is 0, by name of a leaf.

    >>> w = torch.tensor([3.0])
    >>> AffineTerm({"w": 0.5}, {"w": torch.tensor([1.0])}).move("w", w, lr=0.1)
    >>> w  # 3 - 0.1 (0.5 (3 - 1))
    tensor([2.9000])
    """

    a: dict[str, float]
    offsets: Params  # u or b, in the layout in which layers move their weights

    def move(self, name: str, w: Tensor, lr: float) -> None:
        """w <- w - lr (a (w - u)), in place."""
        if self.a[name]:
            w.lerp_(self.offsets[name], lr * self.a[name])
        else:
            w.sub_(self.offsets[name], alpha=lr)

    def add_to(self, name: str, direction: Tensor, w: Tensor) -> None:
        """direction <- direction + a (w - u), in place."""
        if self.a[name]:
            direction.add_(w - self.offsets[name], alpha=self.a[name])
        else:
            direction.add_(self.offsets[name])
