"""The large classifiers and the autoencoders: counts, losses by hand, engines, evaluation."""

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule

from flray.algorithms.fedavg import FedAvg
from flray.client.host import choose_engine
from flray.client.scoring import ScoreJob, score_models
from flray.data.datasets.digits import Digits
from flray.engines.loop import Loop
from flray.engines.training import Training
from flray.engines.vectorized import Vectorized
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import build_seeded, load_params, params_of, stack
from flray.models.resnet9 import Residual

from scenarios import (
    block_of,
    host_over,
    largest_difference,
    least_move,
    noise_dataset,
    place,
    ragged_case,
    ragged_split,
)

pytestmark = pytest.mark.slow

GRADIENT = FedAvg().gradient


def build(name: str, **fields: object) -> LightningModule:
    return build_seeded(lambda: MODELS[name](**fields), 0)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def batch_of(shape: tuple[int, int, int], num: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(num, *shape, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(num)


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


# Parameters of encoder and decoder. FLT's are those of its code; see residual_conv_ae for the
# normalisations. "first_two" lacks a scale and a shift for 128 + 64 + 8 channels: 400 fewer.
# supervised_ae: 3*9*32 + 32, 32*9*64 + 64, 4096*64 + 64; 64*4096 + 4096, 64*9*32 + 32, 32*9*3 + 3.
HALVES = [
    ("conv_ae", (1, 28, 28), {}, 25_956, 25_621),
    ("residual_conv_ae", (3, 32, 32), {}, 439_064, 438_659),
    ("residual_conv_ae", (3, 32, 32), {"latent": 64}, 406_232, 405_891),
    ("residual_conv_ae", (3, 32, 32), {"batch_norm": "first_two"}, 439_064 - 400, 438_659),
    ("supervised_ae", (3, 32, 32), {"num_classes": 10}, 281_600, 285_571),
]


@pytest.mark.parametrize(("name", "shape", "fields", "encoder", "decoder"), HALVES)
def test_parameters_of_encoder_and_decoder(name, shape, fields, encoder, decoder) -> None:
    module = build(name, image_shape=shape, **fields)
    assert (count(module.encoder), count(module.decoder)) == (encoder, decoder)
    head = 64 * 10 + 10 if name == "supervised_ae" else 0
    assert count(module) == encoder + decoder + head


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 8, 12)])
@pytest.mark.parametrize(
    ("name", "latent"), [("conv_ae", 128), ("residual_conv_ae", 128), ("supervised_ae", 64)]
)
def test_an_image_becomes_a_latent_becomes_an_image(name, latent, shape) -> None:
    classes = {"num_classes": 7} if name == "supervised_ae" else {}
    x, _ = batch_of(shape)
    for fields, size in (({}, latent), ({"latent": 5}, 5)):
        module = build(name, image_shape=shape, **classes, **fields).eval()
        z = module.encode(x)
        assert z.shape == (3, size)
        assert module.decode(z).shape == x.shape
        assert torch.equal(module.reconstruct(x), module.decode(z))
        if classes:
            assert module(x).shape == (3, 7)
        else:
            assert torch.equal(module(x), module.decode(z))


@pytest.mark.parametrize("name", ["conv_ae", "residual_conv_ae", "supervised_ae"])
def test_sides_that_cannot_be_halved_twice_are_refused(name) -> None:
    classes = {"num_classes": 7} if name == "supervised_ae" else {}
    with pytest.raises(ValueError, match=r"multiples of 4.*\(1, 28, 30\)"):
        build(name, image_shape=(1, 28, 30), **classes)


def test_resnet9_pools_whatever_is_left_to_one_pixel() -> None:
    for shape in ((1, 28, 28), (3, 32, 32), (3, 8, 24)):
        module = build("resnet9", image_shape=shape, num_classes=4)
        assert module(batch_of(shape)[0]).shape == (3, 4)
    with pytest.raises(ValueError, match=r"8x8.*\(3, 7, 32\)"):
        build("resnet9", image_shape=(3, 7, 32), num_classes=4)


