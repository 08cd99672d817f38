"""Time of a convolution of stacked clients by shape and form, on a core or the GPU of this machine.

OMP_NUM_THREADS=1 python benchmarks/convolutions.py [--repetitions N]
python benchmarks/convolutions.py --device cuda [--tf32]

A line is forward, backward and SGD of one layer, in milliseconds per client and step of 10 images,
with as many clients in a tile as the model has; the last lines are whole steps of a model, and on a
GPU the only ones, recorded as CUDA graphs of 20 clients. Forms are measured in turn, and the least
of all repetitions counts. `flray.engines.convolutions` has the rule that follows from it, by kind
of device.
"""

import argparse
import platform
from collections.abc import Callable
from time import perf_counter, process_time

import torch
from torch import nn

from flray.engines.convolutions import DirectConvolution, Form, form_of
from flray.engines.stacked_layers import Convolution
from flray.engines.tracing import write_out
from flray.engines.vectorized import tile_size
from flray.engines.written import Descent
from flray.models import MODELS

FORMS = {"patches": Convolution, "direct": DirectConvolution}
GPU_FORMS: tuple[Form, ...] = ("patches", "fused")
GRAPH_STEPS = 10
BATCH = 10
# model: channels in and out, kernel, padding, size of the images, clients in a tile
LAYERS = {
    "flhc_cnn 1": (1, 32, 5, 2, 28, 1),
    "flhc_cnn 2": (32, 64, 5, 2, 14, 1),
    "lenet5 1": (1, 6, 5, 0, 28, 10),
    "lenet5 2": (6, 16, 5, 0, 12, 10),
    "lenet5 2, one client": (6, 16, 5, 0, 12, 1),
    "lenet5 1, colours": (3, 6, 5, 0, 32, 10),
    "resnet9 2": (64, 128, 3, 1, 32, 1),
    "resnet9 5": (256, 512, 3, 1, 8, 1),
}
WHOLE = ("flhc_cnn", "leaf_cnn", "lenet5")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true", help="products in TF32, on a GPU")
    options = parser.parse_args()
    repetitions = options.repetitions
    torch.set_num_threads(1)
    if options.device == "cuda":
        on_gpu(repetitions, options.tf32)
        return
    rule = form_of("cpu")
    print(f"{platform.machine()}, torch {torch.__version__}, by rule {rule}")
    print("shape", *FORMS, "faster", sep="\t")
    for name, shape in LAYERS.items():
        report(name, {form: layer_step(form, *shape) for form in FORMS}, shape[-1], repetitions)
    for model in WHOLE:
        num_params = sum(p.numel() for p in MODELS[model]((1, 28, 28), 10).parameters())
        tile = tile_size(num_params, 20)
        steps = {form: model_step(form, model, tile) for form in FORMS}
        report(f"{model}, whole step of {tile}", steps, tile, repetitions)


def on_gpu(repetitions: int, tf32: bool) -> None:
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.set_default_device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, by rule {form_of('cuda')}")
    print("model", *GPU_FORMS, "faster", sep="\t")
    for model in WHOLE:
        steps = {form: model_step(form, model, 20) for form in GPU_FORMS}
        graphs = {form: recorded(step) for form, step in steps.items()}
        report(f"{model}, whole step of 20", graphs, 20 * GRAPH_STEPS, repetitions)


def recorded(step: Callable[[], object]) -> Callable[[], object]:
    """Several steps as one CUDA graph, which ends when the GPU has computed them.

    The graph works in the step's own tensors: the step has to live as long as its graph.
    """
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's own
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_STEPS):
            step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def report(name: str, steps: dict[str, Callable[[], object]], tile: int, repetitions: int) -> None:
    clock = perf_counter if "fused" in steps else process_time
    times: dict[str, list[float]] = {form: [] for form in steps}
    for _ in range(1 + repetitions):
        for form, step in steps.items():
            begin = clock()
            step()
            times[form].append(1e3 * (clock() - begin) / tile)
    least = {form: min(of_form[1:]) for form, of_form in times.items()}
    faster = min(least, key=lambda form: least[form])
    print(name, *(f"{least[form]:.3g}" for form in steps), faster, sep="\t", flush=True)


def layer_step(
    form: str, inputs: int, outputs: int, kernel: int, padding: int, size: int, tile: int
) -> Callable[[], object]:
    """Forward, backward and SGD of one layer; the first layer of a model needs no gradient of x."""
    module = nn.Conv2d(inputs, outputs, kernel, padding=padding)
    layer = FORMS[form]("weight", "bias", (kernel, kernel), (padding, padding))
    w = {n: p.detach().expand(tile, *p.shape).clone() for n, p in module.named_parameters()}
    matrix = layer.matrix(w["weight"]).contiguous()
    w["weight"] = layer.leaf(matrix, w["weight"])
    x = torch.randn(tile, BATCH, size, size, inputs)
    dy = torch.randn(tile, BATCH, *layer.output_size((size, size)), outputs)

    @torch.no_grad()
    def step() -> None:
        _, saved = layer.forward(w, {}, x)
        layer.backward(w, saved, dy, Descent(1e-6, w), needs_dx=inputs > 3)

    return step


def model_step(form: Form, model: str, tile: int) -> Callable[[], object]:
    module = MODELS[model]((1, 28, 28), 10)
    written = write_out(module, form)
    assert written is not None
    w = {}
    for name, p in module.named_parameters():
        w[name] = written.in_layout(name, p.detach().expand(tile, *p.shape).clone())
        w[name].copy_(p.detach().expand(tile, *p.shape))
    x, y = torch.randn(tile, BATCH, 1, 28, 28), torch.randint(10, (1, tile, BATCH))
    (targets,) = written.targets(y, torch.ones_like(y, dtype=torch.bool), x.dtype)
    return torch.no_grad()(lambda: written.losses(w, {}, x, targets, Descent(1e-6, w)))


if __name__ == "__main__":
    main()
