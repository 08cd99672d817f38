"""What a page needs to cut the tree of a clustering anew, wherever its reader moves the slider.

`explorer.js` cuts, colours and scores; this module gives it the tree, a picture of D, points in the
plane, edges between clients, and the scores of cuts that a sweep has trained. All of it is small:
about 0.3 MB for 2,000 clients.
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.image import imsave

from flray.columns import FOLDER, SEED
from flray.config.overrides import THRESHOLD, with_value
from flray.data.dataset import Ids
from flray.records.clusterings import ClusteringRecord
from flray.reports.columns import column_of, with_unit
from flray.reports.geometry import Matrix, leaf_order, plane, tree_of
from flray.reports.runs import RunRecord
from flray.reports.style import GROUPS
from flray.reports.sweeps import enclosing_sweep, holds_sweep, read_sweep
from flray.values import ROUNDING, highest_equal

PARTITION = "algorithm.clustering.partition"
NUMBER = f"{PARTITION}.number"
CUT = "<cut>"  # stands for the threshold or number in the YAML
MAX_PIXELS = 300  # most rows of the picture of D; of more clients, means of neighbours
MAX_POINTS = 4_000  # most points in the plane
NEIGHBOURS = 3  # edges of a client, to the clients nearest to it

Plain = Mapping[str, Any]  # Any: JSON


def explorer(clustering: ClusteringRecord, run: RunRecord) -> Plain | None:
    """The data of `explorer.js`; None for a partition without a tree, which no slider can cut.

    Positions of clients are those in `clustering.clients`. `start` is the run's own cut, `key` says
    whether the YAML names a threshold or a number, `trained` has the cuts of `trained_cuts`.

    Args:
        clustering: A clustering of the run.
        run: Its run, for the settings and for the sweep that it may be part of.
    """
    tree, partition = tree_of(clustering), run.value(PARTITION)
    D = None if clustering.is_overlapping else clustering.D
    if tree is None or D is None or not isinstance(partition, Mapping):
        return None
    threshold = partition.get("threshold")
    key = "number" if threshold is None else "threshold"
    plain = with_value({"algorithm": run.config["algorithm"]}, f"{PARTITION}.{key}", CUT)
    points, owner, how = plane(clustering)
    kept = np.linspace(0, len(points) - 1, min(len(points), MAX_POINTS)).astype(np.int64)
    groups = clustering.groups
    return {
        "clients": clustering.clients.tolist(),
        "merges": tree[:, :2].astype(np.int64).tolist(),
        "heights": tree[:, 2].tolist(),
        "rounding": ROUNDING,
        "leaves": leaf_order(clustering).tolist(),
        "groups": None if groups is None else np.unique(groups, return_inverse=True)[1].tolist(),
        "points": _thousandths(points[kept]),
        "owners": owner[kept].tolist(),
        "how": how,
        "edges": nearest_neighbours(D, NEIGHBOURS).tolist(),
        "colours": list(GROUPS),
        "key": key,
        "start": clustering.num_clusters if threshold is None else min(threshold, 2 * tree[-1, 2]),
        "yaml": yaml.safe_dump(plain, sort_keys=False, allow_unicode=True),
        "trained": trained_cuts(run, tree),
    }


def distance_picture(clustering: ClusteringRecord) -> str:
    """D in the order of the dendrogram's leaves as a data URL, at most MAX_PIXELS wide."""
    order, m = leaf_order(clustering), clustering.num_clients
    D = np.asarray(clustering.D, np.float64)[np.ix_(order, order)]
    if m > MAX_PIXELS:
        begins = np.arange(MAX_PIXELS) * m // MAX_PIXELS
        sizes = np.diff(begins, append=m)
        D = np.add.reduceat(np.add.reduceat(D, begins, 0), begins, 1) / np.outer(sizes, sizes)
    pixels = io.BytesIO()
    imsave(pixels, D, cmap="viridis", vmin=0, format="webp", pil_kwargs={"quality": 90})
    return f"data:image/webp;base64,{base64.b64encode(pixels.getvalue()).decode('ascii')}"


def nearest_neighbours(D: Matrix, number: int) -> Ids:
    """(E, 2) positions a < b of clients of which one is among the nearest of the other.

    >>> nearest_neighbours(np.array([[0.0, 1, 9], [1, 0, 8], [9, 8, 0]]), 1)
    array([[0, 1],
           [1, 2]])
    """
    others = np.array(D, np.float64)
    np.fill_diagonal(others, np.inf)
    nearest = np.argsort(others, axis=1, kind="stable")[:, : min(number, len(D) - 1)]
    here = np.repeat(np.arange(len(D)), nearest.shape[1])
    pairs = np.sort(np.stack([here, nearest.ravel()], axis=1), axis=1)
    return np.asarray(np.unique(pairs, axis=0), np.int64)


def trained_cuts(run: RunRecord, tree: Matrix) -> list[Plain]:
    """The cuts of this tree that rows of the run's sweep have trained, by number of clusters.

    Rows with the seed and the settings of the run, but for the threshold or the number of clusters,
    have cut the same tree. Without a sweep there are none. Each has `clusters`, the `score` on test
    parts, and a `text` with the scores on test and validation parts.

    Args:
        run: A run, of a sweep or of its own.
        tree: (m - 1, 4) merges.
    """
    path = enclosing_sweep(run.path.resolve())
    if path is None or not holds_sweep(path):
        return []
    sweep = read_sweep(path)
    cuts = [key for key in (THRESHOLD, NUMBER) if key in sweep.keys]
    alike = [key for key in (*sweep.keys, SEED) if key not in cuts]
    texts = sweep.rows[alike].map(str).agg("|".join, axis=1)
    of_run = texts[sweep.rows[FOLDER] == run.path.resolve().relative_to(path).as_posix()]
    if not cuts or of_run.empty:
        return []
    rows = sweep.finished[texts.loc[sweep.finished.index] == of_run.iloc[0]]
    trained: dict[int, Plain] = {}
    for _, row in rows.iterrows():
        number = _num_clusters(tree, row, cuts)
        parts = [c for c in (sweep.score.mean, sweep.score.validation) if pd.notna(row.get(c))]
        text = ", ".join(f"{column_of(c).title} {with_unit(c, row[c])}" for c in parts)
        if number is not None and sweep.score.mean in parts:
            score = float(row[sweep.score.mean])
            trained.setdefault(number, {"clusters": number, "score": score, "text": text})
    return [trained[number] for number in sorted(trained)]


def _num_clusters(tree: Matrix, row: "pd.Series[Any]", cuts: list[str]) -> int | None:
    """How many clusters a row's threshold or number makes of the tree; None: it has neither."""
    if THRESHOLD in cuts and pd.notna(row[THRESHOLD]):
        return 1 + int((tree[:, 2] > highest_equal(row[THRESHOLD])).sum())
    return int(row[NUMBER]) if NUMBER in cuts and pd.notna(row[NUMBER]) else None


def _thousandths(points: Matrix) -> list[list[int]]:
    """Points in the plane as whole numbers from 0 to 1000, with one scale for both axes."""
    low = points.min(axis=0)
    span = float((points.max(axis=0) - low).max()) or 1.0
    scaled: list[list[int]] = np.rint(1000 * (points - low) / span).astype(np.int64).tolist()
    return scaled
