"""The file of an encoder, as `flray pretrain` reads it and an experiment may name it."""

from flray.clustering.encoder import Encoder
from flray.config.binding import Plain, bind_dataclass


def parse_encoder(plain: Plain) -> Encoder:
    """Check every key; unknown ones are errors."""
    encoder: Encoder = bind_dataclass(Encoder, plain, "")[0]
    return encoder
