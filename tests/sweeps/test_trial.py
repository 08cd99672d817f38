"""Trials: what is computed once, and that nothing of a row shows it. In process, without Ray."""

import json
import os
import re
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pytest
import torch

from flray.algorithms.fedavg import FedAvg
from flray.algorithms.flhc import Flhc, FlhcState
from flray.clustering.points import Partition, Points
from flray.clustering.related import Related
from flray.config.experiment import parse_experiment
from flray.config.overrides import THRESHOLD
from flray.errors import GpuFault
from flray.execution.federation import Cohort, Federation
from flray.records.checkpoint import CheckpointStore
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.sweeps import cache as cache_module
from flray.sweeps import process as process_module
from flray.sweeps.branching import branches
from flray.sweeps.cache import Cache
from flray.sweeps.driver import _in_order, _shared_signatures
from flray.sweeps.folder import read_row, run_path
from flray.sweeps.groups import KIND, Assembly
from flray.sweeps.keys import canonical, digest, prefix_key
from flray.sweeps.rows import STAND_IN, SweepRow, expand, rounds_to_cluster_after
from flray.sweeps.space import parse_space
from flray.sweeps.trial import Trial, TrialContext, run_row

from scenarios import (
    GPU_FULL,
    GPU_FULL_SHOWN,
    TINY,
    Result,
    assert_same_run,
    run_experiment,
    run_written_once,
    sha,
)

pytestmark = pytest.mark.slow

SIGNATURE = "algorithm.clustering.signature"
DISTANCE = "algorithm.clustering.distance"
LINKAGE = "algorithm.clustering.partition.linkage"
GAMMA = "algorithm.clustering.relate.gamma"
VERSION = {"sources": "of a test"}
FLHC_1 = {"algorithm": {"name": "flhc", "rounds_before": 1}}


def space_of(experiment, varied, **more):
    return parse_space({"experiment": {**TINY, **experiment}, "space": varied, **more})


