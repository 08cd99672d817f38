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
from flray.data.dataset import Ids
from flray.engines.vectorized import Vectorized, refusal, tile_size
from flray.models.bank import Params, load_params
from flray.models.classifier import Batch, HasExampleLosses, HasLosses

SCORE_BATCH = 1000  # examples a forward pass; large, for no gradient is kept

# Examples of a model in a stacked pass. A model with more than so many pieces is worth passes of
# its own: it is then no longer the number of passes that costs. A GPU stacks pieces of SCORE_BATCH
# examples of linear layers, which take less time than the calls.
PIECE = 32
MOST_PIECES = 16
STACKED_ON_GPU = 20  # models in a pass
STACKED_BYTES = 1 << 28  # of images in a pass


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
    sizes = [_piece_size(host, len(job.examples)) if outputs is not None else 0 for job in jobs]
    scores: dict[int, ExampleScores] = {}
    with torch.no_grad():
        for size in sorted(set(sizes)):
            alike = [k for k, own in enumerate(sizes) if own == size]
            if size and outputs is not None:
                found = _score_stacked(host, bank, outputs, [jobs[k] for k in alike], size)
            else:
                alike.sort(key=lambda k: jobs[k].row)
                found = _score_one_by_one(host, bank, [jobs[k] for k in alike])
            scores |= zip(alike, found, strict=True)
    return [scores[k] for k in range(len(jobs))]


def _piece_size(host: Host, num_examples: int) -> int:
    """Examples of a model in a stacked pass; 0: the model is evaluated alone."""
    if 0 < num_examples <= PIECE * MOST_PIECES:
        return PIECE
    written, images = host.written_forward, host.examples.images
    if not num_examples or images.device.type == "cpu" or written is None or not written.is_dense:
        return 0
    size = images[0].numel() * host.examples.mean.element_size()
    return SCORE_BATCH if STACKED_ON_GPU * SCORE_BATCH * size <= STACKED_BYTES else 0


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
    written = host.written_forward
    if host.examples.device.type == "cpu":
        return None if written is None else written.outputs
    if written is not None and written.is_dense:
        return written.outputs
    return vmap(lambda w, x: functional_call(module, w, (x,)))


def _score_stacked(
    host: Host, bank: Params, outputs: StackedOutputs, jobs: Sequence[ScoreJob], piece: int
) -> list[ExampleScores]:
    """Passes of many models over `piece` examples each, brought from the device at the end."""
    pieces = [
        (job.row, job.examples[first : first + piece])
        for job in jobs
        for first in range(0, len(job.examples), piece)
    ]
    num_params = sum(p.numel() for p in host.module.parameters())
    on_cpu = host.examples.device.type == "cpu"
    size = tile_size(num_params, STACKED_ON_GPU) if on_cpu else STACKED_ON_GPU
    filled = pieces + [pieces[-1]] * (-len(pieces) % size)
    rows = torch.tensor([row for row, _ in filled])
    ids = np.stack([np.resize(own, piece) for _, own in filled])  # padded with their own
    on_device = torch.from_numpy(ids).to(host.examples.device)
    here = rows.to(next(iter(bank.values())).device)

    def score(first: int) -> tuple[Tensor, Tensor]:
        some = slice(first, first + size)
        with torch.no_grad():
            return _score_pieces(host, bank, outputs, here[some], on_device[some])

    stacks = range(0, len(filled), size)
    threads = host.engine.threads if isinstance(host.engine, Vectorized) else 1
    if threads > 1 and on_cpu and len(stacks) > 1:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(score, stacks))
    else:
        found = [score(first) for first in stacks]
    correct, loss = (torch.cat(each).cpu().numpy() for each in zip(*found, strict=True))
    lengths = [len(own) for _, own in pieces]
    each_piece = (
        ExampleScores(correct[k, :length], loss[k, :length]) for k, length in enumerate(lengths)
    )
    return list(_joined(each_piece, jobs, piece))


def _score_pieces(
    host: Host, bank: Params, outputs: StackedOutputs, rows: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """One pass of models over their examples (K, piece): is each right, and its loss."""
    x, y = host.examples.batch(ids)
    w = {name: leaf.index_select(0, rows).to(ids.device) for name, leaf in bank.items()}
    output = outputs(w, x).flatten(0, 1)
    losses = cast(HasLosses, host.module).losses(output, y.flatten())
    correct = _correct(output, y.flatten())
    return correct.view(ids.shape), losses.view(ids.shape).double()


def _joined(
    pieces: Iterator[ExampleScores], jobs: Sequence[ScoreJob], piece: int
) -> Iterator[ExampleScores]:
    for job in jobs:
        own = [next(pieces) for _ in range(0, len(job.examples), piece)]
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
