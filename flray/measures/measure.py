"""What a measure of clusterings is: the columns it adds, what it needs, and how it is computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flray.clustering.distances import Cosine
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Matrix, Points
from flray.columns import Column
from flray.data.dataset import Dataset
from flray.data.events import Timeline
from flray.data.split import Split
from flray.execution.federation import Federation

Numbers = dict[str, float]  # by column, without the prefix `clustering_`


@dataclass(frozen=True)
class RunData:
    """The data of a run, before its first round: what a measure may prepare itself with."""

    split: Any  # Any: the configured split, a registered class or the user's own
    dataset: Dataset
    timeline: Timeline
    has_events: bool  # True if the experiment has `events`
    seed: int


@dataclass(frozen=True)
class ClusteringContext:
    """One clustering and the run around it: all that a measure may look at.

    Ground truth is among it (`split.groups`, `split.label_counts`): measures judge and decide
    nothing.
    """

    clustering: Clustering
    split: Split  # in the round of the clustering
    fed: Federation  # in the round of the clustering; `fed.t` is the round
    algorithm: object
    state: Any  # Any: the algorithm's own, after the clustering

    def signature_similarity(self) -> Matrix:
        """(m, m) cosine of the clients' signatures as they were sent (REPA, Fig. 1: e_i)."""
        signatures = self.clustering.signatures
        return 1.0 - Cosine()(Points.vectors(signatures.clients, signatures.means()))


Measurement = Callable[[ClusteringContext], Numbers]


class Measure:
    """Numbers of a clustering, which the run records as columns `clustering_*` of its round.

    A measure is a frozen dataclass; its fields are the keys below its name in `evaluate`. It
    changes neither models nor costs of the run. Only `__call__` has to be written.

    >>> class LargestCluster(Measure):
    ...     columns = {"largest": Column("largest cluster", decimals=0)}
    ...
    ...     def __call__(self, context):
    ...         return {"largest": int(np.bincount(context.clustering.labels).max())}
    >>> import numpy as np
    >>> from types import SimpleNamespace as Namespace
    >>> LargestCluster()(Namespace(clustering=Namespace(labels=np.array([0, 0, 1]))))
    {'largest': 2}
    """

    # Columns that summaries and tables show too, without the prefix. Numbers without an entry here
    # are recorded in rounds.parquet only.
    columns: ClassVar[Mapping[str, Column]] = {}

    def prepare(self, data: RunData) -> Timeline:
        """Check that the run can be measured, and return the timeline that the measure needs.

        Called before anything is trained; raises an ExperimentError that names the key. The
        timeline may contain additional clients, but those of `data` must keep their examples.
        """
        return data.timeline

    def check_algorithm(self, algorithm: object) -> None:
        """Refuse an algorithm whose clusterings cannot be measured; by default none is refused.

        Called before anything is trained, for algorithms that will cluster: `Branching` ones, and
        those with `returns_clusterings`, which cluster by rules of their own.
        """

    def start(self, data: RunData) -> Measurement:
        """Compute what is needed once per run; returns the function that is called per clustering.

        By default this is the measure itself.
        """
        return self

    def __call__(self, context: ClusteringContext) -> Numbers:
        """The numbers of one clustering by column; none where they are not defined."""
        raise NotImplementedError
