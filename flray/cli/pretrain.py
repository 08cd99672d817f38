"""`flray pretrain`: an encoder trained once, kept for every experiment that names it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flray.cli.group import progress_bar
from flray.clustering.encoder import Encoder, server_device
from flray.clustering.encoder_training import Epoch, time_left
from flray.config.experiment import parse_encoder
from flray.config.overrides import override
from flray.config.reading import read_mapping
from flray.errors import ExperimentError


def run_pretraining(arguments: Sequence[str], console: Console) -> None:
    """Train the encoder of a file, unless it is kept already, and print where it is kept.

    An interrupted training goes on after its last epoch.

    Args:
        arguments: One file of an encoder, and `key=value` for it.
        console: Where to print, a line for each epoch.

    Raises:
        ExperimentError: There is not exactly one file, or a key is wrong.
    """
    files = [a for a in arguments if "=" not in a]
    if len(files) != 1:
        raise ExperimentError(
            f"expected one file of an encoder, got {files or 'none'}; "
            "as in flray pretrain experiments/encoders/digits.yaml epochs=5"
        )
    changes = [a for a in arguments if "=" in a]
    encoder = parse_encoder(override(read_mapping(Path(files[0]), "encoder"), changes))
    name = Path(files[0]).stem
    if encoder.is_cached():
        note = f" · already there: {encoder.folder}"
        console.print(Text.assemble((name, "bold"), note), soft_wrap=True)
        return
    device = server_device()
    done = encoder.epochs_done()
    rest = f", going on after epoch {done}" if done else ""
    plan = f" · {encoder.epochs} epochs on {device}{rest}"
    console.print(Text.assemble((name, "bold"), plan), soft_wrap=True)
    _train(encoder, name, device, console)
    console.out(f"kept in {encoder.folder}")


def _train(encoder: Encoder, name: str, device: str, console: Console) -> None:
    """Train the encoder with a bar and a line for each epoch."""
    with progress_bar(console, name, encoder.epochs) as advance:

        def show(epoch: Epoch) -> None:
            console.out(epoch_line(epoch))
            advance(epoch.epoch)

        encoder.load_or_train(device, show)


def epoch_line(epoch: Epoch) -> str:
    """One epoch on one line.

    >>> epoch_line(Epoch(3, 40, lr=0.001, train_loss=0.0123, validation_loss=0.02, seconds=2.0))
    'epoch  3/40 · train loss 0.01230 · validation loss 0.02000 · lr 0.001 · 1:14 left'
    """
    width = len(str(epoch.epochs))
    return (
        f"epoch {epoch.epoch:{width}d}/{epoch.epochs} · train loss {epoch.train_loss:.5f} · "
        f"validation loss {epoch.validation_loss:.5f} · lr {epoch.lr:g} · {time_left(epoch)}"
    )
