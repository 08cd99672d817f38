"""Scores of models on examples: one model after another, or small sets of many models stacked.

Where many clients ask for the same models, their examples are joined (`score_shared`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from flray.client.host import EVALUATION_BATCH, Host
from flray.client.scores import ModuleScore, Score, Terms, is_right
from flray.data.dataset import Ids
from flray.engines.vectorized import Vectorized, refusal, tile_size
from flray.errors import ExperimentError, located
from flray.models.bank import Params, load_params, rows_on
from flray.models.predictor import Batch, HasExampleLosses, HasLosses

# Most examples of a model in a stacked pass: the examples of a model are cut into equal pieces.
# Linear layers take larger ones, because a pass copies the weights of its models. A model with more
# than MOST_PIECES pieces of 32 is evaluated alone: the number of passes no longer matters. A GPU
# stacks pieces of EVALUATION_BATCH examples of linear layers, which take less time than the calls.
# Pieces of examples that all models of a pass share have DENSE_PIECE examples on a CPU.
PIECE = 32
DENSE_PIECE = 128
MOST_PIECES = 16
PIECE_STEP = 4  # a piece has a multiple of it: models of about the same size share a pass
STACKED_ON_GPU = 20  # models in a pass
STACKED_BYTES = 1 << 28  # of images in a pass

# Outputs (K, B, classes) of stacked models, leaves (K, ...), for their images (K, B, ...).
StackedOutputs = Callable[[Params, Tensor], Tensor]

# For all examples of several jobs, one job after the other: is the model right, its loss, and the
# terms of each score of the host.
FlatScores = tuple[Tensor, ...]


class HasScores(Protocol):
    """A module with scores of its own, for `evaluate.scores: [{name: module, key: ...}]`."""

    def scores(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) values of each example by name, in evaluation mode."""
        ...


@dataclass(frozen=True)
class ScoreJob:
    """One model of a bank and the examples to score it on."""

    row: int  # of the bank
    examples: Ids  # (R,) example ids
    shares: tuple[float, ...] = ()  # of all rows, whose mixture is scored; (): `row` alone


@dataclass(frozen=True)
class ExampleScores:
    """Scores of one model on R examples, in the order of its job."""

    correct: NDArray[Any]  # (R,) is the class right, or the share of positions of a sequence
    loss: NDArray[np.float64]  # (R,) NaN for a module without example_losses
    terms: tuple[Terms, ...] = ()  # (R, S) for each score of the host


@dataclass(frozen=True)
class PartScore:
    """Scores of one client's model on one part of the examples."""

    correct: float  # right answers; of a sequence, the share of right positions
    total: int
    loss: float  # mean over the examples; NaN without any, or for a module without example_losses
    values: tuple[float, ...] = ()  # of each score; NaN without examples


def part_score(
    scores: Sequence[Score], answer: ExampleScores, positions: slice | Ids = slice(None)
) -> PartScore:
    """The scores on all examples of an answer, or on those at some positions.

    Args:
        scores: those of the host that gave the answer.
    """
    correct = answer.correct[positions]
    if not len(correct):
        return PartScore(0, 0, np.nan, (np.nan,) * len(scores))
    pairs = zip(scores, answer.terms, strict=True)
    values = []
    for score, terms in pairs:
        with located(f"score {score.name}"):
            values.append(score.value(terms[positions]))
    loss = float(answer.loss[positions].mean())
    return PartScore(correct.sum().item(), len(correct), loss, tuple(values))