def test_a_residual_skips_to_its_input_as_it_was() -> None:
    """(-1, 2) + relu(-1, 2); a ReLU in place would make it (0, 4)."""
    assert Residual(torch.nn.ReLU())(torch.tensor([-1.0, 2.0])).tolist() == [-1, 4]


def test_reconstruction_losses_are_means_over_pixels() -> None:
    x, y = batch_of((2, 8, 12))
    for name in ("conv_ae", "residual_conv_ae"):
        module = build(name, image_shape=(2, 8, 12)).eval()
        squared = (array(module(x)) - array(x)) ** 2  # (3, 2, 8, 12)
        assert np.allclose(array(module.example_losses((x, y))), squared.mean((1, 2, 3)), atol=1e-6)


def test_binary_cross_entropy_is_that_of_the_sigmoid_output() -> None:
    x, y = batch_of((2, 8, 12))
    module = build("conv_ae", image_shape=(2, 8, 12), loss="bce")
    p, t = array(module(x)), array(x)
    assert 0 < p.min() < p.max() < 1
    entropy = -(t * np.log(p) + (1 - t) * np.log(1 - p))
    losses = array(module.example_losses((x, y)))
    assert np.allclose(losses, entropy.mean((1, 2, 3)), atol=1e-6)
    other = build("conv_ae", image_shape=(2, 8, 12), loss="mse")
    assert not np.allclose(losses, array(other.example_losses((x, y))), atol=0.1)


VARIANTS = [("clf", 1.0, 0.0), ("ae", 0.0, 1.0), ("sae", 1.0, 2.5)]


@pytest.mark.parametrize(("variant", "of_labels", "of_pixels"), VARIANTS)
def test_supervised_losses_by_hand(variant, of_labels, of_pixels) -> None:
    """CE + weight MSE for sae; the weight is no part of clf and ae."""
    x, y = batch_of((2, 8, 12))
    module = build(
        "supervised_ae", image_shape=(2, 8, 12), num_classes=4, variant=variant, weight=2.5
    )
    logits = array(module(x))
    entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(3), y]
    squared = ((array(module.reconstruct(x)) - array(x)) ** 2).mean((1, 2, 3))
    passes = []
    module.encoder.register_forward_hook(lambda *_: passes.append(1))
    found = array(module.example_losses((x, y)))
    assert np.allclose(found, of_labels * entropy + of_pixels * squared, atol=1e-6)
    assert len(passes) == 1


SMALL = {"image_shape": (1, 8, 8)}
STACKED = {
    "leaf_cnn": {**SMALL, "num_classes": 10},
    "resnet9": {"image_shape": (3, 16, 16), "num_classes": 10},
    "conv_ae mse": SMALL,
    "conv_ae bce": {**SMALL, "loss": "bce"},
    "supervised_ae sae": {**SMALL, "num_classes": 10, "weight": 0.5},
    "supervised_ae clf": {**SMALL, "num_classes": 10, "variant": "clf"},
    "supervised_ae ae": {**SMALL, "num_classes": 10, "variant": "ae"},
}


SLOW = {"resnet9": [pytest.mark.long]}


@pytest.mark.parametrize("case", [pytest.param(c, marks=SLOW.get(c, [])) for c in STACKED])
def test_vectorized_is_loop(case) -> None:
    """Two clients, one and two steps, a padded batch each; SGD with momentum."""
    training = Training(lr=0.1, momentum=0.9, batch_size=4)
    module, shape = build(case.split()[0], **STACKED[case]), STACKED[case]["image_shape"]
    examples, block = ragged_case(module, training, torch.float64, shape, sizes=(3, 5))
    assert [plan.num_steps for plan in block.plans] == [1, 2]
    a = Loop(module, examples).train(block, training, GRADIENT)
    b = Vectorized(module, examples, 2).train(block, training, GRADIENT)
    assert least_move(block.w0, a.params) > 1e-4
    assert largest_difference(a, b) < 1e-10


