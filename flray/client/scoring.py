"""Scores of models on examples: one model after another, or small sets of many models stacked."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.func import functional_call, vmap

from flray.client.host import Host
from flray.client.vectorized import Vectorized, refusal, tile_size
from flray.data.dataset import Ids
from flray.models.bank import Params, load_params
from flray.models.classifier import Batch, HasExampleLosses, HasLosses

SCORE_BATCH = 1000  # examples a forward pass; large, for no gradient is kept

# Examples of a model in a stacked pass. A model with more than so many pieces is worth passes of
# its own: it is then no longer the number of passes that costs.
PIECE = 32
MOST_PIECES = 16
STACKED_ON_GPU = 20  # models in a pass


@dataclass(frozen=True)
class ScoreJob:
    """One model and the examples to judge it on."""

    row: int
    examples: Ids  # (R,)


@dataclass(frozen=True)
class ExampleScores:
    correct: NDArray[np.bool_]  # (R,)
    loss: NDArray[np.float64]  # (R,) NaN for a module without example_losses


def score_models(host: Host, bank: Params, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
    """The scores of each job, with bits that do not depend on the other jobs.

    Whether a model is stacked depends on the number of its examples alone, and a stacked pass
    always has the same shape: pieces are padded, and missing models are repeated.
    """
    host.module.eval()
    outputs = _stacked_outputs(host)
    is_small = [outputs is not None and 0 < len(j.examples) <= PIECE * MOST_PIECES for j in jobs]
    small = [k for k, here in enumerate(is_small) if here]
    scores: dict[int, ExampleScores] = {}
    with torch.no_grad():
        if outputs is not None and small:
            found = _score_stacked(host, bank, outputs, [jobs[k] for k in small])
            scores |= zip(small, found, strict=True)
        others = sorted(set(range(len(jobs))) - set(small), key=lambda k: jobs[k].row)
        if others:
            found = _score_one_by_one(host, bank, [jobs[k] for k in others])
            scores |= zip(others, found, strict=True)
    return [scores[k] for k in range(len(jobs))]


def _score_one_by_one(host: Host, bank: Params, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
    """Scores of jobs in the order of their models, brought from the device at the end."""
    ids = torch.from_numpy(np.concatenate([job.examples for job in jobs])).to(host.examples.device)
    sizes = [len(job.examples) for job in jobs]
    correct, losses = [ids.new_empty(0, dtype=torch.bool)], [ids.new_empty(0, dtype=torch.float64)]
    loaded = None
    for job, own in zip(jobs, torch.split(ids, sizes), strict=True):
        if job.row != loaded:
            loaded = job.row
            load_params(host.module, {name: leaf[loaded] for name, leaf in bank.items()})
        for some in torch.split(own, SCORE_BATCH) if len(own) else []:
            x, y = host.examples.batch(some)
            output = host.module(x)
            correct.append(_correct(output, y))
            losses.append(_losses(host.module, output, (x, y)).double())
    ends = np.cumsum(sizes)[:-1]
    return [
        ExampleScores(*of_job)
        for of_job in zip(
            np.split(torch.cat(correct).cpu().numpy(), ends),
            np.split(torch.cat(losses).cpu().numpy(), ends),
            strict=True,
        )
    ]


# Outputs (K, B, classes) of stacked models and their images.
StackedOutputs = Callable[[Params, Tensor], Tensor]


def _stacked_outputs(host: Host) -> StackedOutputs | None:
    """How stacked models are evaluated; None for modules that must be evaluated one by one."""
    module = host.module
    if refusal(module) or not hasattr(module, "losses"):
        return None
    if host.examples.device.type == "cpu":
        return None if host.written_forward is None else host.written_forward.outputs
    return vmap(lambda w, x: functional_call(module, w, (x,)))


@dataclass(frozen=True)
class _Piece:
    """At most PIECE examples of one job."""

    row: int
    ids: Ids


def _score_stacked(
    host: Host, bank: Params, outputs: StackedOutputs, jobs: Sequence[ScoreJob]
) -> list[ExampleScores]:
    pieces = [
        _Piece(job.row, job.examples[first : first + PIECE])
        for job in jobs
        for first in range(0, len(job.examples), PIECE)
    ]
    num_params = sum(p.numel() for p in host.module.parameters())
    on_cpu = host.examples.device.type == "cpu"
    size = tile_size(num_params, STACKED_ON_GPU) if on_cpu else STACKED_ON_GPU
    stacks = [pieces[first : first + size] for first in range(0, len(pieces), size)]

    def score(stack: list[_Piece]) -> list[ExampleScores]:
        with torch.no_grad():
            return _score_pieces(host, bank, outputs, stack, size)

    threads = host.engine.threads if isinstance(host.engine, Vectorized) else 1
    if threads > 1 and on_cpu and len(stacks) > 1:
        with ThreadPoolExecutor(threads) as pool:
            found = [each for some in pool.map(score, stacks) for each in some]
    else:
        found = [each for stack in stacks for each in score(stack)]
    return list(_joined(iter(found), jobs))


def _score_pieces(
    host: Host, bank: Params, outputs: StackedOutputs, stack: list[_Piece], size: int
) -> list[ExampleScores]:
    """One pass of `size` models over PIECE examples each."""
    device = host.examples.device
    filled = stack + [stack[0]] * (size - len(stack))
    rows = torch.tensor([piece.row for piece in filled])
    ids = np.stack([np.resize(piece.ids, PIECE) for piece in filled])  # padded with their own
    x, y = host.examples.batch(torch.from_numpy(ids).to(device))
    w = {name: leaf.index_select(0, rows.to(leaf.device)).to(device) for name, leaf in bank.items()}
    output = outputs(w, x).flatten(0, 1)
    losses = cast(HasLosses, host.module).losses(output, y.flatten())
    correct = _correct(output, y.flatten()).view(ids.shape).cpu().numpy()
    loss = losses.view(ids.shape).double().cpu().numpy()
    return [
        ExampleScores(correct[k, : len(piece.ids)], loss[k, : len(piece.ids)])
        for k, piece in enumerate(stack)
    ]


def _joined(pieces: Iterator[ExampleScores], jobs: Sequence[ScoreJob]) -> Iterator[ExampleScores]:
    for job in jobs:
        own = [next(pieces) for _ in range(0, len(job.examples), PIECE)]
        yield ExampleScores(
            np.concatenate([each.correct for each in own]),
            np.concatenate([each.loss for each in own]),
        )


def _correct(output: Tensor, labels: Tensor) -> Tensor:
    """Always False for modules without class scores, such as autoencoders."""
    if output.dim() != 2:
        return torch.zeros_like(labels, dtype=torch.bool)
    return output.argmax(-1) == labels


def _losses(module: LightningModule, output: Tensor, batch: Batch) -> Tensor:
    if hasattr(module, "losses"):  # spares a second forward pass
        return cast(HasLosses, module).losses(output, batch[1])
    if hasattr(module, "example_losses"):
        return cast(HasExampleLosses, module).example_losses(batch)
    return output.new_full((len(output),), torch.nan)
