"""Memory that the steps of a block take beside its models, estimated from one example."""

import copy
import math
from contextlib import suppress

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from flray.client.host import EVALUATION_BATCH, HostSettings, choose_engine
from flray.client.scoring import DENSE_PIECE, STACKED_ON_GPU
from flray.engines.tracing import TRACING, is_written_out
from flray.engines.vectorized import tile_size

PASSES = 2  # values that a forward pass keeps, and their gradients


def bytes_of_steps(
    module: LightningModule,
    input_shape: tuple[int, ...],
    batch_size: int,
    settings: HostSettings,
) -> int:
    """Bytes of the layers' values while a block is trained or a model is evaluated.

    The larger of both, for the estimate of what an actor needs (`execution.resources`). An estimate
    from above for chains of layers; what a module computes outside of layers is not seen.

    Args:
        input_shape: Shape of an example, of any number of axes.
        batch_size: Examples of a client's batch.
        settings: Engine, device, precision, block and threads of the host.
    """
    layers = layer_values(module, input_shape)
    at_once = models_at_once(module, settings)
    training = PASSES * sum(layers) * batch_size * at_once
    whole = PASSES * max(layers, default=0) * EVALUATION_BATCH
    num_params = sum(p.numel() for p in module.parameters())
    stacked = sum(layers) * DENSE_PIECE * tile_size(num_params, STACKED_ON_GPU) * settings.threads
    return max(training, whole, stacked) * settings.dtype.itemsize


def models_at_once(module: LightningModule, settings: HostSettings) -> int:
    """Number of models of a block that one step of the engine trains at the same time.

    One for engines that train client after client, a tile per thread on a CPU, otherwise the block.
    """
    if choose_engine(settings.engine, module, settings.device) != "vectorized":
        return 1
    num_slots = settings.num_slots or settings.block
    if settings.device != "cpu" or not is_written_out(module):
        return num_slots
    num_params = sum(p.numel() for p in module.parameters())
    return tile_size(num_params, num_slots) * settings.threads


def layer_values(module: LightningModule, input_shape: tuple[int, ...]) -> list[int]:
    """Number of values that each layer computes for one example.

    A convolution unfolds its input first, which is counted too. Empty for a module that cannot be
    applied to inputs alone.

    >>> from flray.models.mlp200 import Mlp200
    >>> layer_values(Mlp200((1, 28, 28), 10), (1, 28, 28))[-1]
    10
    """
    layers: list[int] = []

    def record(layer: nn.Module, _inputs: object, output: object) -> None:
        output = output[0] if isinstance(output, tuple) else output  # of a recurrent layer
        if not isinstance(output, Tensor):
            return
        values = output[0].numel()
        if isinstance(layer, nn.Conv1d | nn.Conv2d):
            kernel = math.prod(layer.kernel_size)
            positions = output[0].numel() // layer.out_channels
            values += layer.in_channels // layer.groups * kernel * positions
        layers.append(values)

    probe = copy.deepcopy(module).cpu().eval()
    for layer in probe.modules():
        if not list(layer.children()):
            layer.register_forward_hook(record)
    dtype = next((p.dtype for p in probe.parameters()), torch.float32)
    takes_tokens = any(isinstance(layer, nn.Embedding) for layer in probe.modules())
    not_alone = suppress(RuntimeError, TypeError, ValueError, NotImplementedError)
    with TRACING, torch.no_grad(), not_alone:
        probe(torch.zeros((1, *input_shape), dtype=torch.int64 if takes_tokens else dtype))
    return layers
