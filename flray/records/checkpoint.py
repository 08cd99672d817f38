"""Checkpoints of an algorithm's state whose cost follows what changed.

`round_000012.safetensors` holds the rows written in round 12, `round_000012.json` is the manifest:
the state as a tree, and for each tensor which of its rows lie in which round's file. The rename of
the manifest is the commit point; the last two manifests and the files they refer to are kept.
"""

import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flray.errors import ExperimentError
from flray.files import reading, replace_file, replace_text
from flray.records.encoding import Arrays, Json, TensorCache, classes_in, decode, encode
from flray.records.row_sources import CHUNK_BYTES, RowSources, as_rows, rows_to_write

FORMAT = 4
OWN_PACKAGE = __name__.partition(".")[0]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"round_(\d+)\.(json|safetensors)")
_DAMAGE = (OSError, SafetensorError, ValueError, LookupError, TypeError)
_SEAL = ', "crc32": '  # before the checksum of everything above it in a manifest


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after a round: the state of the algorithm, and further values by name.

    Round 0 is the state before the first round.
    """

    round: int
    state: Any  # the algorithm's state, of its own type
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A state that is to be written: a tree, and arrays in the memory of the host.

    `CheckpointStore.snapshot` makes one, quickly and in the caller's thread; `write` takes it.
    """

    round: int
    arrays: Arrays
    trees: dict[str, Json]


class _DataFile(NamedTuple):
    """A `.safetensors` file as manifests refer to it: `[bytes, checksum]`."""

    num_bytes: int  # bytes of the tensors in the file
    crc32: int  # checksum of the file, to recognise data of another attempt


