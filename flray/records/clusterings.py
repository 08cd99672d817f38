"""The evidence of clusterings, below a run's clusterings/: one file per clustering.

`round_000012.npz` has the points, distances, relation, labels and tree of the clustering after
round 12: enough to draw, score and repeat it. The files hold numbers only; reading runs no code.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Ids
from flray.files import reading, replace_file
from flray.wording import counted

FOLDER = "clusterings"  # folder in a run directory

Array = NDArray[Any]  # Any: integers or floats

_NAME = re.compile(r"round_(\d+)\.npz")
# Of zlib. Level 6, which numpy takes, needs four times as long for files a twelfth smaller.
_LEVEL = 1


@dataclass(frozen=True)
class ClusteringRecord:
    """One clustering of m clients; every array over clients is in the order of `clients`.

    Arrays with shapes that do not fit together are refused.

    >>> record = ClusteringRecord(np.arange(3), np.array([0, 0, 1]), np.zeros((3, 3)))
    >>> record.num_clusters, record.members(0).tolist()
    (2, [True, True, False])
    """

    clients: Ids  # (m,)
    labels: Ids  # (m,)
    D: Array | None = None  # (m, m); None: left out, where clients are many
    R: Array | None = None  # (m, m) strengths; None: nothing was related
    points: Array | None = None  # (P, e)
    point_owner: Ids | None = None  # (P,) positions in `clients`
    # Where `points` are a projection, which takes less room: () the number of dimensions of the
    # points that were clustered, and () the share of their variance that it keeps. At 1.0 it has
    # all their pairwise L2 distances, below that their leading principal components.
    projected_from: Array | None = None
    variance_kept: Array | None = None
    linkage: Array | None = None  # (m - 1, 4) as scipy writes a tree; None: a partition without
    groups: Ids | None = None  # (m,) planted; None: none were
    # () True where the clusters are the rows of R, which may overlap, and labels tell the distinct
    # ones apart; None: each client is in one cluster.
    overlapping: Array | None = None

    def __post_init__(self) -> None:
        if (self.points is None) != (self.point_owner is None):
            raise ValueError("points and point_owner come together, got one of them")
        m = len(self.clients)
        num_points = 0 if self.points is None else len(self.points)
        expected = {
            "clients": (m,),
            "labels": (m,),
            "D": (m, m),
            "R": (m, m),
            "point_owner": (num_points,),
            "projected_from": (),
            "variance_kept": (),
            "linkage": (m - 1, 4),
            "groups": (m,),
            "overlapping": (),
        }
        for name, shape in expected.items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} of {m} clients must be {shape}, got {array.shape}")
        if self.is_overlapping and self.R is None:
            raise ValueError("overlapping clusters are the rows of R, got no R")

    @property
    def num_clients(self) -> int:
        """The number m of clustered clients."""
        return len(self.clients)

    @property
    def num_clusters(self) -> int:
        """The number of distinct labels."""
        return len(np.unique(self.labels))

    @property
    def is_overlapping(self) -> bool:
        """True if a client may be in several clusters, as in FLT."""
        return self.overlapping is not None and bool(self.overlapping)

    @property
    def counted(self) -> str:
        """How many clusters there are, in words: "1 cluster", "4 overlapping clusters"."""
        kind = "overlapping cluster" if self.is_overlapping else "cluster"
        return counted(self.num_clusters, kind)

    def members(self, label: int) -> NDArray[np.bool_]:
        """(m,) who is in the cluster; where clusters overlap, a client may be in several."""
        if self.is_overlapping and self.R is not None:
            row: NDArray[np.bool_] = self.R[np.flatnonzero(self.labels == label)[0]] > 0
            return row
        alone: NDArray[np.bool_] = self.labels == label
        return alone


def write_clustering(folder: Path, t: int, arrays: Mapping[str, Array], num_later: int = 0) -> None:
    """Write the clustering after round t (0: before the first) to folder/round_<t>.npz.

    Args:
        arrays: the fields of `ClusteringRecord` by name; those that are None there are left out.
        num_later: how many clusterings of the same round came after it. Those that were not the
            last are kept as round_<t>_<num_later>.npz, which `read_clusterings` leaves out.

    >>> from tempfile import mkdtemp
    >>> run, two = Path(mkdtemp()), np.arange(2)
    >>> write_clustering(run / FOLDER, 3, {"clients": two, "labels": two, "D": np.eye(2)})
    >>> {t: record.counted for t, record in read_clusterings(run).items()}
    {3: '2 clusters'}
    """
    _checked(arrays)

    def write(path: Path) -> None:
        with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=_LEVEL) as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)

    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"_{num_later}" if num_later else ""
    replace_file(folder / f"round_{t:06d}{suffix}.npz", write)


def clustering_files(run: Path) -> dict[int, Path]:
    """The files of a run's clusterings by round, in order of rounds; {} if there are none.

    Of several clusterings of one round, the last.
    """
    named = ((_NAME.fullmatch(path.name), path) for path in (run / FOLDER).glob("*.npz"))
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def read_clusterings(run: Path) -> dict[int, ClusteringRecord]:
    """The (last) clustering of each round that had one, in order of rounds."""
    return {t: read_clustering(path) for t, path in clustering_files(run).items()}


def read_clustering(path: Path) -> ClusteringRecord:
    """The clustering of one file.

    Raises:
        ExperimentError: The file is missing or damaged, or its arrays do not fit together.
    """
    with reading(path), np.load(path, allow_pickle=False) as stored:
        return _checked(dict(stored))


def _checked(arrays: Mapping[str, Array]) -> ClusteringRecord:
    """The record of arrays by name; refused if one is missing or unknown."""
    names = [field.name for field in fields(ClusteringRecord)]
    required = [field.name for field in fields(ClusteringRecord) if field.default is MISSING]
    missing = [name for name in required if name not in arrays]
    if missing:
        raise ValueError(f"a clustering needs {', '.join(required)}, got no {', '.join(missing)}")
    unknown = sorted(set(arrays) - set(names))
    if unknown:
        raise ValueError(f"unknown array {unknown[0]!r} of a clustering; known: {', '.join(names)}")
    return ClusteringRecord(**arrays)
