"""A pipeline whose stages are cached by their configuration and the key of their input."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flray.clustering.embeds import NoEmbed
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.pipeline import Pipeline
from flray.clustering.points import Matrix, Partition
from flray.clustering.related import Related
from flray.clustering.relations import NoRelation
from flray.config.reading import Plain
from flray.sweeps.cache import Cache
from flray.sweeps.keys import digest


def with_stored_stages(pipeline: Pipeline, plain: Plain, cache: Cache, key: str) -> Pipeline:
    """The pipeline for signatures of this key. A partition is computed anew, its tree is not.

    Args:
        plain: the configuration of the pipeline.
    """
    stages: dict[str, Any] = {}  # Any: a stage of its kind
    keys: dict[str, str] = {}
    for kind in ("embed", "distance", "relate"):
        stage = getattr(pipeline, kind)
        if not isinstance(stage, NoEmbed | NoRelation):  # the input itself, or nothing
            key = digest([kind, plain[kind], key])
            stages[kind] = _Stored(kind, key, stage, cache)
        keys[kind] = key
    rule = pipeline.partition
    if isinstance(rule, Hierarchical):
        source = keys["relate" if rule.on == "relation" else "distance"]
        tree_key = digest(["tree", [rule.linkage, rule.on], source])
        stages["partition"] = _StoredTree(tree_key, rule, cache)
    return replace(pipeline, **stages)


@dataclass(frozen=True)
class _Stored:
    kind: str
    key: str
    stage: Callable[..., Any]  # Any: arguments and results differ by kind
    cache: Cache

    def __call__(self, *given: Any) -> Any:
        return self.cache.value(self.kind, self.key, lambda: self.stage(*given))


@dataclass(frozen=True)
class _StoredTree:
    """Hierarchical, whose tree serves every threshold and number."""

    key: str
    rule: Hierarchical
    cache: Cache

    def __call__(self, related: Related) -> Partition:
        if self.rule.on == "relation" and related.relation is None:
            return self.rule(related)  # no tree: the rule itself reports what is missing
        tree: Matrix = self.cache.value("tree", self.key, lambda: self.rule.tree(related))
        return Partition(self.rule.cut(tree, related), tree)
