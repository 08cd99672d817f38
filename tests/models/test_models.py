import pytest
import torch

from flray.config.binding import bind_component
from flray.errors import ExperimentError
from flray.models import MODELS
from flray.models.bank import build_seeded, params_of
from flray.models.dropout import KeyedDropout, dropout_keys
from flray.values import FROM_DATASET

# Parameter counts of the papers (or of their code, where the paper gives none).
COUNTS = [
    ("mlp200", {}, (1, 28, 28), 10, 159_010),
    ("mlp200", {}, (1, 28, 28), 62, 169_462),
    ("mlp200", {}, (1, 28, 28), 47, 166_447),
    ("flhc_cnn", {"padding": "valid"}, (1, 28, 28), 10, 582_026),
    ("flhc_cnn", {"padding": "valid"}, (1, 28, 28), 62, 608_702),
    ("flhc_cnn", {"padding": "same"}, (1, 28, 28), 10, 1_663_370),
    ("flhc_cnn", {"padding": "same"}, (1, 28, 28), 62, 1_690_046),
    ("lenet5", {}, (3, 32, 32), 10, 62_006),
    ("lenet5", {}, (1, 28, 28), 10, 44_426),
    ("lenet5", {"norm": "batch"}, (1, 28, 28), 10, 44_426 + 2 * (6 + 16)),
    ("leaf_cnn", {}, (1, 28, 28), 10, 6_497_162),
    ("leaf_cnn", {}, (1, 28, 28), 62, 6_603_710),
    ("leaf_cnn", {}, (1, 28, 28), 47, 6_572_975),
    ("resnet9", {}, (3, 32, 32), 100, 6_621_540),
]


@pytest.mark.parametrize(("name", "fields", "shape", "classes", "count"), COUNTS)
def test_parameter_counts(name, fields, shape, classes, count) -> None:
    module = MODELS[name](shape, classes, **fields)
    assert sum(p.numel() for p in module.parameters()) == count
    assert module(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "fields", "least"),
    [("lenet5", {}, 16), ("flhc_cnn", {"padding": "valid"}, 16), ("flhc_cnn", {}, 4)],
)
def test_images_of_which_convolutions_leave_nothing_are_refused(name, fields, least) -> None:
    """Two unpadded 5x5 convolutions, each pooled by 2: ((16 - 4) / 2 - 4) / 2 = 1."""
    assert MODELS[name]((1, least, 28), 3, **fields)(torch.zeros(2, 1, least, 28)).shape == (2, 3)
    for side in (least - 1, least // 2):
        with pytest.raises(ValueError, match=f"at least {least}x{least}, got 28x{side}"):
            MODELS[name]((1, 28, side), 3, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "shape", "message"),
    [
        (
            "gru",
            {},
            (4,),
            r"must be \(instants, channels\), got the shape \(4,\); .* linear and mlp",
        ),
        ("gru", {}, (1, 8, 8), r"must be \(instants, channels\), got the shape \(1, 8, 8\)"),
        ("cnn1d", {}, (4,), r"must be \(channels, instants\), got the shape \(4,\); .* linear and"),
        ("cnn1d", {}, (1, 8, 8), r"must be \(channels, instants\), got the shape \(1, 8, 8\)"),
        ("cnn1d", {}, (6, 1), "must have at least 2 instants with kernel 5, got 1"),
        ("cnn1d", {"kernel": 0}, (6, 8), "kernel must be >= 1, got 0"),
        ("cnn1d", {"channels": 0}, (6, 8), "channels must be >= 1, got 0"),
        ("gru", {"hidden": 0}, (8, 6), "hidden must be >= 1, got 0"),
        ("char_gru", {"hidden": 0}, (8,), "hidden must be >= 1, got 0"),
        ("char_gru", {"embedding": 0}, (8,), "embedding must be >= 1, got 0"),
        ("mlp", {"hidden": [8, 0]}, (6, 8), r"hidden must be >= 1, got \(8, 0\)"),
        ("mlp", {"hidden": [-1]}, (6, 8), r"hidden must be >= 1, got \(-1,\)"),
        ("mlp200", {"hidden": 0}, (1, 8, 8), "hidden must be >= 1, got 0"),
        ("conv_ae", {"latent": 0}, (1, 8, 8), "latent must be >= 1, got 0"),
        ("residual_conv_ae", {"latent": 0}, (1, 8, 8), "latent must be >= 1, got 0"),
        ("supervised_ae", {"latent": 0}, (1, 8, 8), "latent must be >= 1, got 0"),
        ("repa_net", {"latent": 0}, (1, 8, 8), "latent must be >= 1, got 0"),
    ],
)
def test_inputs_and_sizes_that_no_layer_takes_are_refused(name, fields, shape, message) -> None:
    component = bind_component("model", MODELS, {"name": name, **fields}, "model", FROM_DATASET)
    facts = {"image_shape": shape, "input_shape": shape, "num_classes": 3, "num_outputs": 3}
    with pytest.raises(ExperimentError, match=f"^model {name}: .*{message}"):
        component.build(**facts)


