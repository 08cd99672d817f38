"""How good a clustering is: by the labels that clients hold, and by clients made up for it."""

from dataclasses import replace
from typing import Any

import numpy as np

from flray.algorithms.algorithm import Places
from flray.clustering.distances import Cosine
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Matrix, Points
from flray.data.similar import Robustness, similar_id
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.execution.federation import Federation, Meter
from flray.scores import cosines, label_scores, pair_correlation, robustness_scores
from flray.server.evaluation import RoundRow


def label_row(found: Clustering, split: Split, fed: Federation) -> RoundRow:
    """Columns of a clustering after round fed.t that say how it follows the clients' labels."""
    counts = split.label_counts(found.clients)
    rng = fed.generator("similarity", fed.t)
    return dict(label_scores(_similarity(found), counts, found.labels, rng))


def drift_row(found: Clustering, split: Split, drift: Matrix) -> RoundRow:
    """Correlation of embeddings with the clients' ways to see images, alone and with their labels.

    NaN where clients do not differ. The similarity of data that differ in both is the sum of both.

    Args:
        drift: (M, M) similarity of all clients.
    """
    embedded, seen = _similarity(found), drift[np.ix_(found.clients, found.clients)]
    both = seen + cosines(split.label_counts(found.clients))
    return {
        "drift_correlation": pair_correlation(embedded, seen),
        "data_correlation": pair_correlation(embedded, both),
    }


def _similarity(found: Clustering) -> Matrix:
    """(m, m) cosine similarity of the clients' embeddings."""
    return 1.0 - Cosine()(Points.vectors(found.clients, found.points.means()))


def robustness_row(
    algorithm: object,
    state: Any,  # Any: the algorithm's own, after the clustering
    found: Clustering,
    fed: Federation,
    split: Split,
    options: Robustness,
) -> RoundRow:
    """REPA's Algorithm 1 for each cluster; what it costs is not counted, it is no part of a run."""
    if not isinstance(algorithm, Places):
        raise ExperimentError(
            f"evaluate.robustness needs an algorithm that places clients it never heard of, "
            f"{type(algorithm).__name__} does not; known: repa, wd; or set it to null"
        )
    clusters = np.unique(found.labels)
    members = [found.clients[found.labels == c] for c in clusters]
    asked = np.array(
        [
            [
                similar_id(fed.num_clients, options.draws, int(r), j)
                for j, r in enumerate(
                    fed.generator("robustness", fed.t, int(own.min())).choice(own, options.draws)
                )
            ]
            for own in members
        ]
    )  # (C, n)
    sizes = np.array([len(ids) for ids in split.similar], np.int64)
    among = replace(fed, meter=Meter(), num_examples=np.concatenate([fed.num_examples, sizes]))
    with fed.meter.phase("robustness"):
        answered, place = algorithm.assign(state, np.unique(asked), among)
    landed = dict(zip(answered.tolist(), place.tolist(), strict=True))
    successes = np.array(
        [[landed.get(int(p)) == c for p in row] for c, row in zip(clusters, asked, strict=True)]
    )
    return dict(robustness_scores(successes, np.array([len(own) for own in members])))
