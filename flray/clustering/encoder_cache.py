"""Trained encoders on disk: params and a record, in a folder by a hash of the configuration."""

import dataclasses
import functools
import inspect
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flray.clustering.encoder_training import Progress
from flray.columns import PARAMS_SHA256
from flray.files import replace_file, replace_text
from flray.imports import class_of, path_of
from flray.models.bank import Params, digest, stack
from flray.values import FROM_IMAGES

NAME_LENGTH = 16  # digits of the 64 of a key that name a folder of the cache
PARAMS_FILE, RECORD_FILE = "encoder.safetensors", "encoder.json"
UNFINISHED_FILE = "unfinished.pt"  # the state after an epoch, from which training goes on
_NEEDED = ("key", *FROM_IMAGES, PARAMS_SHA256)  # of a record, to use it

_log = logging.getLogger("flray")


def cache_folder() -> Path:
    """FLRAY_CACHE, or flray's folder among the user's caches."""
    if folder := os.environ.get("FLRAY_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flray"


@dataclass(frozen=True)
class EncoderCache:
    """The folder of one encoder in the cache; files that are damaged or foreign are ignored."""

    key: str  # 64 hexadecimal digits

    @property
    def folder(self) -> Path:
        """Where the encoder is kept, whether or not it is there yet."""
        return cache_folder() / "encoders" / self.key[:NAME_LENGTH]

    def progress(self, device: str) -> Progress:
        """The state of a training of this encoder that was cut short on this kind of device."""
        return Progress(self.folder / UNFINISHED_FILE, self.key, device)

    def read_params(self) -> Params | None:
        """The trained params on the CPU; None: there are none that can be used."""
        record = self.read_record()
        if record is None:
            return None
        path = self.folder / PARAMS_FILE
        try:
            params = load_file(path)
        except (OSError, SafetensorError) as error:
            _log.warning("encoder in %s cannot be read, it is trained anew: %s", path, error)
            return None
        if _sha256(params) != record[PARAMS_SHA256]:
            _log.warning("encoder in %s is not the one that was written, it is trained anew", path)
            return None
        return params

    def read_record(self) -> dict[str, Any] | None:  # Any: JSON
        """What is needed of the record to use the encoder; None: there is none of this key."""
        path = self.folder / RECORD_FILE
        if not path.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            needed = {name: record[name] for name in _NEEDED}
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.warning("encoder record %s cannot be read, it is trained anew: %s", path, error)
            return None
        return needed if needed["key"] == self.key else None

    def write(self, params: Params, facts: dict[str, Any]) -> None:  # Any: JSON
        """Keep trained params and a record of `facts`, which must hold FROM_IMAGES."""
        record = {"key": self.key, **facts, PARAMS_SHA256: _sha256(params)}
        text = json.dumps(record, indent=1, default=repr)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The record last: where it is, the params are too.
        save = functools.partial(save_file, params)
        replace_file(self.folder / PARAMS_FILE, save)
        replace_text(self.folder / RECORD_FILE, text)


def described(component: Any) -> dict[str, Any]:  # Any: a dataset, or a class of models; JSON
    """The path of its class and its whole configuration, defaults included.

    >>> from flray.data.datasets.digits import Digits
    >>> described(Digits())["class"], described(Digits())["size"]
    ('flray.data.datasets.digits:Digits', 28)
    """
    if isinstance(component, functools.partial | type):
        parameters = inspect.signature(class_of(component)).parameters.values()
        fields = {p.name: p.default for p in parameters if p.default is not p.empty}
        fields |= getattr(component, "keywords", {})
    elif dataclasses.is_dataclass(component) and not isinstance(component, type):
        fields = dataclasses.asdict(component)
    else:
        fields = vars(component)
    return {"class": path_of(class_of(component)), **fields}


def _sha256(params: Params) -> str:
    return digest(stack([params]), 0)
