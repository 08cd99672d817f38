"""A pipeline whose signatures and stages are taken from the cache, or computed and put there."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flray.clustering.embeds import NoEmbed
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.metadata import Metadata
from flray.clustering.pipeline import Clustering, Pipeline
from flray.clustering.points import Matrix, Partition, Points
from flray.clustering.related import Related
from flray.clustering.relations import NoRelation
from flray.config.reading import Plain
from flray.execution.federation import Cohort, Federation, Meter
from flray.models.bank import ModelBank, Params
from flray.sweeps.cache import Cache, Counted
from flray.sweeps.keys import digest, state_digest

OBSERVATION = "observation"  # kind of cache entry: the signatures of clients


def with_stored_stages(
    pipeline: Pipeline, plain: Plain, cache: Cache, prefix: str, is_shared: bool = True
) -> Pipeline:
    """The pipeline with signatures and stages of the cache; one with own methods stays as it is.

    Args:
        plain: Configuration of the pipeline.
        cache: Where signatures and stages are looked up and put.
        prefix: Key of everything that led to the models that clients start from.
        is_shared: False if nobody else asks for these signatures, which may be as large as models.
    """
    methods = ("observe", "decide", "place")
    if any(getattr(type(pipeline), name) is not getattr(Pipeline, name) for name in methods):
        return pipeline
    stages = {stage.name: getattr(pipeline, stage.name) for stage in fields(Pipeline)}
    return StoredPipeline(**stages, plain=plain, cache=cache, prefix=prefix, is_shared=is_shared)


@dataclass(frozen=True)
class StoredPipeline(Pipeline):
    """A pipeline that computes nothing twice; it replaces the pipeline of an algorithm in a trial.

    The algorithm clusters as always: `observe` and `decide` return the same bits as those of the
    pipeline it stands for. A partition is computed for each row, everything before it once.

    Signatures are an entry of the cache by configuration, clients, models and round; embedding,
    distance, relation and tree by their configuration and the key of their input. What signatures
    cost is counted in `fed.meter`, whoever computed them.
    """

    plain: Plain = field(kw_only=True)
    cache: Cache = field(kw_only=True)
    prefix: str = field(kw_only=True)
    is_shared: bool = field(kw_only=True)
    keys: dict[int, str] = field(default_factory=dict)  # keys of observed points, by their id()

    def observe(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        """The signatures of clients from the cache; those that nobody has asked for are collected.

        The meter of `fed` counts their costs either way, as a run alone would.
        """
        if isinstance(self.signature, Metadata):  # a file, whose content no configuration has
            points, memory = super().observe(fed, bank, cohort, memory)
            self.keys[id(points)] = digest([self.prefix, state_digest(points)])
            return points, memory
        models = [bank.digests(cohort.clients), state_digest(memory)]
        asked = [cohort.t, cohort.clients.tolist()]
        described: list[object] = [self.plain["signature"]]
        if hasattr(self.embed, "on_client"):  # clients send its result
            described.append(self.plain["embed"])
        key = digest([self.prefix, *described, asked, models])

        def compute() -> Counted:
            measured = replace(fed, meter=Meter(spent=fed.meter.spent))
            value = Pipeline.observe(self, measured, bank, cohort, memory)
            return value, measured.meter.counts

        (points, memory), counts = self.cache.counted(OBSERVATION, key, compute, self.is_shared)
        fed.meter.counts.update(counts)
        self.keys[id(points)] = key
        return points, memory

    def decide(self, points: Points, fed: Federation, t: int) -> Clustering:
        """The clustering of points that `observe` returned, with stages of the cache."""
        stages = self._stored_stages(self.keys[id(points)])
        return Pipeline(self.signature, **stages).decide(points, fed, t)

    def _stored_stages(self, key: str) -> dict[str, Any]:  # Any: stages of four kinds
        """The stages for signatures of this key. A partition is computed anew, its tree is not."""
        stages: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for kind in ("embed", "distance", "relate"):
            stages[kind] = getattr(self, kind)
            if not isinstance(stages[kind], NoEmbed | NoRelation):  # the input itself, or nothing
                key = digest([kind, self.plain[kind], key])
                stages[kind] = _StoredStage(kind, key, stages[kind], self.cache)
            keys[kind] = key
        rule = self.partition
        if isinstance(rule, Hierarchical):
            source = keys["relate" if rule.on == "relation" else "distance"]
            tree_key = digest(["tree", [rule.linkage, rule.on], source])
            rule = _StoredTree(tree_key, rule, self.cache)
        return {**stages, "partition": rule}


@dataclass(frozen=True)
class _StoredStage:
    """A stage whose result is looked up by its key before it is computed."""

    kind: str
    key: str
    stage: Callable[..., Any]  # Any: arguments and results differ by kind
    cache: Cache

    def __call__(self, *inputs: Any) -> Any:
        return self.cache.value(self.kind, self.key, lambda: self.stage(*inputs))


@dataclass(frozen=True)
class _StoredTree:
    """A hierarchical partition whose tree serves every threshold and number of clusters."""

    key: str
    rule: Hierarchical
    cache: Cache

    def __call__(self, related: Related) -> Partition:
        if self.rule.on == "relation" and related.relation is None:
            return self.rule(related)  # no tree: the rule itself reports what is missing
        tree: Matrix = self.cache.value("tree", self.key, lambda: self.rule.tree(related))
        return Partition(self.rule.cut(tree, related), tree)
