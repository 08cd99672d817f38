"""`flray pretrain` as a user meets it."""

import pytest
from rich.console import Console

from flray.cli.pretrain import run_pretraining
from flray.errors import ExperimentError

TINY = """
dataset: {name: synthetic, num_train: 64, num_test: 32, size: 8}
model: {name: conv_ae, latent: 4}
epochs: 2
"""


@pytest.fixture
def pretrain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(TINY)

    def run(*arguments: str) -> str:
        run_pretraining(arguments, Console(highlight=False, width=200))
        return capsys.readouterr().out

    return run


def test_epochs_are_shown_and_the_second_time_it_is_there(pretrain, tmp_path) -> None:
    first = pretrain("tiny.yaml", "epochs=3")
    (folder,) = (tmp_path / "cache" / "encoders").iterdir()
    assert "tiny · 3 epochs on" in first
    assert [f"epoch {k}/3" in first for k in (1, 2, 3)] == [True] * 3
    assert first.count("train loss") == first.count("validation loss") == 3
    assert f"kept in {folder}" in first
    second = pretrain("tiny.yaml", "epochs=3")
    assert second == f"tiny · already there: {folder}\n"
    assert "epoch 2/2" in pretrain("tiny.yaml")  # another encoder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected one file of an encoder, got none"),
        (("tiny.yaml", "tiny.yaml"), "expected one file of an encoder"),
        (("no.yaml",), "there is no file no.yaml"),
        (("tiny.yaml", "modell.latent=3"), "unknown key 'modell'.*did you mean 'model'"),
        (("tiny.yaml", "dataset.size=9"), "multiples of 4"),
    ],
)
def test_what_is_wrong_is_named(pretrain, arguments, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        pretrain(*arguments)
