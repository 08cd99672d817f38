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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flray.data.dataset import Ids
from flray.errors import ExperimentError
from flray.files import reading, replace_file, replace_text
from flray.records.encoding import Array, Arrays, Json, KnownTensors, classes_in, decode, encode

FORMAT = 3
OWN_PACKAGE = __name__.partition(".")[0]
MAX_FILES = 8  # that the rows of one checkpoint may lie in
CHUNK_BYTES = 1 << 24  # compared or hashed at a time, so that no second copy of a state is made

Mask = NDArray[np.bool_]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"round_(\d+)\.(json|safetensors)")
_DAMAGE = (OSError, SafetensorError, ValueError, LookupError, TypeError)
_SEAL = ', "crc32": '  # of all that is before it in a manifest


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after round `round`."""

    round: int
    state: Any  # the algorithm's own type
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A state that is to be written: a tree, and arrays in the memory of the host."""

    round: int
    arrays: Arrays
    trees: dict[str, Json]


@dataclass(frozen=True)
class RowSources:
    """Where a tensor's rows lie: row i is row places[i] of the tensor in the file of rounds[i]."""

    rounds: Ids  # (n,) -1: in no file yet
    places: Ids  # (n,)

    def resized(self, num_rows: int) -> "RowSources":
        """The first `num_rows` rows; those that are new lie in no file."""
        kept = min(num_rows, len(self.rounds))
        padding = np.full(num_rows - kept, -1, dtype=np.int64)
        return RowSources(
            np.concatenate([self.rounds[:kept], padding]),
            np.concatenate([self.places[:kept], padding]),
        )

    def updated(self, written: Mask, t: int) -> "RowSources":
        """After the rows of the mask were written, in order, to the file of round t."""
        places = np.cumsum(written) - 1
        return RowSources(np.where(written, t, self.rounds), np.where(written, places, self.places))

    def pieces(self) -> list[list[int]]:
        """Runs of [round, first place, number of rows], in row order.

        >>> RowSources(np.array([0, 0, 3, 0]), np.array([0, 1, 0, 3])).pieces()
        [[0, 0, 2], [3, 0, 1], [0, 3, 1]]
        """
        breaks = (np.diff(self.rounds) != 0) | (np.diff(self.places) != 1)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])[: len(self.rounds)]
        counts = np.diff(np.concatenate([starts, [len(self.rounds)]]))
        runs = np.stack([self.rounds[starts], self.places[starts], counts], axis=1)
        listed: list[list[int]] = runs.tolist()
        return listed

    @staticmethod
    def from_pieces(pieces: list[list[int]]) -> "RowSources":
        """The inverse of `pieces`."""
        rounds, firsts, counts = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        run_starts = np.cumsum(counts) - counts
        offsets = np.arange(counts.sum()) - np.repeat(run_starts, counts)
        return RowSources(np.repeat(rounds, counts), np.repeat(firsts, counts) + offsets)


@dataclass(frozen=True)
class _DataFile:
    num_bytes: int  # of tensors
    crc32: int  # of the whole file: a manifest must not meet the data of another attempt


@dataclass(frozen=True)
class _Saved:
    """A checkpoint as it lies on disk, with the arrays it holds to compare the next one with."""

    round: int
    arrays: Arrays
    sources: dict[str, RowSources]
    files: dict[int, _DataFile]  # by round
    bound_to: Json = None


