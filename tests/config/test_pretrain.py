"""The files of encoders."""

from pathlib import Path

import pytest
import yaml

from flray.clustering.encoder import Encoder
from flray.clustering.encoder_centres import EncoderCentres, foreign_encoder
from flray.config.binding import bind_component
from flray.config.experiment import parse_encoder
from flray.config.reading import read_mapping
from flray.data.datasets.digits import Digits
from flray.errors import ExperimentError
from flray.models.conv_ae import ConvAe

FOLDER = Path(__file__).parents[2] / "experiments" / "encoders"
FILES = sorted(FOLDER.glob("*.yaml"))
SIGNATURES = {"encoder_centres": EncoderCentres}


def signature(encoder: object):
    given = {"name": "encoder_centres", "encoder": encoder}
    return bind_component("signature", SIGNATURES, given, "signature")


def test_there_are_encoders() -> None:
    assert len(FILES) >= 4


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_an_encoder_and_says_nothing_that_is_default(path) -> None:
    plain = read_mapping(path, "encoder")
    encoder = parse_encoder(plain)
    assert path.read_text().startswith(f"# flray pretrain experiments/encoders/{path.name}\n")
    for key in plain.keys() - {"dataset", "model"}:
        assert getattr(Encoder, key) != getattr(encoder, key)


def test_the_default_of_flt_is_the_file_of_that_name() -> None:
    encoder = parse_encoder(read_mapping(FOLDER / "fashion_mnist.yaml", "encoder"))
    assert encoder == foreign_encoder()
    assert encoder.key() == foreign_encoder().key()


def test_an_experiment_may_name_the_file(monkeypatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    named = signature("experiments/encoders/digits.yaml")
    assert named.build().encoder == Encoder(Digits(), ConvAe, epochs=10)
    written = yaml.safe_load(yaml.safe_dump(named.plain["encoder"]))
    assert written["model"] == {"name": "conv_ae", "latent": 128, "loss": "mse"}
    again = signature(written)
    assert again.build() == named.build()
    assert again.build().encoder.key() == named.build().encoder.key()


def test_what_an_experiment_does_not_say_is_as_in_flt() -> None:
    built = signature({"dataset": "digits", "model": {"loss": "bce"}}).build()
    assert built.encoder == Encoder(Digits(), bind_model({"name": "conv_ae", "loss": "bce"}))
    assert built.k == 5


def bind_model(model: object):
    return parse_encoder({"dataset": "digits", "model": model}).model


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"model": "conv_ae"}, "missing key 'dataset'"),
        ({"dataset": "digits", "model": "conv_ae", "epoch": 3}, "did you mean 'epochs'"),
        ({"dataset": "digits", "model": "conv_ea"}, "did you mean 'conv_ae'"),
        ({"dataset": "digits", "model": "mlp200"}, r"must have encode\(x\), got Mlp200"),
        ({"dataset": "digits", "model": "conv_ae", "pixels": "half"}, "one of unit, signed"),
    ],
)
def test_what_is_wrong_is_named(plain, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        parse_encoder(plain)
