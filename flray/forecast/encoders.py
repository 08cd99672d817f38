"""The encoders of a forecast: their training is timed by some batches, and rehearsed without."""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from flray.client.encoder_training import EncoderTraining
from flray.clustering.encoder import Encoder, server_device
from flray.clustering.encoder_training import Epoch, OnEpoch, log_epoch
from flray.config.experiment import Experiment
from flray.data.dataset import Dataset, Normalization
from flray.forecast.sampling import Rate
from flray.models.bank import Params, params_of
from flray.randomness import generator
from flray.runs.remarks import missing_encoders

BATCHES = 3  # batches that are timed


class EncoderTime(NamedTuple):
    """An encoder that is trained before the first round, and what that takes."""

    encoder: Encoder
    seconds: float


class UntrainedEncoder(Encoder):
    """An encoder in a rehearsal: read from the cache, or else as it is before its training."""

    def load_or_train(self, device: str, on_epoch: OnEpoch = log_epoch) -> Params:
        """The trained params if they are in the cache, else those before the training."""
        cached = self.cache.read_params()
        return params_of(self.module(self.kind())) if cached is None else cached

    def training(self, epochs: int) -> EncoderTraining:
        """A fine-tuning of one step, whatever is asked for."""
        return replace(super().training(epochs), epochs=1, batch_size=2, most_steps=1)


def untrained(encoder: Encoder) -> UntrainedEncoder:
    """The encoder as a rehearsal has it."""
    twin = UntrainedEncoder(encoder.dataset, encoder.model)
    vars(twin).update(vars(encoder))  # its settings, and what it knows of its images
    return twin


def times_of_encoders(
    experiments: Iterable[Experiment], rates: dict[str, Rate]
) -> list[EncoderTime]:
    """The encoders of experiments that are not in the cache, and what is left of their training.

    Args:
        rates: Known rates, to which those that are measured are added.
    """
    times = []
    for encoder in missing_encoders(*experiments):
        steps = ceil(encoder.kind_and_size[1] / encoder.batch_size)
        num_steps = (encoder.epochs - encoder.epochs_done()) * steps
        times.append(EncoderTime(encoder, rate_of(encoder, rates).of(num_steps)))
    return times


def rate_of(encoder: Encoder, rates: dict[str, Rate]) -> Rate:
    """The rate of an encoder's steps; one that is not among `rates` is measured and added."""
    kind = encoder.kind()
    num_params = sum(p.numel() for p in encoder.module(kind).parameters())
    name = f"encoder of {num_params} parameters, {kind.image_shape}, batches {encoder.batch_size}"
    if name not in rates:
        rates[name] = _measured(encoder)
    return rates[name]


def _measured(encoder: Encoder) -> Rate:
    """The rate of an encoder's training here, measured on noise; its validation is a part of it."""
    kind, num = encoder.kind(), BATCHES * encoder.batch_size
    noise = generator(0, "rehearsal").integers(0, 256, (num, *kind.image_shape), np.uint8)
    scale = Normalization((0.0,), (1.0,))
    images = Dataset("noise", noise, np.zeros(num, np.int64), num, kind.num_classes, scale)
    epochs: list[Epoch] = []
    # Libraries load in the first epoch.
    replace(encoder, epochs=2).train(server_device(), epochs.append, images)
    return Rate(0.0, epochs[-1].seconds / BATCHES)