@dataclass(frozen=True)
class _Saved:
    """A checkpoint as it lies on disk, with the arrays it holds to compare the next one with."""

    round: int = -1  # -1: none was saved yet
    arrays: Arrays = field(default_factory=dict)
    sources: dict[str, RowSources] = field(default_factory=dict)
    files: dict[int, _DataFile] = field(default_factory=dict)  # by round
    bound_to: Json = None

    def manifest(self) -> dict[str, Json]:
        """Where the rows of each tensor lie, and what the checkpoint is bound to."""
        tensors = {
            path: {
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "pieces": self.sources[path].pieces(),
            }
            for path, array in self.arrays.items()
        }
        return {"tensors": tensors, "files": self.files, "bound_to": self.bound_to}


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    The store keeps references to the arrays it saved last, so tensors that were saved must not be
    changed in place. To go on with a run call `load_latest` first; otherwise the first `save`
    starts afresh and removes what was there.

    A checkpoint may be somebody else's, and to import a module is to run it: states are made of
    classes of this package and of the `packages` that the experiment itself names.

    Args:
        directory: the folder, made by the first `save`.
        packages: top-level packages, beside flray, whose dataclasses a state may contain.
        bound_to: what belongs to a checkpoint after round t: `run`, a digest of what decides the
            run, and numbers of records. A manifest holds it, and a checkpoint to which other things
            belong by now is refused. None: checkpoints are bound to nothing.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> store = CheckpointStore(Path(mkdtemp()))
    >>> store.save(1, {"w": torch.ones(2, 3)}, extra={"lr": 0.1})
    >>> loaded = CheckpointStore(store.directory).load_latest()
    >>> loaded.round, loaded.state["w"].sum().item(), loaded.extra
    (1, 6.0, {'lr': 0.1})
    """

    def __init__(
        self,
        directory: Path,
        packages: Collection[str] = (),
        bound_to: Callable[[int], dict[str, Json]] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._packages = {OWN_PACKAGE, *packages}
        self._bound_to = bound_to
        self._saved = _Saved()
        self._tensors = TensorCache()

    def save(self, t: int, state: object, extra: Mapping[str, object] | None = None) -> None:
        """Write what changed since the last save; on failure the checkpoints before stay intact.

        Args:
            t: the round, larger than that of the last save.
            state: dataclasses, dicts, lists, tuples, tensors, arrays and plain values.
            extra: further values of the same kinds by name.
        """
        self.write(self.snapshot(t, state, extra))

    def snapshot(
        self, t: int, state: object, extra: Mapping[str, object] | None = None
    ) -> Snapshot:
        """What `write` needs, copied from the device; tensors of the host are not copied.

        Raises:
            ExperimentError: The state contains what cannot be saved, to which the message has the
                path, or dataclasses of packages that the store does not trust.
        """
        try:
            state_tree, arrays = encode(state, cache=self._tensors)
        except TypeError as error:
            raise ExperimentError(str(error)) from error
        self._tensors.forget_unused()
        extra_tree, extra_arrays = encode(dict(extra or {}), "extra")
        self._require_trusted([state_tree, extra_tree])
        trees = {"format": FORMAT, "round": t, "state": state_tree, "extra": extra_tree}
        return Snapshot(t, arrays | extra_arrays, trees)

    def write(self, snapshot: Snapshot) -> None:
        """The second half of `save`, for a thread of its own: it touches no device.

        Raises:
            ValueError: The round is not after the last one.
            ExperimentError: The disk is full, or records of the run have gone; what was there
                stays.
        """
        before, t, arrays = self._saved, snapshot.round, snapshot.arrays
        if t <= before.round or t < 0:
            last = "none yet" if before.round < 0 else before.round
            raise ValueError(f"checkpoints are saved in order of rounds >= 0, got {t} after {last}")
        nowhere = RowSources.nowhere(0)
        carried = {
            path: before.sources.get(path, nowhere).resized(len(as_rows(array)))
            for path, array in arrays.items()
        }
        sizes = {r: file.num_bytes for r, file in before.files.items()}
        masks = rows_to_write(before.arrays, arrays, carried, sizes)
        tensors = {
            path: as_rows(arrays[path]) if mask.all() else as_rows(arrays[path])[mask]
            for path, mask in masks.items()
            if mask.any()
        }
        sources = {path: carried[path].updated(mask, t) for path, mask in masks.items()}
        bound_to = None if self._bound_to is None else self._bound_to(t)
        self.check_last()  # after counting, so that what is removed meanwhile is noticed
        saved = _Saved(t, arrays, sources, before.files, bound_to)
        self._saved = self._write(saved, tensors, snapshot.trees)
        self._collect_garbage(before)

    def check_last(self) -> None:
        """Refuse to go on if what belongs to the last checkpoint has changed since it was saved."""
        if self._saved.round >= 0:
            self._check_bound(self._saved.round, self._saved.bound_to)

    def check_newest(self) -> None:
        """Refuse a newest checkpoint that belongs to another run or lacks records; reads no data.

        One that is damaged is left to `load_latest`.
        """
        for t in sorted(self._rounds("json"), reverse=True):
            try:
                manifest = self._manifest(t)
            except _DAMAGE:
                continue
            return self._check_bound(t, manifest["bound_to"])

    def newest_round(self) -> int | None:
        """The round of the newest checkpoint, whether or not it is whole."""
        return max(self._rounds("json"), default=None)

    def _check_bound(self, t: int, saved: Json) -> None:
        """Refuse the checkpoint of round t if it was bound to something else than is there now."""
        here = None if self._bound_to is None else self._bound_to(t)
        if here is None or here == saved:
            return
        if saved is None or here["run"] != saved["run"]:
            raise ExperimentError(
                f"{self._path(t, 'json')} is a checkpoint of another run than its folder: put "
                "back what belongs together, or remove the folder and start the run again"
            )
        kind = next(kind for kind in saved if saved[kind] != here.get(kind))
        raise ExperimentError(
            f"records of {self.directory.parent} are missing: {saved[kind]} {kind} were recorded "
            f"until round {t}, {here.get(kind)} are there. Restore them from a copy, or remove "
            f"{self.directory} and type --resume, which computes all rounds again"
        )

    def load_latest(self, device: str = "cpu", up_to: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole, its tensors on `device`; None if there is none.

        A damaged one is passed over with a warning.

        Args:
            up_to: the last round to consider; None: the last one there is.

        Raises:
            ExperimentError: if every checkpoint is damaged, or if the newest belongs to another
                run, lacks records or names classes of other packages.
        """
        self._remove_temporary()
        damage = []
        rounds = [t for t in self._rounds("json") if up_to is None or t <= up_to]
        for t in sorted(rounds, reverse=True):
            try:
                manifest = self._manifest(t)
                saved = self._read(manifest)
            except _DAMAGE as error:
                damage.append(f"round {t}: {error}")
                _log.warning(
                    "checkpoint of round %d is damaged, trying the one before: %s", t, error
                )
                continue
            self._check_bound(t, saved.bound_to)
            trees = manifest["state"], manifest["extra"]
            self._require_trusted(list(trees))
            with reading(self._path(t, "json")):
                state, extra = (decode(tree, saved.arrays, device) for tree in trees)
            self._saved = saved
            return Checkpoint(t, state, extra)
        if damage:
            raise ExperimentError(
                f"every checkpoint in {self.directory} is damaged ({'; '.join(damage)}): "
                "remove the run and start it again"
            )
        return None

    def _manifest(self, t: int) -> dict[str, Json]:
        """The manifest of round t; raises ValueError if it is damaged or of another format."""
        manifest: dict[str, Json] = _unsealed(self._path(t, "json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {FORMAT} expected, got {manifest['format']}")
        return manifest

    def _require_trusted(self, trees: Json) -> None:
        """Refuse trees that name classes of packages which the experiment does not name."""
        for name in sorted(classes_in(trees)):
            if name.partition(":")[0].partition(".")[0] not in self._packages:
                raise ExperimentError(
                    f"the state holds a {name}, which belongs to none of the packages of this "
                    f"experiment ({', '.join(sorted(self._packages))}): define a state in the "
                    "package of its algorithm; a checkpoint from elsewhere that names another may "
                    "run foreign code and is not read"
                )

    def _write(self, saved: _Saved, tensors: Arrays, trees: dict[str, Json]) -> _Saved:
        """Write the tensors, then the manifest; the result refers only to files that are used."""
        t, num_bytes = saved.round, sum(rows.nbytes for rows in tensors.values())
        data, files = self._path(t, "safetensors"), dict(saved.files)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if tensors:
                replace_file(data, lambda path: save_file(tensors, path))
                files[t] = _DataFile(num_bytes, _crc32(data))
            used = {r for s in saved.sources.values() for r in np.unique(s.rounds).tolist()}
            saved = replace(saved, files={r: files[r] for r in sorted(used)})
            text = json.dumps({**trees, **saved.manifest()}, allow_nan=False)
            replace_text(self._path(t, "json"), sealed(text))
        except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
            data.unlink(missing_ok=True)
            raise ExperimentError(self._no_room(t, num_bytes, error)) from error
        return saved

    def _no_room(self, t: int, num_bytes: int, error: Exception) -> str:
        """The message about a checkpoint that could not be written, with the room it needs."""
        folder = self.directory if self.directory.is_dir() else self.directory.parent
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        before = self._saved.round
        intact = "" if before < 0 else f"; that of round {before} is intact"
        return (
            f"could not write the checkpoint of round {t} to {self.directory}: {num_bytes} bytes "
            f"and a manifest needed, {free} bytes free ({error}){intact}. Make room, then --resume"
        )

    def _read(self, manifest: Json) -> _Saved:
        """The arrays of a checkpoint; files that are not what was written are ValueErrors."""
        files = {int(r): _DataFile(*entry) for r, entry in manifest["files"].items()}
        tensors = manifest["tensors"]
        sources = {p: RowSources.from_pieces(entry["pieces"]) for p, entry in tensors.items()}
        arrays = {p: np.empty(entry["shape"], entry["dtype"]) for p, entry in tensors.items()}
        for r, file in files.items():
            path = self._path(r, "safetensors")
            if _crc32(path) != file.crc32:
                raise ValueError(f"{path.name} is not what was written")
            with safe_open(path, "numpy") as stored:
                for p, mask in ((p, s.rounds == r) for p, s in sources.items()):
                    if mask.any():
                        rows = stored.get_tensor(p)
                        as_rows(arrays[p])[mask] = rows[sources[p].positions[mask]]
        return _Saved(manifest["round"], arrays, sources, files, manifest["bound_to"])

    def _collect_garbage(self, before: _Saved) -> None:
        """Remove what neither the last nor the checkpoint before it refers to."""
        manifests = {before.round, self._saved.round}
        # Manifests first: none may be left without its data.
        data = {*before.files, *self._saved.files}
        for suffix, kept in (("json", manifests), ("safetensors", data)):
            for t in self._rounds(suffix):
                if t not in kept:
                    self._path(t, suffix).unlink()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        """Remove what interrupted writes have left."""
        for pattern in ("round_*.tmp", ".tmp*"):  # ours, and those of safetensors
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)

    def _path(self, t: int, suffix: str) -> Path:
        return self.directory / f"round_{t:06d}.{suffix}"

    def _rounds(self, suffix: str) -> list[int]:
        names = [_NAME.fullmatch(path.name) for path in self.directory.glob(f"*.{suffix}")]
        return [int(name[1]) for name in names if name]


def sealed(text: str) -> str:
    """A JSON object with its own checksum: a flipped bit may be valid JSON and another state.

    >>> sealed('{"round": 1}')
    '{"round": 1, "crc32": 758353330}'
    """
    body = text.removesuffix("}")
    return f"{body}{_SEAL}{zlib.crc32(body.encode())}}}"


def _unsealed(text: str) -> Json:
    """The inverse of `sealed`; raises ValueError if the checksum does not fit."""
    body, _, seal = text.rpartition(_SEAL)
    if seal != f"{zlib.crc32(body.encode())}}}":
        raise ValueError("the manifest is not what was written")
    return json.loads(body + "}")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