def score_models(host: Host, bank: Params, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
    """The scores of each job, with bits that do not depend on the other jobs.

    Whether a model is stacked depends on the number of its examples alone, and a stacked pass
    always has the same shape: pieces are padded, and missing models are repeated.

    Args:
        bank: leaves (U, ...), whose rows the jobs name.
    """
    host.module.eval()
    outputs = _stacked_outputs(host)
    sizes = [0 if outputs is None else _piece_size(host, len(job.examples)) for job in jobs]
    # Mixtures share all models, so their examples are joined, whatever their number.
    kinds = [
        (min(size, 1) if job.shares else size, bool(job.shares))
        for size, job in zip(sizes, jobs, strict=True)
    ]
    scores: dict[int, ExampleScores] = {}
    with torch.no_grad():
        for size, is_mixed in sorted(set(kinds)):
            alike = [k for k, kind in enumerate(kinds) if kind == (size, is_mixed)]
            alike.sort(key=lambda k: jobs[k].row)  # each model is loaded once
            chosen = [jobs[k] for k in alike]
            if size and outputs is not None and is_mixed:
                flat = _score_mixtures(host, bank, outputs, chosen)
            elif size and outputs is not None:
                flat = _score_stacked(host, bank, outputs, chosen, size)
            else:
                flat = _score_one_by_one(host, bank, chosen)
            ends = np.cumsum([len(job.examples) for job in chosen])[:-1]
            columns = [np.split(values.cpu().numpy(), ends) for values in flat]
            for k, (correct, loss, *terms) in zip(alike, zip(*columns, strict=True), strict=True):
                scores[k] = ExampleScores(correct, loss, tuple(terms))
    return [scores[k] for k in range(len(jobs))]


def score_shared(
    host: Host, bank: Params, examples: Sequence[Ids]
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Correctness and losses (U, n) of every model of the bank on the n examples of all sets.

    Columns are in the order of the sets. The bits of a set's scores do not depend on the other
    sets. Sets are joined for passes of one shape, except for modules that cannot be stacked and, on
    a CPU, for sets that `score_models` does not stack either.

    Args:
        bank: leaves (U, ...).
        examples: sets of example ids, such as those of each client.
    """
    num = len(next(iter(bank.values())))
    outputs = _stacked_outputs(host)
    sizes = np.array([len(ids) for ids in examples])
    is_large = sizes > (PIECE * MOST_PIECES if host.examples.device.type == "cpu" else np.inf)
    if is_large.any() and not is_large.all():
        kinds = [np.flatnonzero(is_large == kind).tolist() for kind in (False, True)]
        halves = [score_shared(host, bank, [examples[k] for k in kind]) for kind in kinds]
        positions = np.argsort(np.repeat(is_large, sizes), kind="stable").argsort()
        correct, losses = (
            np.concatenate(h, axis=1)[:, positions] for h in zip(*halves, strict=True)
        )
        return correct, losses
    if outputs is None or is_large.any() or not sizes.any():
        jobs = [ScoreJob(u, ids) for u in range(num) for ids in examples]
        scores = score_models(host, bank, jobs)
        correct = np.concatenate([score.correct for score in scores])
        losses = np.concatenate([score.loss for score in scores])
        return correct.reshape(num, -1), losses.reshape(num, -1)
    host.module.eval()
    ids, device = np.concatenate(examples), host.examples.device
    groups = range(0, num, _models_in_a_pass(host))
    stacked = (
        {name: leaf[k : k + groups.step].to(device) for name, leaf in bank.items()} for k in groups
    )
    parts = [_score_joined(host, w, outputs, ids) for w in stacked]
    correct, losses, *_ = (torch.cat(values).cpu().numpy() for values in zip(*parts, strict=True))
    return correct, losses


def _piece_size(host: Host, num_examples: int) -> int:
    """Examples of a model in a stacked pass; 0: the model is evaluated alone."""
    written, images = host.written_forward, host.examples.images
    if 0 < num_examples <= PIECE * MOST_PIECES:
        most = DENSE_PIECE if written is not None and written.is_dense else PIECE
        num_pieces = -(-num_examples // most)
        return -(-num_examples // (num_pieces * PIECE_STEP)) * PIECE_STEP
    if not num_examples or images.device.type == "cpu" or written is None or not written.is_dense:
        return 0
    size = images[0].numel() * host.examples.mean.element_size()
    return EVALUATION_BATCH if STACKED_ON_GPU * EVALUATION_BATCH * size <= STACKED_BYTES else 0


def _stacked_outputs(host: Host) -> StackedOutputs | None:
    """How stacked models are evaluated; None for modules that must be evaluated one by one."""
    module = host.module
    has_own_scores = any(isinstance(score, ModuleScore) for score in host.scores)
    if refusal(module) or not hasattr(module, "losses") or has_own_scores:
        return None
    if host.written_forward is not None:
        return host.written_forward.outputs
    if host.examples.device.type == "cpu":
        return None
    of_models = vmap(lambda w, x: functional_call(module, w, (x,)))
    return lambda w, x: of_models(w, x.contiguous())  # a module may overwrite its input


def _score_one_by_one(host: Host, bank: Params, jobs: Sequence[ScoreJob]) -> FlatScores:
    """Scores of jobs that are in the order of their models."""
    module = host.module
    ids = host.on_device(np.concatenate([job.examples for job in jobs]))
    kinds = (torch.bool, *[torch.float64] * (1 + len(host.scores)))
    passes = [tuple(ids.new_empty(0, dtype=kind) for kind in kinds)]
    loaded = None
    ids_by_job = torch.split(ids, [len(job.examples) for job in jobs])
    for job, ids_of_job in zip(jobs, ids_by_job, strict=True):
        if job.shares:
            loaded = None
        elif job.row != loaded:
            loaded = job.row
            load_params(module, {name: leaf[loaded] for name, leaf in bank.items()})
        for batch_ids in torch.split(ids_of_job, EVALUATION_BATCH) if len(ids_of_job) else []:
            x, y = batch = host.examples.batch(batch_ids)
            output = _mixed_output(module, bank, job.shares, batch) if job.shares else module(x)
            correct = _correct(host, output, y)
            losses = _losses(module, output, batch).double()
            passes.append((correct, losses, *_terms(host, output, batch)))
    return tuple(torch.cat(parts) for parts in zip(*passes, strict=True))


def _mixed_output(
    module: LightningModule, bank: Params, shares: tuple[float, ...], batch: Batch
) -> Tensor:
    """What the models of the bank that have a share predict together for a batch."""
    x, y = batch
    rows = np.flatnonzero(shares)
    outputs = []
    for row in rows:
        load_params(module, {name: leaf[row] for name, leaf in bank.items()})
        outputs.append(module(x))
    joined = torch.stack(outputs)
    return _mixture(joined, joined.new_tensor(shares)[rows], y)


def _mixture(outputs: Tensor, shares: Tensor, y: Tensor) -> Tensor:
    """The mean of numbers that models predict, or the log of that of their class probabilities.

    `outputs` are (K, ...) those of K models, `shares` (K,) or (K, B) their weights in the mean.
    """
    weights = shares.to(outputs)[(...,) + (None,) * (outputs.dim() - shares.dim())]
    if y.is_floating_point():
        return (weights * outputs).sum(0)
    if outputs.dim() != y.dim() + 2:
        raise ExperimentError(
            "this method mixes class probabilities of several models: the model must return a "
            f"row of class scores for each target, got the shape {tuple(outputs.shape[1:])}"
        )
    return (outputs.log_softmax(-1) + weights.log()).logsumexp(0)  # log Σ_k π_k p_k


def _score_stacked(
    host: Host, bank: Params, outputs: StackedOutputs, jobs: Sequence[ScoreJob], size: int
) -> FlatScores:
    """Scores by passes of many models over `size` examples each."""
    pieces = [
        (job.row, job.examples[first : first + size])
        for job in jobs
        for first in range(0, len(job.examples), size)
    ]
    num_models = _models_in_a_pass(host)
    padded = pieces + [pieces[-1]] * (-len(pieces) % num_models)
    rows = np.array([row for row, _ in padded])
    ids = host.on_device(np.stack([e if len(e) == size else np.resize(e, size) for _, e in padded]))

    def score(first: int) -> FlatScores:
        models = slice(first, first + num_models)
        x, y = host.examples.batch(ids[models])
        w = {name: rows_on(leaf, rows[models], x.device) for name, leaf in bank.items()}
        return _pass_scores(host, outputs(w, x), y)

    passes = _in_threads(host, score, range(0, len(padded), num_models))
    lengths = torch.tensor([len(examples) for _, examples in pieces], device=ids.device)
    is_own = torch.arange(size, device=ids.device) < lengths[:, None]  # (pieces, size)
    return tuple(torch.cat(parts)[: len(pieces)][is_own] for parts in zip(*passes, strict=True))


def _score_mixtures(
    host: Host, bank: Params, outputs: StackedOutputs, jobs: Sequence[ScoreJob]
) -> FlatScores:
    """Scores of mixtures of all models of the bank, by passes over the examples of all jobs."""
    w = {name: leaf.to(host.examples.device) for name, leaf in bank.items()}
    ids = np.concatenate([job.examples for job in jobs])
    precision = next(iter(w.values())).dtype
    shares = torch.tensor([job.shares for job in jobs], dtype=precision)
    of_examples = shares.repeat_interleave(torch.tensor([len(job.examples) for job in jobs]), 0)
    return tuple(values[0] for values in _score_joined(host, w, outputs, ids, of_examples.T))


def _score_joined(
    host: Host,
    w: Params,
    outputs: StackedOutputs,
    ids: Ids,
    shares: Tensor | None = None,
) -> FlatScores:
    """(K, n, ...) the scores of K models on the same n examples, by passes of one shape.

    Args:
        w: leaves (K, ...) on the device of the examples.
        shares: (K, n) weights of the models in a mixture of each example, which is scored in their
            place: (1, n, ...).
    """
    num = len(next(iter(w.values())))
    size = _joined_size(host, num)
    pieces = host.on_device(np.pad(ids, (0, -len(ids) % size), mode="edge")).view(-1, size)
    if shares is not None:
        shares = F.pad(shares.to(pieces.device), (0, pieces.numel() - len(ids)))

    def score(k: int) -> FlatScores:
        x, y = host.examples.batch(pieces[k])
        output = outputs(w, x.expand(num, *x.shape))
        if shares is not None:
            output = _mixture(output, shares[:, k * size : (k + 1) * size], y)[None]
        return _pass_scores(host, output, y.expand(len(output), *y.shape))

    passes = _in_threads(host, score, range(len(pieces)))
    return tuple(torch.cat(parts, 1)[:, : len(ids)] for parts in zip(*passes, strict=True))


def _joined_size(host: Host, num_models: int) -> int:
    """Examples of a pass that its models share; a GPU takes as many as if there were one model."""
    if host.examples.device.type == "cpu":
        return DENSE_PIECE
    if host.written_forward is not None and host.written_forward.is_dense:
        return EVALUATION_BATCH
    return max(EVALUATION_BATCH // (num_models * PIECE), 1) * PIECE


def _pass_scores(host: Host, output: Tensor, y: Tensor) -> FlatScores:
    """(K, B, ...) the scores of a pass of K models with B examples each.

    Scores of the module's own would need its inputs: such modules are not stacked.
    """
    outputs, labels = output.flatten(0, 1), y.flatten(0, 1)
    correct = _correct(host, outputs, labels)
    losses = cast(HasLosses, host.module).losses(outputs, labels).double()
    flat = (correct, losses, *_terms(host, outputs, (outputs, labels)))
    return tuple(values.view(*y.shape[:2], *values.shape[1:]) for values in flat)


def _in_threads(
    host: Host, score: Callable[[int], FlatScores], passes: Sequence[int]
) -> list[FlatScores]:
    """The scores of each pass, several passes at a time on a CPU."""
    on_cpu = host.examples.device.type == "cpu"
    threads = host.engine.threads if on_cpu and isinstance(host.engine, Vectorized) else 1
    # Whether gradients are kept, and the threads inside an operator, are settings of each thread.
    with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
        run = map if threads == 1 else pool.map
        return list(run(torch.no_grad()(score), passes))


def _models_in_a_pass(host: Host) -> int:
    if host.examples.device.type != "cpu":
        return STACKED_ON_GPU
    return tile_size(sum(p.numel() for p in host.module.parameters()), STACKED_ON_GPU)


def _correct(host: Host, output: object, labels: Tensor) -> Tensor:
    """(B,) always False for modules without class scores, such as autoencoders."""
    if not isinstance(output, Tensor):
        raise ExperimentError(
            f"{type(host.module).__name__}.forward must return a tensor of predictions, got "
            f"{type(output).__name__}; return the class scores or numbers alone"
        )
    if not (labels.is_floating_point() or host.is_judge):
        _require_class_scores(host, output, labels)
    if output.dim() != labels.dim() + 1 or labels.is_floating_point():
        return torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    right = is_right(output, labels)
    return right if right.dim() == 1 else right.double().flatten(1).mean(1)


def _require_class_scores(host: Host, output: Tensor, labels: Tensor) -> None:
    """Refuse one number for several classes, and classes in another axis than the last.

    Axes of length 1 beside that of the classes are refused too, unless inputs have this shape: an
    autoencoder predicts no classes.
    """
    axes = output.shape[labels.dim() :]
    is_one_row = len(axes) > 1 and axes.numel() == max(axes)
    is_nested = is_one_row and output.shape[1:] != host.examples.images.shape[1:]
    is_elsewhere = output.dim() == labels.dim() + 1 and output.shape[:-1] != labels.shape
    is_one_number = output.shape in (labels.shape, (*labels.shape, 1))
    if is_elsewhere or is_nested or (is_one_number and labels.any()):
        raise ExperimentError(
            f"{type(host.module).__name__}.forward returned the shape {tuple(output.shape)} for "
            f"targets of the shape {tuple(labels.shape)} that are classes; return a score for each "
            "class in the last axis, two for two classes, or give numbers to predict as floats"
        )


def _terms(host: Host, output: Tensor, batch: Batch) -> Iterator[Tensor]:
    """(B, S) the terms of each score of the host."""
    computed: dict[str, Tensor] = {}
    if any(isinstance(score, ModuleScore) for score in host.scores):
        computed = cast(HasScores, host.module).scores(batch)
    for score in host.scores:
        if isinstance(score, ModuleScore) and score.key not in computed:
            raise ExperimentError(
                f"evaluate.scores: the module's scores(batch) returns no {score.key!r}, only "
                f"{', '.join(computed) or 'nothing'}"
            )
        values = computed[score.key] if isinstance(score, ModuleScore) else output
        with located(f"score {score.name}"):
            terms = score.terms(values, batch[1]).double()
        yield terms


def _losses(module: LightningModule, output: Tensor, batch: Batch) -> Tensor:
    if hasattr(module, "losses"):  # spares a second forward pass
        return cast(HasLosses, module).losses(output, batch[1])
    if hasattr(module, "example_losses"):
        return cast(HasExampleLosses, module).example_losses(batch)
    return output.new_full((len(output),), torch.nan)