def context_of(space, folder: Path, shared: Path | None = None, **more) -> TrialContext:
    for name in ("runs", "trials"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    session, wish = str(time.monotonic_ns()), folder / "stop.wish"
    entries = Cache(shared or folder / "cache", folder.name, session, wish=wish)
    experiments = [parse_experiment(row.plain) for row in expand(space)]
    wanted = rounds_to_cluster_after(space, experiments)
    return TrialContext(folder, entries, VERSION, False, wanted, **more)


def swept(space, folder: Path, **more) -> list[SweepRow]:
    """What became of all rows, run one after another; everything must have gone well."""
    context = context_of(space, folder, **more)
    states = [run_row(row, context) for row in expand(space)]
    assert {state.error for state in states} == {None}
    return states


def costs(folder: Path, kind: str) -> dict[str, int]:
    return Cache(folder / "cache", folder.name, "").costs(kind)


def result_of(state: SweepRow, folder: Path) -> Result:
    return Result.of(folder / run_path(state.number))


@cache
def run_alone(config: str) -> Result:
    """The run of a configuration by itself, once for all rows of the tests that have it."""
    folder = Path(NAIVE.name) / digest(config)
    return run_written_once(parse_experiment(json.loads(config)), folder)


NAIVE = TemporaryDirectory()  # removed when the process ends


def assert_rows_equal_naive_runs(states, folder: Path) -> None:
    for state in states:
        naive = run_alone(canonical(dict(state.plain)))
        assert_same_run(result_of(state, folder), naive)
        found, expected = (
            read_clusterings(folder / run_path(state.number)),
            read_clusterings(naive.path),
        )
        assert list(found) == list(expected) != []
        for t, clustering in expected.items():
            for name, array in vars(clustering).items():
                same = getattr(found[t], name)
                assert (array is None) == (same is None)
                assert array is None or (array == same).all(), name


def prefixes(experiment, varied) -> set[str]:
    rows = expand(space_of(experiment, varied))
    return {prefix_key(parse_experiment(row.plain), VERSION, has_gpu=False) for row in rows}


def test_signatures_that_one_row_clusters_by_are_not_stored(tmp_path) -> None:
    """Rows that cluster after other rounds share none; those of other linkages share all."""
    space = space_of({"algorithm": "flhc"}, {"algorithm.rounds_before": [1, 2], LINKAGE: "ward"})
    more = space_of(FLHC_1, {LINKAGE: ["ward", "single"]})
    found = []
    for name, each in (("alone", space), ("together", more)):
        shared = _shared_signatures(each, expand(each), VERSION, has_gpu=False)
        states = swept(each, tmp_path / name, signatures=shared)
        assert_rows_equal_naive_runs(states, tmp_path / name)
        stored = list((tmp_path / name / "cache" / "observation").glob("*/"))
        found.append((len(stored), len(costs(tmp_path / name, "observation"))))
    assert found == [(0, 2), (1, 1)]


def test_whatever_changes_the_prefix_is_another_prefix() -> None:
    for key, values, number in (
        ("train.lr", [0.1, 0.2], 2),
        ("participation", [0.5, 1.0], 2),
        ("execution.block", [2, 3], 2),
        ("rounds", [4, 5], 1),
        ("execution.actors.count", [1, 2], 1),
        ("algorithm.clustering.signature", ["update", "weights"], 1),
    ):
        found = prefixes({"algorithm": "flhc"}, {key: values, "algorithm.rounds_before": 2})
        assert len(found) == number, key
    experiment = parse_experiment({**TINY, "execution": {"device": "auto"}})
    versions = ((VERSION, False), ({"sources": "newer"}, False), (VERSION, True))
    assert len({prefix_key(experiment, *each) for each in versions}) == 3


def test_what_is_in_a_file_decides_the_prefix(tmp_path) -> None:
    table = tmp_path / "visits.csv"
    source = {"name": "table", "file": str(table), "client": "ward", "target": "days"}
    experiment = parse_experiment({**TINY, "dataset": source, "split": "natural", "model": "mlp"})
    keys = []
    for number, text in enumerate(["ward,x,days\na,1,2\n", "ward,x,days\na,1,3\n"] * 2):
        table.write_text(text)
        os.utime(table, (number, number))  # written in one instant otherwise
        keys.append(prefix_key(experiment, VERSION, has_gpu=False))
    assert keys[:2] == keys[2:]
    assert keys[0] != keys[1]


def test_a_clustering_that_never_comes_is_a_run_of_its_own() -> None:
    space = space_of({"algorithm": "flhc"}, {"algorithm.rounds_before": [3, 4, 5]})
    found = [branches(parse_experiment(row.plain)) for row in expand(space)]
    assert found == [True, True, False]


def test_stages_are_computed_once(tmp_path) -> None:
    """3 metrics by 2 linkages are 3 distances and 6 trees, however many thresholds."""
    varied = {
        DISTANCE: ["l1", "l2", "cosine"],
        LINKAGE: ["single", "complete"],
        THRESHOLD: {"between_merges": 2},
    }
    states = swept(space_of(FLHC_1 | {"rounds": 1}, varied), tmp_path)
    counted = {kind: len(costs(tmp_path, kind)) for kind in ("observation", "distance", "tree")}
    assert counted == {"observation": 1, "distance": 3, "tree": 6}
    # The highest merge leaves one cluster, whatever the metric and the linkage.
    assert len({state.run for state in states[1::2]}) == 1
    assert 1 < len({state.run for state in states}) < 12
    assert sum(costs(tmp_path, "observation").values()) > 0


EVERY_ROUND = {
    "algorithm.rounds_before": 2,
    LINKAGE: ["complete", "ward"],
    THRESHOLD: {"between_merges": 3},
}
AT_THE_ENDS = {"algorithm.rounds_before": [3, 1], THRESHOLD: {"linspace": [0.2, 1.2, 3]}}


@pytest.mark.parametrize(
    ("every", "varied"),
    [(1, EVERY_ROUND), pytest.param(3, AT_THE_ENDS, marks=pytest.mark.long)],
)
def test_flhc_rows_are_the_runs_they_stand_for(tmp_path, every, varied) -> None:
    """Clustering after the first, a middle and the last round, rounds evaluated or not."""
    experiment = {"algorithm": "flhc", "rounds": 3, "evaluate": {"every": every, "target": 0.2}}
    states = swept(space_of(experiment, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert len({state.run for state in states}) < len(states)
    found = [result_of(state, tmp_path / "sweep").summary for state in states]
    assert len({summary["params_sha256"] for summary in found}) > 2


COSINE = {"train": {**TINY["train"], "lr": {"start": 0.1, "schedule": "cosine"}}}


MOMENTS = {"aggregate": {"optimizer": "fedadam", "server_lr": 0.02}}


STOP = {"stop": {"patience": 1}}


@pytest.mark.parametrize("settings", [COSINE | MOMENTS, pytest.param(STOP, marks=pytest.mark.long)])
def test_settings_that_act_over_rounds_are_those_of_the_run_itself(tmp_path, settings) -> None:
    experiment = {"algorithm": {"name": "flhc", "rounds_before": 2}, "rounds": 5, **settings}
    space = space_of(experiment, {THRESHOLD: [0.3, 5.0]}, baseline={"algorithm": "fedavg"})
    *states, fedavg = swept(space, tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    whole = result_of(fedavg, tmp_path / "sweep")
    assert_same_run(whole, run_alone(canonical(dict(fedavg.plain))))
    ended = [result_of(state, tmp_path / "sweep").summary["rounds"] < 5 for state in states]
    assert any(ended) == (settings is STOP)


def test_rows_that_differ_in_training_or_model_are_dealt_their_data_once(
    tmp_path, monkeypatch
) -> None:
    process_module._SPLITS.clear()
    dealt, deal = [], process_module.deal
    monkeypatch.setattr(process_module, "deal", lambda *given: dealt.append(0) or deal(*given))
    varied = {"train.lr": [0.03, 0.07], "model.hidden": [5, 6], "seed": [11, 12]}
    states = swept(space_of({"model": {"name": "mlp200"}, "rounds": 1}, varied), tmp_path / "sweep")
    assert len(states) == 8
    assert len(dealt) == 2  # a split for each seed
    for state in states[-2:]:
        alone = run_alone(canonical(dict(state.plain)))
        assert_same_run(result_of(state, tmp_path / "sweep"), alone)


GPU_FAILURES = {
    RuntimeError("CUDA error: lost\nCompile ..."): "RuntimeError: CUDA error: lost",
    RuntimeError("CUDA out of memory"): "RuntimeError: CUDA out of memory",
    torch.OutOfMemoryError(GPU_FULL): GPU_FULL_SHOWN,
}


@pytest.mark.parametrize(("error", "shown"), GPU_FAILURES.items())
def test_a_row_whose_gpu_fails_is_left_to_another_process(
    error, shown, tmp_path, monkeypatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    space = space_of({"rounds": 2}, {"train.lr": [0.1]})
    (row,), context = expand(space), context_of(space, tmp_path / "sweep")
    with monkeypatch.context() as patched:
        patched.setattr(FedAvg, "round", fail)
        with pytest.raises(GpuFault, match=f"^{re.escape(shown)}$"):
            run_row(row, context)
    assert read_row(tmp_path / "sweep", row.number).status == "unfinished"
    assert run_row(row, context).error is None


def test_a_cosine_over_other_rounds_is_another_prefix() -> None:
    rounds = {"rounds": [4, 5], "algorithm.rounds_before": 2}
    assert len(prefixes({"algorithm": "flhc", **COSINE}, rounds)) == 2


def test_who_is_not_clustered_is_placed_as_in_the_run_itself(tmp_path) -> None:
    """A holdout client and one who joins later: the metric decides where they go."""
    joins = [{"round": 3, "kind": "join", "clients": [5]}]
    split = {**TINY["split"], "holdout": 1}
    experiment = FLHC_1 | {"rounds": 3, "events": joins, "split": split}
    varied = {DISTANCE: ["l1", "l2"], LINKAGE: "complete", THRESHOLD: {"between_merges": 2}}
    states = swept(space_of(experiment, varied), tmp_path / "sweep")
    assert len({state.run for state in states}) == 4
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")


def test_flt_rows_are_the_runs_they_stand_for(tmp_path) -> None:
    """Clustering before the first round: what it cost is in the first row."""
    clustering = {"signature": {"name": "pca_centres", "components": 4, "k": 2}, "embed": "none"}
    experiment = {"algorithm": {"name": "flt", "clustering": clustering}, "rounds": 2}
    experiment["split"] = {"name": "label_swap", "clients": 4, "groups": 2}  # planted
    varied = {
        "algorithm.dynamic.every": [None, 1],
        "algorithm.case": ["rows", "clusters"],
        GAMMA: [0.01, 100.0],
    }
    again = {"algorithm.dynamic.every": 1, GAMMA: 0.01}
    space = space_of(experiment, varied, **{"except": [again]})
    states = swept(space, tmp_path / "sweep")
    assert len(costs(tmp_path / "sweep", "observation")) == 1
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    runs = [state.run for state in states]
    first = result_of(states[0], tmp_path / "sweep").rounds.iloc[0]
    assert {"clustering_clusters", "clustering_ari", "bytes_up_signature"} <= set(first.index)
    assert runs[1] == runs[3]  # everybody hears everybody, by rows or by clusters
    assert 1 < len(set(runs[:4])) < 4
    assert len(set(runs[4:])) == 2  # who clusters again will need to know


def test_repa_rows_share_clusters_and_are_the_runs_they_stand_for(tmp_path) -> None:
    """The weight of the proximal term decides what follows the clustering."""
    experiment = {"algorithm": {"name": "repa", "rounds_before": 1}, "rounds": 2}
    number = "algorithm.clustering.partition.number"
    varied = {number: [1, 6], "algorithm.mu": [0.0, 1.0]}
    space = space_of(experiment, varied, **{"except": [{number: 1, "algorithm.mu": 0.0}]})
    states = swept(space, tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert len({state.run for state in states}) == 3
    assert len(costs(tmp_path / "sweep", KIND)) == 1 + 2 * 6


def test_only_rows_that_read_ground_truth_are_marked(tmp_path) -> None:
    """Label counts find one cluster, as a high threshold does: one state, but only one has read."""
    partitions = [
        {"name": "hierarchical", "threshold": 1e9},
        {"name": "label_counts"},
        {"name": "hierarchical", "threshold": 1e8},
        {"name": "hierarchical", "threshold": 0.0},
    ]
    experiment = {"algorithm": {"name": "flhc", "rounds_before": 0}, "rounds": 2}
    experiment |= {"uses_ground_truth": True, "split": {"name": "iid", "clients": 3}}
    space = space_of(experiment, {"algorithm.clustering.partition": partitions})
    states = swept(space, tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    first, counts, high, _ = (state.run for state in states)
    assert first == high != counts
    assert len(costs(tmp_path / "sweep", KIND)) == 1 + 3  # nothing is trained twice for that
    summaries = [result_of(state, tmp_path / "sweep").summary for state in states]
    assert [each["uses_ground_truth"] for each in summaries] == [False, True, False, False]
    assert len({each["params_sha256"] for each in summaries}) == 2


def test_rows_that_differ_in_what_their_signatures_cost_share_their_groups(tmp_path) -> None:
    """One cluster either way, but updates are trained for and principal components are not."""
    signatures = ["update", {"name": "pca_centres", "components": 4, "k": 1}]
    varied = {"algorithm.clustering.signature": signatures, THRESHOLD: 1e9}
    states = swept(space_of(FLHC_1 | {"rounds": 2}, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert states[0].run != states[1].run
    assert states[0].groups == states[1].groups
    assert len(costs(tmp_path / "sweep", KIND)) == 1


def test_a_row_that_fails_leaves_no_mark_on_the_next(tmp_path) -> None:
    """The first reads ground truth, then fails."""
    partitions = [f"{__name__}:Careless", {"name": "hierarchical", "threshold": 1.0}]
    varied = {"algorithm.clustering.partition": partitions}
    space = space_of(FLHC_1 | {"uses_ground_truth": True}, varied)
    context = context_of(space, tmp_path)
    failed, done = (run_row(row, context) for row in expand(space))
    assert (failed.status, failed.run) == ("failed", None)
    assert "labels" in failed.error
    assert result_of(done, tmp_path).summary["uses_ground_truth"] is False


@dataclass(frozen=True)
class Careless:
    """Looks at labels and stumbles."""

    def __call__(self, related: Related) -> Partition:
        raise ValueError(f"{related.label_counts().sum()} labels")


def test_what_fails_fails_once_in_a_start_of_the_sweep(tmp_path, monkeypatch) -> None:
    space = space_of(FLHC_1 | {"train": {"lr": 1e30}}, {THRESHOLD: [1.0, 2.0]})
    context = context_of(space, tmp_path)
    first, second = expand(space)
    message = run_row(first, context).error
    assert "NaN or infinite; lower train.lr" in message
    with monkeypatch.context() as patched:
        patched.setattr(Federation, "train", lambda *_, **__: pytest.fail("trained again"))
        assert run_row(second, context).error == message
    again = run_row(second, context_of(space, tmp_path))
    assert again.error == message


def test_a_prefix_that_was_cut_short_goes_on(tmp_path, monkeypatch) -> None:
    algorithm = {"name": "flhc", "rounds_before": 3}
    space = space_of({"algorithm": algorithm, "rounds": 3}, {THRESHOLD: [0.0]})
    (row,) = expand(space)
    clock = iter([0.0, 0.0, 2.0])
    context = context_of(space, tmp_path / "cut")
    context = replace(context, cache=replace(context.cache, deadline=1.0))
    monkeypatch.setattr(cache_module, "time", lambda: next(clock, 2.0))
    assert run_row(row, context).status == "unfinished"
    (run,) = (tmp_path / "cut" / "cache" / "prefix").glob(".*-3/")
    assert 0 < len(RunDirectory(run).rows()) < 3
    monkeypatch.setattr(cache_module, "time", lambda: 0.0)
    state = run_row(row, context)
    assert_rows_equal_naive_runs([state], tmp_path / "cut")
    whole = swept(space, tmp_path / "whole")
    assert costs(tmp_path / "cut", "prefix") == costs(tmp_path / "whole", "prefix")
    assert whole[0].run == state.run


def test_an_earlier_round_of_a_prefix_can_be_asked_for_later(tmp_path) -> None:
    """Round 2 was not kept on the way to 4: it and round 3 are trained again, from round 1."""
    space = space_of({"algorithm": "flhc", "rounds": 4}, {"algorithm.rounds_before": [1, 4]})
    swept(space, tmp_path / "one", shared=tmp_path / "cache")
    other = space_of({"algorithm": "flhc", "rounds": 4}, {"algorithm.rounds_before": [3]})
    states = swept(other, tmp_path / "two", shared=tmp_path / "cache")
    assert_rows_equal_naive_runs(states, tmp_path / "two")
    shared = Cache(tmp_path / "cache", "two", "")
    (steps,) = shared.costs("prefix").values()
    (prefix,) = (tmp_path / "cache" / "prefix").glob("*-4/")
    rounds = RunDirectory(prefix).rounds().set_index("round")
    assert steps == rounds.loc[2:3, "client_steps"].sum()


def test_fedavg_goes_on_from_the_prefix_and_others_from_its_first_rounds(tmp_path) -> None:
    space = space_of(
        {"algorithm": "flhc", "rounds": 4},
        {"algorithm.rounds_before": [2], THRESHOLD: [1e9]},
        baseline={"algorithm": "fedavg"},
    )
    rows, context = expand(space), context_of(space, tmp_path / "sweep")
    states = [run_row(row, context) for row in reversed(rows)]
    fedavg, _ = states
    alone = run_experiment(parse_experiment(dict(fedavg.plain)), tmp_path / "fedavg")
    assert_same_run(result_of(fedavg, tmp_path / "sweep"), alone)
    two_rounds = alone.rounds["client_steps"].iloc[:2].sum()
    assert fedavg.steps_found == two_rounds
    assert list(costs(tmp_path / "sweep", "prefix").values()) == [two_rounds]


def test_two_sweeps_share_one_cache(tmp_path) -> None:
    """The second trains the one cluster that the first has not; a third nothing."""
    first = space_of(FLHC_1 | {"rounds": 3}, {THRESHOLD: [0.0]})
    swept(first, tmp_path / "first", shared=tmp_path / "cache")
    second = space_of(FLHC_1 | {"rounds": 3}, {THRESHOLD: [0.0, 1e9]})
    states = swept(second, tmp_path / "second", shared=tmp_path / "cache")
    assert_rows_equal_naive_runs(states, tmp_path / "second")
    theirs = Cache(tmp_path / "cache", "second", "")
    assert theirs.costs("prefix") == theirs.costs("observation") == {}
    assert list(theirs.costs(KIND)) == states[1].groups
    swept(second, tmp_path / "third", shared=tmp_path / "cache")
    assert Cache(tmp_path / "cache", "third", "").costs(KIND) == {}


def test_a_scheduled_row_has_a_run_of_its_own_and_reports_rounds_that_are_written(
    tmp_path, monkeypatch
) -> None:
    """However slow the disk is: a scheduler may end the process when a round is reported."""
    write = CheckpointStore.write

    def slowly(self, snapshot):
        time.sleep(0.05)
        write(self, snapshot)

    space = space_of(FLHC_1 | {"rounds": 3}, {THRESHOLD: [1e8, 1e9]})
    context = context_of(space, tmp_path / "sweep", is_scheduled=True)
    reported, states = [], []
    for row in expand(space):
        directory = RunDirectory(context.folder / run_path(row.number))

        def report(found, directory=directory) -> None:
            reported.append((found["round"], len(directory.rounds())))

        with monkeypatch.context() as patched:
            patched.setattr(CheckpointStore, "write", slowly)
            states.append(run_row(row, context, report))
    assert len({state.run for state in states}) == 2
    assert reported == [(t, t) for t in (1, 2, 3)] * 2
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert len(costs(tmp_path / "sweep", "observation")) == 1


NOT_DIVIDED = {
    "a client that never trains": {"split": {**TINY["split"], "holdout": 1}},
    "a client that joins": {"events": [{"round": 2, "kind": "join", "clients": [5]}]},
    "clients that may be dropped": {"on_client_failure": "drop"},
}


def test_rows_are_not_divided_where_clients_come_and_go(tmp_path) -> None:
    varied = {THRESHOLD: [0.0]}
    for number, more in enumerate(NOT_DIVIDED.values()):
        experiment = FLHC_1 | {"rounds": 2, **more}
        (whole,) = swept(space_of(experiment, varied), tmp_path / str(number))
        assert whole.groups == [], more
    (divided,) = swept(space_of(FLHC_1 | {"rounds": 2}, varied), tmp_path / "divided")
    assert len(divided.groups) == 6


@dataclass(frozen=True)
class Watched(Flhc):
    """FL+HC whose rounds also return how many models there are."""

    def round(self, state: FlhcState, cohort: Cohort, fed: Federation):
        outcome = super().round(state, cohort, fed)
        own = {"models": float(outcome.state.bank.num_rows)} if outcome.metrics else {}
        return replace(outcome, metrics=outcome.metrics | own)


@dataclass(frozen=True)
class WatchedLate(Flhc):
    """One that returns a metric of its own in round 3 alone."""

    def round(self, state: FlhcState, cohort: Cohort, fed: Federation):
        outcome = super().round(state, cohort, fed)
        own = {"late": 1.0} if cohort.t == 3 else {}
        return replace(outcome, metrics=outcome.metrics | own)


@pytest.mark.parametrize(
    ("name", "metric", "rounds_before"),
    [
        pytest.param("Watched", "models", 0, marks=pytest.mark.long),
        ("WatchedLate", "late", 2),
    ],
)
def test_rows_of_an_algorithm_with_metrics_of_its_own_run_whole(
    tmp_path, name, metric, rounds_before
) -> None:
    """Neither FedAvg's prefix nor what is kept of groups has such metrics."""
    algorithm = {"name": f"{__name__}:{name}", "rounds_before": rounds_before}
    varied = {THRESHOLD: {"between_merges": 2}}
    space = space_of({"algorithm": algorithm, "rounds": 3}, varied)
    states = swept(space, tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert len({state.run for state in states}) == 2
    assert all(state.groups == [] for state in states)
    for state in states:
        found = result_of(state, tmp_path / "sweep").rounds[metric].notna()
        assert found.all() if name == "Watched" else found.tolist() == [False, False, True]
    assert list((tmp_path / "sweep" / "runs").iterdir()) != []
    assert not any((tmp_path / "sweep" / "parts").iterdir())


def test_a_row_that_runs_whole_goes_on_so_when_it_was_cut_short(tmp_path, monkeypatch) -> None:
    """Its metric shows in round 3, after which it began anew and was stopped in round 2.

    It goes on with the threshold that its tree gave, and does not look for it again.
    """
    algorithm = {"name": f"{__name__}:WatchedLate", "rounds_before": 2}
    varied = {THRESHOLD: {"between_merges": 2}}
    space = space_of({"algorithm": algorithm, "rounds": 4}, varied)
    row = expand(space)[0]
    context = context_of(space, tmp_path / "sweep")
    run_whole = Trial._run_whole

    def run_late(trial: Trial) -> None:
        trial.on_round = lambda each: context.cache.wish.touch() if each["round"] == 2 else None
        run_whole(trial)

    with monkeypatch.context() as patched:
        patched.setattr(Trial, "_run_whole", run_late)
        stopped = run_row(row, context)
    assert stopped.status == "unfinished"
    assert stopped.overrides[THRESHOLD] != STAND_IN
    assert len(RunDirectory(tmp_path / "sweep" / run_path(0)).rows()) == 2
    context.cache.wish.unlink()
    monkeypatch.setattr(Trial, "_run_branch", lambda _: pytest.fail("branched again"))
    ended = run_row(row, context)
    assert ended.overrides == stopped.overrides
    assert_rows_equal_naive_runs([ended], tmp_path / "sweep")


def test_a_cluster_is_trained_by_the_first_row_that_has_it(tmp_path) -> None:
    """Cuts of one tree: the groups of a row are all its clients, and none is trained twice."""
    space = space_of(FLHC_1 | {"rounds": 3}, {THRESHOLD: {"between_merges": 5}})
    states = swept(space, tmp_path)
    named = [key for state in states for key in state.groups]
    assert len(named) > len(set(named)) == len(costs(tmp_path, KIND))
    entries = {key: tmp_path / "cache" / KIND / key / "models.parquet" for key in set(named)}
    for state in states:
        who = [i for key in state.groups for i in pd.read_parquet(entries[key])["client"]]
        assert sorted(who) == list(range(6))


def put_together_and_fail(assembly: Assembly, tables) -> None:
    PUT_TOGETHER(assembly, tables)
    raise RuntimeError("killed")


PUT_TOGETHER = Assembly.put_together


def test_a_run_that_was_cut_short_goes_on_to_the_same_numbers(tmp_path, monkeypatch) -> None:
    """While it trains a part of its clients, and while it is put together."""
    space = space_of(FLHC_1 | {"rounds": 4}, {THRESHOLD: [1e9, 0.0]})
    first, row = expand(space)
    context = context_of(space, tmp_path / "sweep")
    run_row(first, context)
    late = replace(context, cache=replace(context.cache, deadline=1.0))
    clock = iter([0.0, 0.0, 0.0, 2.0])
    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "time", lambda: next(clock, 2.0))
        assert run_row(row, late).status == "unfinished"
    (part,) = (tmp_path / "sweep" / "parts").glob("*/*")
    assert 1 < len(RunDirectory(part).rows()) < 4
    with monkeypatch.context() as patched:
        patched.setattr(Assembly, "put_together", put_together_and_fail)
        assert "killed" in run_row(row, context).error
    assert RunDirectory(part).summary() is not None
    state = run_row(row, context_of(space, tmp_path / "sweep"))
    assert_rows_equal_naive_runs([state], tmp_path / "sweep")
    assert state.status == "done"


@pytest.mark.parametrize("score", [pytest.param("accuracy", marks=pytest.mark.long), "perplexity"])
def test_rows_are_put_together_with_every_protocol_of_their_evaluation(score, tmp_path) -> None:
    evaluate = {"on": "global", "fine_tune": {"epochs": 1}, "scores": [score]}
    space = space_of(FLHC_1 | {"rounds": 3, "evaluate": evaluate}, {THRESHOLD: [1e9, 0.0]})
    states = swept(space, tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    found = result_of(states[1], tmp_path / "sweep")
    assert found.rounds["client_steps_evaluation"].nunique() == 1  # of everybody, in each round
    assert set(found.clients["part"]) >= {"global", "tuned_test", "tuned_global"}
    assert {f"tuned_{score}_mean", f"global_{score}_mean"} <= set(found.summary)


def test_rows_that_differ_in_their_cohorts_have_blocks_of_their_own(tmp_path) -> None:
    """Half of six clients a round are blocks of 3, all of them blocks of 6."""
    varied = {"participation": [0.5, 1.0], THRESHOLD: [1e9]}
    states = swept(space_of(FLHC_1 | {"rounds": 3}, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    blocks = [result_of(state, tmp_path / "sweep").summary["block"] for state in states]
    assert blocks == [3, 6]


def test_groups_that_attract_each_other_do_so_from_the_round_after_the_clustering(tmp_path) -> None:
    """Groups start from models of their founders, which differ in the round of the clustering."""
    algorithm = {"name": "flexcfl", "rounds_before": 1, "eta_g": 0.5}
    varied = {"algorithm.clustering.partition.number": [2, 3]}
    states = swept(space_of({"algorithm": algorithm, "rounds": 2}, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")


@pytest.mark.parametrize("rounds_before", [1, 2])
def test_rows_judged_by_the_models_that_clients_trained_last(rounds_before, tmp_path) -> None:
    """A clustering after round 1 or 2: what clients train there, or have before, is scored too."""
    algorithm = {"name": "flhc", "rounds_before": rounds_before}
    experiment = {"algorithm": algorithm, "rounds": 3, "evaluate": {"last_trained": True}}
    states = swept(space_of(experiment, {THRESHOLD: [0.0, 1e9]}), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")


def test_rows_that_place_clients_later_differ_in_how_they_place_them(tmp_path) -> None:
    """Founders are clustered alike; the others go where another distance sends them."""
    algorithm = {"name": "flexcfl", "founders": 3, "recluster": {"when": "once"}}
    experiment = {"algorithm": algorithm, "rounds": 3, "seed": 2}
    states = swept(space_of(experiment, {DISTANCE: ["cosine", "l2"]}), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert len({sha(result_of(state, tmp_path / "sweep")) for state in states}) == 2


def test_rows_with_one_cluster_keep_the_numbers_of_their_own_signatures(tmp_path) -> None:
    """Updates and weights cost the same and give one state, but correlate with labels otherwise."""
    experiment = FLHC_1 | {"rounds": 2, "evaluate": {"similarity": True}}
    varied = {SIGNATURE: ["update", "weights"], THRESHOLD: [1e8, 1e9]}
    states = swept(space_of(experiment, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    assert len({state.run for state in states}) == 2
    assert len(costs(tmp_path / "sweep", KIND)) == 1


def test_a_row_whose_clusters_overlap_is_marked_whoever_has_its_models(tmp_path) -> None:
    """Everybody hears everybody: rows of the relation, or one cluster of it."""
    varied = {"algorithm.clustering.partition": ["components", "rows"]}
    experiment = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 2}
    experiment["algorithm"]["clustering"] = {"relate": {"name": "threshold", "gamma": 1e9}}
    states = swept(space_of(experiment, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")
    found = [result_of(state, tmp_path / "sweep").summary for state in states]
    assert ["clusters_overlap" in summary for summary in found] == [False, True]


@dataclass(frozen=True)
class Turned:
    """An embedding that every other seed turns inside out."""

    def __call__(self, points: Points, seed: int) -> Points:
        values = 1 / points.values if seed % 2 else points.values
        return Points(points.clients, values, points.owner)


def test_an_embedding_of_metadata_is_that_of_its_own_seed(tmp_path) -> None:
    table = tmp_path / "clients.csv"
    table.write_text("size\n1\n2\n4\n8\n16\n32\n")
    clustering = {"signature": {"name": "metadata", "file": str(table)}}
    clustering |= {"embed": f"{__name__}:Turned", "partition": {"number": 2}}
    experiment = {"algorithm": {"name": "flhc", "rounds_before": 1, "clustering": clustering}}
    space = space_of({**experiment, "rounds": 1}, {"seed": [0, 1]})
    states = swept(space, tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")


@pytest.mark.gpu
def test_rows_on_a_gpu_are_the_runs_they_stand_for(tmp_path) -> None:
    """A trial asks for its federation before a host has moved the module to the device."""
    experiment = FLHC_1 | {"rounds": 3, "aggregate": {"unheard": "stale"}}
    varied = {LINKAGE: "complete", THRESHOLD: {"between_merges": 3}}
    states = swept(space_of(experiment, varied), tmp_path / "sweep")
    assert_rows_equal_naive_runs(states, tmp_path / "sweep")


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_rows_of_equal_data_train_on_one_host(tmp_path, monkeypatch, engine) -> None:
    """The host trains a copy of the module, or the second row would begin where the first ended."""
    varied = {"algorithm": [{"name": "fedprox", "mu": 0.1}, "local", "fedavg"], "rounds": [1, 2]}
    space = space_of({"execution": {"engine": engine}}, varied)
    started = []
    start = process_module.start_executor
    monkeypatch.setattr(process_module, "start_executor", lambda p: started.append(p) or start(p))
    process_module._LAST_HOST.clear()
    hashes = [
        result_of(state, tmp_path).summary["params_sha256"] for state in swept(space, tmp_path)
    ]
    assert len(started) == 1
    alone = [
        run_experiment(parse_experiment(row.plain), tmp_path / f"alone{row.number}")
        for row in expand(space)
    ]
    assert hashes == [result.summary["params_sha256"] for result in alone]
    assert len(set(hashes)) == len(hashes)  # they trained, each in its way


def test_rows_begin_with_one_of_each_prefix_and_go_on_prefix_by_prefix(tmp_path) -> None:
    """Seeds have prefixes of their own; FedProx trains none, and waits for its turn."""
    methods = {"fedprox": {"algorithm": "fedprox"}, "flhc": FLHC_1, "local": {"algorithm": "local"}}
    space = space_of({}, {"seed": [0, 1]}, methods=methods)
    ordered = _in_order(expand(space), context_of(space, tmp_path))
    names = [(row.plain["algorithm"]["name"], row.plain["seed"]) for row in ordered]
    of_seeds = [[("fedprox", seed), ("local", seed)] for seed in (0, 1)]
    assert names == [("flhc", 0), ("flhc", 1), *of_seeds[0], *of_seeds[1]]