@pytest.mark.parametrize(("kernel", "least"), [(1, 2), (2, 1), (4, 1), (5, 2), (99, 2)])
def test_cnn1d_takes_the_fewest_instants_that_pooling_leaves_one_of(kernel, least) -> None:
    """Padding of kernel // 2 on both sides keeps the instants if the kernel is odd, or adds one."""
    model = MODELS["cnn1d"]((3, least), 4, kernel=kernel)
    assert model(torch.zeros(2, 3, least)).shape == (2, 4)
    with pytest.raises(ValueError, match=f"at least {least} instant"):
        MODELS["cnn1d"]((3, least - 1), 4, kernel=kernel)


@pytest.mark.parametrize("name", MODELS)
def test_training_step_is_the_mean_of_example_losses(name) -> None:
    component = bind_component("model", MODELS, name, "model", FROM_DATASET)
    inputs = {"cnn1d": torch.rand(5, 3, 8), "gru": torch.rand(5, 8, 3)}
    inputs["char_gru"] = torch.arange(5)[:, None]
    batch = inputs.get(name, torch.rand(5, 1, 28, 28)), torch.arange(5)
    shape = batch[0].shape[1:]
    batch = batch[0], batch[1][:, None] if name == "char_gru" else batch[1]
    facts = {"image_shape": shape, "input_shape": shape, "num_classes": 10, "num_outputs": 10}
    module = build_seeded(lambda: component.build(**facts), 0)
    losses = module.example_losses(batch)
    assert losses.shape == (5,)
    assert torch.equal(module.training_step(batch, 0), losses.mean())
    assert isinstance(module.configure_optimizers(), torch.optim.Optimizer)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    def leaf(seed: int) -> torch.Tensor:
        return params_of(build_seeded(lambda: MODELS["lenet5"]((1, 28, 28), 10), seed))[
            "layers.0.weight"
        ]

    before = torch.get_rng_state()
    first = leaf(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(first, leaf(3))
    assert not torch.equal(first, leaf(4))


def test_dropout_is_a_function_of_its_key_and_scales_what_it_keeps() -> None:
    layer = KeyedDropout(0.5)
    x = torch.ones(4, 100)
    layer.key.fill_(7)
    first = layer(x)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(first, layer(x))
    assert torch.equal(first[:2], layer(x[:2]))  # a shorter batch draws alike
    layer.key.fill_(8)
    assert not torch.equal(first, layer(x))
    assert torch.equal(layer.eval()(x), x)


def test_dropout_layers_have_keys_of_their_own() -> None:
    module = torch.nn.Sequential(KeyedDropout(0.5), torch.nn.ReLU(), KeyedDropout(0.5))
    keys = dropout_keys(module, torch.tensor([3, 4]))
    assert set(keys) == {"0.key", "2.key"}
    values = torch.cat(list(keys.values())).tolist()
    assert len(set(values)) == 4
    assert all(0 <= v < 2**63 for v in values)
