"""A clustering whose stages are looked up by their configuration and the key of their input."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flray.clustering.embeds import NoEmbed
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.points import Matrix, Partition, Points
from flray.clustering.related import Related
from flray.clustering.relations import NoRelation
from flray.config.binding import Plain
from flray.execution.federation import Federation
from flray.sweep.cache import Cache
from flray.sweep.keys import digest


@dataclass(frozen=True)
class Stages:
    """The stages after one observation. A partition is computed anew, its tree is not."""

    cache: Cache
    points: Points
    key: str  # of the points
    keys: dict[int, str] = field(default_factory=dict)  # of what was computed, by id
    kept: list[object] = field(default_factory=list)  # so that no other object has its id

    def decide(self, pipeline: Pipeline, plain: Plain, fed: Federation, t: int) -> Clustering:
        """As pipeline.decide; `plain` is the pipeline's configuration."""
        self.keys[id(self.points)] = self.key
        partition: Any = pipeline.partition  # Any: a partition stage
        if isinstance(partition, Hierarchical):
            partition = _StoredTree(partition, self)
        stored = replace(
            pipeline,
            embed=self._stored("embed", pipeline.embed, plain),
            distance=self._stored("distance", pipeline.distance, plain),
            relate=self._stored("relate", pipeline.relate, plain),
            partition=partition,
        )
        return stored.decide(self.points, fed, t)

    def look_up(self, kind: str, name: object, given: object, compute: Callable[[], Any]) -> Any:
        """What a stage returned for this input, whoever computed it. Any: the stage's own."""
        key = digest([kind, name, self.keys[id(given)]])
        found = self.cache.value(kind, key, compute)
        self.keys[id(found)] = key
        self.kept.append(found)
        return found

    def _stored(self, kind: str, stage: Callable[..., Any], plain: Plain) -> Callable[..., Any]:
        if isinstance(stage, NoEmbed | NoRelation):
            return stage  # the input itself, or nothing
        return _Stored(kind, plain[kind], stage, self)


@dataclass(frozen=True)
class _Stored:
    kind: str
    name: object  # its configuration
    stage: Callable[..., Any]
    stages: Stages

    def __call__(self, given: Any, *rest: Any) -> Any:
        compute = lambda: self.stage(given, *rest)  # noqa: E731
        return self.stages.look_up(self.kind, self.name, given, compute)


@dataclass(frozen=True)
class _StoredTree:
    """Hierarchical, whose tree serves every threshold and number."""

    partition: Hierarchical
    stages: Stages

    def __call__(self, related: Related) -> Partition:
        rule = self.partition
        of = related.relation if rule.on == "relation" else related.distance
        if of is None:  # no tree: let the rule itself say what is missing
            return rule(related)
        name = [rule.linkage, rule.on]
        tree: Matrix = self.stages.look_up("tree", name, of, lambda: rule.tree(related))
        return Partition(rule.cut(tree, related), tree)
