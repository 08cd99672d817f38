"""What an experiment says that will not happen, or will happen first: shown before it runs."""

from collections.abc import Iterator

from flray.clustering.encoder import Encoder
from flray.config.experiment import Experiment
from flray.execution.resources import Actors


def remarks(experiment: Experiment) -> Iterator[str]:
    """One sentence for each thing that a user may not expect; none of them is an error."""
    settings = experiment.settings
    late = sorted({event.round for event in settings.events if event.round > settings.rounds})
    if late:
        told = ", ".join(map(str, late))
        yield f"events of round {told} never happen: the last round is {settings.rounds}"
    if settings.execution.executor == "inline" and settings.execution.actors != Actors():
        yield "execution.actors does nothing in process: set execution.executor=ray"
    encoder = encoder_of(experiment)
    if encoder is not None and not encoder.is_cached():
        done = encoder.epochs_done()
        went = f", {done} of them done" if done else ""
        yield (
            f"an encoder is trained first, once: {encoder.epochs} epochs{went} of "
            f"{encoder.dataset_name}; kept in {encoder.folder}"
        )


def encoder_of(experiment: Experiment) -> Encoder | None:
    """The encoder that clients' data are embedded with, where the experiment has one."""
    pipeline = getattr(experiment.algorithm.build(), "clustering", None)
    found = getattr(getattr(pipeline, "signature", None), "encoder", None)
    return found if isinstance(found, Encoder) else None