def test_batch_norm_keeps_the_residual_autoencoder_off_the_stack() -> None:
    training = Training(optimizer="adam", lr=0.001, batch_size=4)
    module = build("residual_conv_ae", image_shape=(3, 8, 8))
    examples, block = ragged_case(module, training, shape=(3, 8, 8), sizes=(3, 5))
    with pytest.raises(ExperimentError, match=r"ResidualConvAe.*BatchNorm2d.*engine=loop"):
        Vectorized(module, examples, 2)
    assert choose_engine("auto", module, "cuda") == "loop"
    found = Loop(module, examples).train(block, training, GRADIENT)
    assert np.isfinite(found.loss).all()
    assert sum("running_mean" in name for name in found.params) == 5
    for name, leaf in found.params.items():  # weights and statistics alike
        assert not torch.equal(leaf[1], block.w0[name][1]), name


TRAINED = [
    pytest.param("conv_ae", {}, 10, marks=pytest.mark.long),
    pytest.param("conv_ae", {"loss": "bce"}, 10, marks=pytest.mark.long),
    pytest.param("residual_conv_ae", {}, 2, marks=pytest.mark.long),
    pytest.param("residual_conv_ae", {"batch_norm": "first_two"}, 3, marks=pytest.mark.long),
    pytest.param("supervised_ae", {"num_classes": 10}, 7, marks=pytest.mark.long),
    pytest.param("supervised_ae", {"num_classes": 10, "variant": "ae"}, 4, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "fields", "epochs"), TRAINED)
def test_a_few_steps_reconstruct_better_than_the_mean_image(name, fields, epochs) -> None:
    training = Training(optimizer="module", epochs=epochs)
    digits, split = Digits().load(), ragged_split((200,))
    module = build(name, image_shape=digits.image_shape, **fields)
    examples = place(digits, split, torch.float32)
    x, _ = examples.batch(torch.arange(200))
    found = Loop(module, examples).train(block_of(split, module, training), training, GRADIENT)
    load_params(module, {leaf: found.params[leaf][0] for leaf in found.params})
    with torch.no_grad():
        error = float((module.eval().reconstruct(x) - x).square().mean())
    assert error < 0.75 * float((x - x.mean(0)).square().mean())


def scores_of(module: LightningModule) -> tuple[np.ndarray, np.ndarray, LightningModule, tuple]:
    host = host_over(module, noise_dataset(20, (1, 8, 8)), ragged_split((20,)))
    (found,) = score_models(host, stack([params_of(module)]), [ScoreJob(0, np.arange(20))])
    return found.correct, found.loss, host.module, host.examples.batch(torch.arange(20))


def test_an_autoencoder_predicts_no_label_and_is_scored_by_its_own_loss() -> None:
    correct, loss, module, batch = scores_of(build("conv_ae", image_shape=(1, 8, 8)))
    assert correct.shape == (20,)
    assert correct.dtype == np.bool_
    assert not correct.any()
    assert np.allclose(loss, array(module.example_losses(batch)))


def test_a_supervised_autoencoder_is_scored_by_its_logits_and_its_whole_loss() -> None:
    module = build("supervised_ae", image_shape=(1, 8, 8), num_classes=10)
    correct, loss, module, (x, y) = scores_of(module)
    logits = array(module(x))
    entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(20), y]
    assert np.array_equal(correct, logits.argmax(1) == y.numpy())
    assert correct.sum() > 0  # an untrained model is right now and then
    assert np.allclose(loss, array(module.example_losses((x, y))))
    assert (loss > entropy).all()


@pytest.mark.parametrize("name", ["conv_ae", "supervised_ae"])
def test_an_autoencoder_runs_from_yaml(name, tiny_run) -> None:
    result = tiny_run(f"model={name}", "train.optimizer=adam", "train.momentum=0", "rounds=1")
    assert np.isfinite(result.clients["loss"]).all()
    assert (result.summary["accuracy_mean"] == 0) == (name == "conv_ae")
