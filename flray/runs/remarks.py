"""Remarks on an experiment, shown before it runs: keys without effect, work that comes first."""

from collections.abc import Iterator
from dataclasses import fields

from flray.clustering.encoder import Encoder, encoders_of
from flray.config.experiment import Experiment
from flray.config.objects import ReadyObject
from flray.config.outside import overrides
from flray.execution.resources import Actors
from flray.models.bank import layers_of, params_of
from flray.runs.preparing import draw_module, load_dataset

ROUNDS_BEFORE = "rounds_before"  # key of algorithms: rounds before the clustering
# Methods of a LightningModule that only a Trainer calls, and that may change what is trained.
TRAINER_HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


def remarks(experiment: Experiment) -> Iterator[str]:
    """One sentence for each thing that a user may not expect; none of them is an error.

    Keys that have no effect, events that never happen, and an encoder that is trained first.
    """
    settings = experiment.settings
    late = sorted({event.round for event in settings.events if event.round > settings.rounds})
    if late:
        rounds = ", ".join(map(str, late))
        yield f"events of round {rounds} never happen: the last round is {settings.rounds}"
    if settings.execution.executor == "inline" and settings.execution.actors != Actors():
        yield "execution.actors does nothing in process: set execution.executor=ray"
    yield from _module_remarks(experiment)
    yield from _method_remarks(experiment)
    yield from map(encoder_remark, missing_encoders(experiment))


def encoder_remark(encoder: Encoder) -> str:
    """A sentence about an encoder that is not in the cache."""
    done = encoder.epochs_done()
    rest = f", {done} of them done" if done else ""
    return (
        f"an encoder is trained first, once: {encoder.epochs} epochs{rest} of "
        f"{encoder.dataset_name}; kept in {encoder.folder}"
    )


def _module_remarks(experiment: Experiment) -> Iterator[str]:
    """Methods of a user's LightningModule or LightningDataModule that are never called."""
    data = experiment.dataset.target
    if isinstance(data, ReadyObject) and data.remark:
        yield data.remark
    target = experiment.model.target
    cls = type(target.value) if isinstance(target, ReadyObject) else target
    if isinstance(cls, type) and overrides(cls, "validation_step"):
        yield (
            f"{cls.__name__}.validation_step is not called, nor is anything logged that it logs: "
            "models are evaluated as `evaluate` says; what training_step logs becomes the columns "
            "logged_*"
        )
    hooks = [name for name in TRAINER_HOOKS if isinstance(cls, type) and overrides(cls, name)]
    if hooks and experiment.settings.execution.engine != "lightning":
        yield (
            f"{', '.join(f'{cls.__name__}.{name}' for name in hooks)}: called by Lightning's "
            "Trainer alone; set execution.engine=lightning"
        )


def _method_remarks(experiment: Experiment) -> Iterator[str]:
    """Remarks on keys of a method that make it another method."""
    algorithm, settings = experiment.algorithm.build(), experiment.settings
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    if values.get(ROUNDS_BEFORE, 0) >= settings.rounds:
        yield (
            f"no cluster is trained: algorithm.rounds_before={values[ROUNDS_BEFORE]} leaves no "
            f"round after it, the last is {settings.rounds}; lower algorithm.rounds_before or "
            "raise rounds"
        )
    if values.get("mean_of") == "members" and settings.aggregate.unheard != "ignore":
        yield (
            f"aggregate.unheard={settings.aggregate.unheard} does nothing where all members of a "
            "cluster count: set algorithm.mean_of=heard"
        )
    if "global_layers" in values:
        layers = layers_of(params_of(draw_module(experiment, load_dataset(experiment))))
        if values["global_layers"] == len(layers):
            yield (
                f"this is FedAvg: algorithm.global_layers={len(layers)} shares all layers of the "
                f"model ({', '.join(layers)}); lower it"
            )


def missing_encoders(*experiments: Experiment) -> list[Encoder]:
    """The encoders of experiments that are not in the cache, and are trained before round 1.

    Those of signatures (FLT), and of `evaluate.drift`; each of them once.
    """
    methods = [experiment.algorithm.build() for experiment in experiments]
    encoders = encoders_of(*methods, *(experiment.settings.evaluate for experiment in experiments))
    return [encoder for encoder in encoders if not encoder.is_cached()]
