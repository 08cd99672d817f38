"""Clusterings of one observation in which every stage is computed once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.points import Matrix, Partition, Points
from flray.clustering.related import Related
from flray.config.binding import Plain
from flray.execution.federation import Federation
from flray.sweep.rows import canonical

Known = dict[Any, Any]  # Any: what a stage returned, by what it was given


@dataclass(frozen=True)
class Stages:
    """What stages said of one set of points, by their configuration."""

    points: Points
    fed: Federation
    t: int
    known: Known = field(default_factory=dict)

    def decide(self, pipeline: Pipeline, plain: Plain) -> Clustering:
        """As pipeline.decide; `plain` is the pipeline's configuration."""
        partition: Any = pipeline.partition  # Any: a partition stage
        if isinstance(partition, Hierarchical):
            partition = _KnownTree(partition, self.known)
        once = replace(
            pipeline,
            embed=self._once("embed", pipeline.embed, plain),
            distance=self._once("distance", pipeline.distance, plain),
            relate=self._once("relate", pipeline.relate, plain),
            partition=partition,
        )
        return once.decide(self.points, self.fed, self.t)

    def number(self, kind: str) -> int:
        """How many embeddings, distances or trees were computed."""
        return sum(key[0] == kind for key in self.known)

    def _once(self, kind: str, stage: Callable[..., Any], plain: Plain) -> "_Once":
        return _Once(kind, canonical(plain[kind]), stage, self.known)


@dataclass(frozen=True)
class _Once:
    """A stage that remembers: its input lives as long as the memory, so its id is its name."""

    kind: str
    name: str
    stage: Callable[..., Any]
    known: Known

    def __call__(self, given: Any, *rest: Any) -> Any:
        key = self.kind, self.name, id(given), *rest
        if key not in self.known:
            self.known[key] = self.stage(given, *rest)
        return self.known[key]


@dataclass(frozen=True)
class _KnownTree:
    """Hierarchical, whose tree serves every threshold and number."""

    partition: Hierarchical
    known: Known

    def __call__(self, related: Related) -> Partition:
        tree = self._tree(related)
        return Partition(self.partition.cut(tree, related), tree)

    def _tree(self, related: Related) -> Matrix:
        of = related.relation if self.partition.on == "relation" else related.distance
        key = "tree", self.partition.linkage, self.partition.on, id(of)
        if key not in self.known:
            self.known[key] = self.partition.tree(related)
        tree: Matrix = self.known[key]
        return tree