class CheckpointStore:
    """The checkpoints of one run.

    The store keeps references to the arrays it saved last, so tensors that were saved must not be
    changed in place. To go on with a run call `load_latest` first; otherwise the first `save`
    starts afresh and removes what was there.

    A checkpoint may be somebody else's, and to import a module is to run it: states are made of
    classes of this package and of the `packages` that the experiment itself names.

    Args:
        bound_to: what belongs to a checkpoint after round t: `run`, a digest of what decides the
            run, and numbers of records. A manifest holds it, and a checkpoint to which other things
            belong by now is refused. None: checkpoints are bound to nothing.
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
        self._saved: _Saved | None = None
        self._known = KnownTensors()

    def save(self, t: int, state: object, extra: Mapping[str, object] | None = None) -> None:
        """Write what changed since the last save; on failure the checkpoints before stay intact."""
        self.write(self.snapshot(t, state, extra))

    def snapshot(
        self, t: int, state: object, extra: Mapping[str, object] | None = None
    ) -> Snapshot:
        """What `write` needs, copied from the device; tensors of the host are not copied."""
        state_tree, arrays = encode(state, known=self._known)
        self._known.forget_unused()
        extra_tree, extra_arrays = encode(dict(extra or {}), "extra")
        self._require_trusted([state_tree, extra_tree])
        trees = {"format": FORMAT, "round": t, "state": state_tree, "extra": extra_tree}
        return Snapshot(t, arrays | extra_arrays, trees)

    def write(self, snapshot: Snapshot) -> None:
        """The second half of `save`, for a thread of its own: it touches no device."""
        before, t, arrays = self._saved, snapshot.round, snapshot.arrays
        if t < 0 or (before is not None and t <= before.round):
            last = "none yet" if before is None else before.round
            raise ValueError(f"checkpoints are saved in order of rounds >= 0, got {t} after {last}")
        carried = _carried_sources(before, arrays)
        masks = _rows_to_write(before, arrays, carried)
        tensors = {path: _pick(as_rows(arrays[path]), mask) for path, mask in masks.items()}
        tensors = {path: rows for path, rows in tensors.items() if len(rows)}
        sources = {path: carried[path].updated(mask, t) for path, mask in masks.items()}
        bound_to = None if self._bound_to is None else self._bound_to(t)
        self.check_last()  # after counting, so that what is removed meanwhile is noticed
        saved = _Saved(t, arrays, sources, {}, bound_to)
        self._saved = self._write(saved, tensors, snapshot.trees)
        self._collect_garbage(before)

    def check_last(self) -> None:
        """Refuse to go on if what belongs to the last checkpoint has changed since it was saved."""
        if self._saved is not None:
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

        Args:
            up_to: the last round to consider; None: the last one there is.
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
        manifest: dict[str, Json] = _unsealed(self._path(t, "json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {FORMAT} expected, got {manifest['format']}")
        return manifest

    def _require_trusted(self, trees: Json) -> None:
        for name in sorted(classes_in(trees)):
            if name.partition(":")[0].partition(".")[0] not in self._packages:
                raise ExperimentError(
                    f"the state holds a {name}, which belongs to none of the packages of this "
                    f"experiment ({', '.join(sorted(self._packages))}): define a state in the "
                    "package of its algorithm; a checkpoint from elsewhere that names another may "
                    "run foreign code and is not read"
                )

    def _write(self, saved: _Saved, tensors: Arrays, trees: dict[str, Json]) -> _Saved:
        t, needed = saved.round, sum(rows.nbytes for rows in tensors.values())
        before = self._saved
        files = {} if before is None else dict(before.files)
        data = self._path(t, "safetensors")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if tensors:
                replace_file(data, lambda path: save_file(tensors, path))
                files[t] = _DataFile(needed, _crc32(data))
            used = {r for s in saved.sources.values() for r in np.unique(s.rounds).tolist()}
            saved = replace(saved, files={r: files[r] for r in sorted(used)})
            text = json.dumps({**trees, **_manifest(saved)}, allow_nan=False)
            replace_text(self._path(t, "json"), sealed(text))
        except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
            data.unlink(missing_ok=True)
            raise ExperimentError(self._no_room(t, needed, error)) from error
        return saved

    def _no_room(self, t: int, needed: int, error: Exception) -> str:
        place = self.directory if self.directory.is_dir() else self.directory.parent
        free = shutil.disk_usage(place).free if place.is_dir() else 0
        intact = "" if self._saved is None else f"; that of round {self._saved.round} is intact"
        return (
            f"could not write the checkpoint of round {t} to {self.directory}: {needed} bytes and "
            f"a manifest needed, {free} bytes free ({error}){intact}. Make room, then --resume"
        )

    def _read(self, manifest: Json) -> _Saved:
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
                        as_rows(arrays[p])[mask] = rows[sources[p].places[mask]]
        return _Saved(manifest["round"], arrays, sources, files, manifest["bound_to"])

    def _collect_garbage(self, before: _Saved | None) -> None:
        kept = [saved for saved in (before, self._saved) if saved is not None]
        manifests = {saved.round for saved in kept}
        files = {r for saved in kept for r in saved.files}
        # Manifests first: none may be left without its data.
        for t in self._rounds("json"):
            if t not in manifests:
                self._path(t, "json").unlink()
        for t in self._rounds("safetensors"):
            if t not in files:
                self._path(t, "safetensors").unlink()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
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
    body, _, seal = text.rpartition(_SEAL)
    if seal != f"{zlib.crc32(body.encode())}}}":
        raise ValueError("the manifest is not what was written")
    return json.loads(body + "}")


def as_rows(array: Array) -> Array:
    """A view whose first axis are the rows saved one by one; below two dimensions one row is all.

    >>> as_rows(np.zeros((3, 2))).shape, as_rows(np.zeros(3)).shape, as_rows(np.zeros(())).shape
    ((3, 2), (1, 3), (1,))
    """
    return array if array.ndim >= 2 else array[None]


def changed_rows(old: Array | None, new: Array) -> Mask:
    """The rows of `new` that `old` does not hold bit by bit at the same place.

    >>> nan = np.array([[np.nan], [0.0], [1.0]])
    >>> changed_rows(nan, np.array([[np.nan], [-0.0], [1.0], [1.0]]))
    array([False,  True, False,  True])
    """
    rows = as_rows(new)
    if old is new:  # of a tensor that was saved before and is never changed in place
        return np.zeros(len(rows), dtype=np.bool_)
    changed = np.ones(len(rows), dtype=np.bool_)
    if old is None or old.dtype != new.dtype or as_rows(old).shape[1:] != rows.shape[1:]:
        return changed
    shared = min(len(as_rows(old)), len(rows))
    old_bytes, new_bytes = _bytes(as_rows(old)), _bytes(rows)  # (n, bytes of a row)
    step = max(1, CHUNK_BYTES // max(1, new_bytes.shape[1]))
    for start in range(0, shared, step):
        chunk = slice(start, min(start + step, shared))
        changed[chunk] = (old_bytes[chunk] != new_bytes[chunk]).any(axis=1)
    return changed


def files_to_absorb(live: Mapping[int, int], sizes: Mapping[int, int], written: int) -> list[int]:
    """The older files whose remaining rows are written again, so that the files can go.

    Smallest first: those beyond MAX_FILES, and those that cost no more than what is written anyway
    if files are many or mostly hold what is no longer used. Absorbing only what is small keeps
    the largest file in place, so that a row is rewritten about log(rows / cohort) times, not in
    every MAX_FILES-th checkpoint.

    Args:
        live: bytes in use by file, `sizes` with those no longer used; both by round.
        written: bytes of rows that changed.

    >>> files_to_absorb({0: 90, 1: 5}, {0: 100, 1: 50}, written=5)
    [1]
    """
    if not written:
        return []
    crowded = len(live) >= MAX_FILES  # the file to be written comes on top
    absorbed: list[int] = []
    for t in sorted(live, key=lambda t: (live[t], t)):
        too_many = len(live) - len(absorbed) >= MAX_FILES
        cheap = live[t] <= written
        wasteful = 2 * live[t] < sizes[t]
        if too_many or (cheap and (crowded or wasteful)):
            absorbed.append(t)
            written += live[t]
    return absorbed


def _carried_sources(before: _Saved | None, arrays: Arrays) -> dict[str, RowSources]:
    nowhere = RowSources(np.empty(0, np.int64), np.empty(0, np.int64))
    sources = {} if before is None else before.sources
    return {p: sources.get(p, nowhere).resized(len(as_rows(a))) for p, a in arrays.items()}


def _rows_to_write(
    before: _Saved | None, arrays: Arrays, carried: dict[str, RowSources]
) -> dict[str, Mask]:
    """Rows that changed, and rows that must leave a file which is to go."""
    if before is None:
        return {path: changed_rows(None, array) for path, array in arrays.items()}
    masks = {path: changed_rows(before.arrays.get(path), array) for path, array in arrays.items()}
    row_bytes = {path: _bytes(as_rows(array)).shape[1] for path, array in arrays.items()}
    written = sum(int(mask.sum()) * row_bytes[path] for path, mask in masks.items())
    live: dict[int, int] = {}
    for path, mask in masks.items():
        rounds, counts = np.unique(carried[path].rounds[~mask], return_counts=True)
        for r, count in zip(rounds.tolist(), counts.tolist(), strict=True):
            live[r] = live.get(r, 0) + count * row_bytes[path]
    sizes = {r: file.num_bytes for r, file in before.files.items()}
    absorbed = files_to_absorb(live, sizes, written)
    return {path: mask | np.isin(carried[path].rounds, absorbed) for path, mask in masks.items()}


def _manifest(saved: _Saved) -> dict[str, Json]:
    tensors = {
        path: {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "pieces": saved.sources[path].pieces(),
        }
        for path, array in saved.arrays.items()
    }
    files = {str(r): [file.num_bytes, file.crc32] for r, file in saved.files.items()}
    return {"tensors": tensors, "files": files, "bound_to": saved.bound_to}


def _pick(rows: Array, mask: Mask) -> Array:
    return rows if mask.all() else rows[mask]


def _bytes(rows: Array) -> NDArray[np.uint8]:
    """A view of each row's bytes, which compare where floats do not (NaN, -0.0)."""
    width = int(np.prod(rows.shape[1:]))
    return rows.reshape(len(rows), width).view(np.uint8)


def _crc32(path: Path) -> int:
    crc = 0
    for chunk in _chunks(path):
        crc = zlib.crc32(chunk, crc)
    return crc


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
