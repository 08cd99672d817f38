"""The tree: what is computed once, and that nothing of a row shows it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flray.algorithms.flhc import Flhc, FlhcState
from flray.clustering.points import Partition
from flray.clustering.related import Related
from flray.config.build import Result, run_experiment
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.models.bank import squared_changes
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.records.strands import Strands
from flray.sweep.driver import Watch, _Sweep
from flray.sweep.growth import branches, grow, row_folder
from flray.sweep.rows import expand
from flray.sweep.space import THRESHOLD, parse_space
from flray.sweep.strands import Weaver
from flray.sweep.tree import plan, run_path

from scenarios import TINY

DISTANCE = "algorithm.clustering.distance"
LINKAGE = "algorithm.clustering.partition.linkage"
VERSION = {"sources": "of a test"}


def planned(experiment, varied, **more):
    rows = expand(parse_space({"experiment": {**TINY, **experiment}, "space": varied, **more}))
    return plan(rows, VERSION, has_gpu=False)


def grown(tree, folder: Path, shared: bool = True) -> list[dict]:
    """The records of all observations; everything must have gone well."""
    records = []
    for trunk in tree.trunks:
        assert grow(trunk, folder, shared, lambda: False).is_done
        records += branches(trunk, folder)
    assert not any(record["errors"] for record in records)
    return records


def without_seconds(frame):
    return frame[[column for column in frame if not column.startswith("seconds")]]


def assert_same_run(found, naive) -> None:
    """Everything recorded is equal to the last bit, but for what the clock said."""
    assert {k: v for k, v in found.summary.items() if k != "seconds"} == {
        k: v for k, v in naive.summary.items() if k != "seconds"
    }
    pd.testing.assert_frame_equal(
        without_seconds(found.rounds), without_seconds(naive.rounds), check_exact=True
    )
    pd.testing.assert_frame_equal(found.clients, naive.clients, check_exact=True)


def finished(row, folder: Path, weaver: Weaver | None = None) -> Result:
    """The run of a row, brought to its end: all that train its clients, then put together."""
    run = folder / run_path(row["run"])
    for trainer in {run, *(folder / run_path(key) for key in row["sources"])}:
        held = parse_experiment(RunDirectory(trainer).config())
        if not Strands(trainer).is_finished():
            run_experiment(held, trainer, resume=True)
    if row["sources"] and RunDirectory(run).summary() is None:
        sources = {folder / run_path(key): np.array(who) for key, who in row["sources"].items()}
        (weaver or Weaver()).weave(RunDirectory(run), sources)
        (run / "summary.json").unlink()  # as if it had been cut short
        (weaver or Weaver()).weave(RunDirectory(run), sources)
    held = parse_experiment(RunDirectory(run).config())
    return run_experiment(held, run, resume=True)


def assert_rows_equal_naive_runs(records, folder: Path, tmp_path: Path) -> None:
    for record in records:
        for number, row in record["rows"].items():
            run = folder / run_path(row["run"])
            naive = run_experiment(parse_experiment(row["plain"]), tmp_path / "naive" / number)
            assert_same_run(finished(row, folder), naive)
            own = run if row["own"] else folder / row_folder(int(number))
            found, expected = read_clusterings(own), read_clusterings(naive.path)
            assert list(found) == list(expected) != []
            for t, clustering in expected.items():
                for name, array in vars(clustering).items():
                    same = getattr(found[t], name)
                    assert (array is None) == (same is None)
                    assert array is None or (array == same).all(), name


def test_rows_of_one_trunk_by_hand() -> None:
    """2 seeds are 2 trunks; on each 2 rounds to cluster after, so 2 observations of 4 rows.

    FedAvg is a run of its own for each seed, and the trunk is that run.
    """
    varied = {"algorithm.rounds_before": [1, 2], THRESHOLD: [0.5, 1, 2, 4], "seed": [0, 1]}
    tree = planned({"algorithm": "flhc"}, varied, baseline={"algorithm": "fedavg"})
    assert len(tree.trunks) == 2
    for trunk in tree.trunks:
        assert [(each.round, len(each.rows)) for each in trunk.observations] == [(1, 4), (2, 4)]
        assert trunk.last_round == 2
        assert trunk.rounds_kept == {1, 2}
    assert [run.path for run in tree.runs] == [trunk.run for trunk in tree.trunks]
    assert len(tree.run_of) == 2
    alone = planned({"algorithm": "flhc"}, varied)
    assert [trunk.run for trunk in alone.trunks] == [f"trunks/{t.key}/run" for t in alone.trunks]


def test_whatever_changes_the_trunk_is_another_trunk() -> None:
    for key, values, trunks in (
        ("train.lr", [0.1, 0.2], 2),
        ("participation", [0.5, 1.0], 2),
        ("execution.block", [2, 3], 2),
        ("rounds", [4, 5], 1),
        ("execution.actors.count", [1, 2], 1),
        ("algorithm.clustering.signature", ["update", "weights"], 1),
    ):
        tree = planned({"algorithm": "flhc"}, {key: values, "algorithm.rounds_before": 2})
        assert len(tree.trunks) == trunks, key


def test_a_clustering_that_never_comes_is_a_run_of_its_own() -> None:
    tree = planned({"algorithm": "flhc"}, {"algorithm.rounds_before": [3, 4, 5]})
    assert [each.round for each in tree.trunks[0].observations] == [3, 4]
    assert len(tree.runs) == 1


def test_other_code_has_other_names() -> None:
    flhc = {**TINY, "algorithm": {"name": "flhc", "rounds_before": 1}}
    rows = expand(parse_space({"experiment": flhc, "space": {}}))
    keys = {
        plan(rows, version, gpu).trunks[0].key
        for version, gpu in ((VERSION, False), ({"sources": "newer"}, False), (VERSION, True))
    }
    assert len(keys) == 3


def test_stages_are_computed_once(tmp_path) -> None:
    """3 metrics by 2 linkages are 3 distances and 6 trees, however many thresholds."""
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}}
    varied = {
        DISTANCE: ["l1", "l2", "cosine"],
        LINKAGE: ["single", "complete"],
        THRESHOLD: {"between_merges": 3},
    }
    (record,) = grown(planned(flhc, varied), tmp_path)
    assert (record["distances"], record["trees"], len(record["rows"])) == (3, 6, 18)
    # The highest merge leaves one cluster, whatever the metric and the linkage.
    last = [row["run"] for row in list(record["rows"].values())[2::3]]
    assert len(set(last)) == 1
    assert 1 < len({row["run"] for row in record["rows"].values()}) < 18
    assert record["client_steps"] > 0


EVERY_ROUND = {
    "algorithm.rounds_before": 2,
    LINKAGE: ["complete", "ward"],
    THRESHOLD: {"between_merges": 4},
}
AT_THE_ENDS = {"algorithm.rounds_before": [1, 3], THRESHOLD: {"linspace": [0.2, 1.2, 5]}}


@pytest.mark.parametrize(("every", "varied"), [(1, EVERY_ROUND), (3, AT_THE_ENDS)])
def test_flhc_rows_are_the_runs_they_stand_for(tmp_path, every, varied) -> None:
    """Clustering after the first, a middle and the last round, rounds evaluated or not."""
    experiment = {"algorithm": "flhc", "rounds": 3, "evaluate": {"every": every, "target": 0.2}}
    tree = planned(experiment, varied)
    records = grown(tree, tmp_path / "sweep")
    assert_rows_equal_naive_runs(records, tmp_path / "sweep", tmp_path)
    assert len(list((tmp_path / "sweep" / "runs").iterdir())) < len(tree.trunks[0].rows)
    hashes = {RunDirectory(p).summary()["params_sha256"] for p in (tmp_path / "naive").iterdir()}
    assert len(hashes) > 2


def test_who_is_not_clustered_is_placed_as_in_the_run_itself(tmp_path) -> None:
    """A holdout client and one who joins later: the metric decides where they go."""
    joins = [{"round": 3, "kind": "join", "clients": [5]}]
    split = {**TINY["split"], "holdout": 1}
    experiment = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 3}
    experiment |= {"events": joins, "split": split}
    varied = {DISTANCE: ["l1", "l2"], LINKAGE: "complete", THRESHOLD: {"between_merges": 2}}
    records = grown(planned(experiment, varied), tmp_path / "sweep")
    assert len({row["run"] for row in records[0]["rows"].values()}) == 4
    assert_rows_equal_naive_runs(records, tmp_path / "sweep", tmp_path)


def test_flt_rows_are_the_runs_they_stand_for(tmp_path) -> None:
    """Clustering before the first round: what it cost is in the first row."""
    clustering = {"signature": {"name": "pca_centres", "components": 4, "k": 2}, "embed": "none"}
    experiment = {"algorithm": {"name": "flt", "clustering": clustering}, "rounds": 2}
    experiment["split"] = {"name": "label_swap", "clients": 8, "groups": 4}  # planted
    varied = {
        "algorithm.dynamic.every": [None, 1],
        "algorithm.case": ["rows", "clusters"],
        "algorithm.clustering.relate.gamma": {"logspace": [0.01, 100, 4]},
    }
    tree = planned(experiment, varied)
    records = grown(tree, tmp_path / "sweep")
    assert [(each.round, len(each.rows)) for each in tree.trunks[0].observations] == [(0, 16)]
    assert_rows_equal_naive_runs(records, tmp_path / "sweep", tmp_path)
    runs = [row["run"] for row in records[0]["rows"].values()]
    first = RunDirectory(tmp_path / "sweep" / run_path(runs[0])).rows()[0]
    assert {"clustering_clusters", "clustering_ari", "bytes_up_signature"} <= set(first)
    assert runs[3] == runs[7]  # everybody hears everybody, by rows or by clusters
    assert 1 < len(set(runs[:8])) < 8
    assert len(set(runs[8:])) == 8  # who clusters again will need to know


@pytest.mark.parametrize("rounds_before", [0, 1])
def test_only_rows_that_read_ground_truth_are_marked(tmp_path, rounds_before) -> None:
    """Label counts find one cluster, as a high threshold does: one state, but only one has read."""
    partitions = [
        {"name": "hierarchical", "threshold": 1e9},
        {"name": "label_counts"},
        {"name": "hierarchical", "threshold": 1e8},
        {"name": "hierarchical", "threshold": 0.0},
    ]
    experiment = {"algorithm": {"name": "flhc", "rounds_before": rounds_before}, "rounds": 3}
    experiment |= {"uses_ground_truth": True, "split": {"name": "iid", "clients": 3}}
    records = grown(
        planned(experiment, {"algorithm.clustering.partition": partitions}), tmp_path / "sweep"
    )
    assert_rows_equal_naive_runs(records, tmp_path / "sweep", tmp_path)
    rows = [records[0]["rows"][str(k)] for k in range(4)]
    first, counts, high, _ = (row["run"] for row in rows)
    assert first == high != counts
    assert records[0]["strands"] == 1 + 3  # nothing is trained twice for that
    directories = [RunDirectory(tmp_path / "sweep" / run_path(row["run"])) for row in rows]
    assert [each.summary()["uses_ground_truth"] for each in directories] == [
        *(False, True, False, False)
    ]
    assert len({each.summary()["params_sha256"] for each in directories}) == 2


def test_a_row_that_fails_leaves_no_mark_on_the_next(tmp_path) -> None:
    """The first reads ground truth, then fails."""
    experiment = {"algorithm": {"name": "flhc", "rounds_before": 1}, "uses_ground_truth": True}
    partitions = [f"{__name__}:Careless", {"name": "hierarchical", "threshold": 1.0}]
    tree = planned(experiment, {"algorithm.clustering.partition": partitions})
    assert grow(tree.trunks[0], tmp_path, True, lambda: False).is_done
    (record,) = branches(tree.trunks[0], tmp_path)
    assert list(record["errors"]) == ["0"]
    assert finished(record["rows"]["1"], tmp_path).summary["uses_ground_truth"] is False


@dataclass(frozen=True)
class Careless:
    """Looks at labels and stumbles."""

    def __call__(self, related: Related) -> Partition:
        raise ValueError(f"{related.label_counts().sum()} labels")


def test_growth_that_was_cut_short_goes_on(tmp_path) -> None:
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 3}}
    tree = planned(flhc, {THRESHOLD: [0.0, 1e9]})
    (trunk,) = tree.trunks
    assert not grow(trunk, tmp_path / "cut", True, lambda: True).is_done
    assert len(RunDirectory(tmp_path / "cut" / trunk.run).rows()) == 1
    assert branches(trunk, tmp_path / "cut") == []
    at_once, cut = grown(tree, tmp_path / "whole"), grown(tree, tmp_path / "cut")
    assert at_once == cut
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").rglob("*.json")}
    assert grown(tree, tmp_path / "cut") == cut
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").rglob("*.json")}


def test_without_sharing_every_row_has_its_own_run(tmp_path) -> None:
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}}
    (record,) = grown(planned(flhc, {THRESHOLD: [1e8, 1e9]}), tmp_path, shared=False)
    assert len({row["run"] for row in record["rows"].values()}) == 2


def test_a_clustering_that_fails_is_told_of_its_row_alone(tmp_path) -> None:
    partitions = [{"name": "kmeans", "number": 99}, {"name": "kmeans", "number": 2}]
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}}
    tree = planned(flhc, {"algorithm.clustering.partition": partitions})
    assert grow(tree.trunks[0], tmp_path, True, lambda: False).is_done
    (record,) = branches(tree.trunks[0], tmp_path)
    assert list(record["rows"]) == ["1"]
    assert "number must be at most the number of clients, 6, got 99" in record["errors"]["0"]


def test_a_trunk_that_fails_is_told_of_all_its_rows(tmp_path) -> None:
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}, "train": {"lr": 1e30}}
    tree = planned(flhc, {THRESHOLD: [1.0, 2.0]})
    growth = grow(tree.trunks[0], tmp_path, True, lambda: False)
    assert sorted(growth.errors) == [0, 1]
    assert "NaN or infinite; lower train.lr" in growth.errors[0]


NOT_APART = {
    "a client that never trains": {"split": {**TINY["split"], "holdout": 1}},
    "a client that joins": {"events": [{"round": 3, "kind": "join", "clients": [5]}]},
    "clients that may be dropped": {"on_client_failure": "drop"},
}


@pytest.mark.parametrize("more", NOT_APART.values(), ids=NOT_APART)
def test_rows_are_not_taken_apart_where_clients_come_and_go(tmp_path, more) -> None:
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 3}
    varied = {THRESHOLD: {"between_merges": 3}}
    (whole,) = grown(planned({**flhc, **more}, varied), tmp_path / "whole")
    (apart,) = grown(planned(flhc, varied), tmp_path / "apart")
    assert all(row["sources"] == {} for row in whole["rows"].values())
    assert all(row["sources"] != {} for row in apart["rows"].values())


@dataclass(frozen=True)
class Watched(Flhc):
    """FL+HC whose rounds also return how far the models of all clients have moved."""

    def round(self, state: FlhcState, cohort: Cohort, fed: Federation):
        outcome = super().round(state, cohort, fed)
        moved = squared_changes(outcome.state.bank, state.bank)
        own = {"largest_move": float(moved.max())} if outcome.metrics else {}
        return replace(outcome, metrics=outcome.metrics | own)


@dataclass(frozen=True)
class WatchedLate(Flhc):
    """One that returns a metric of its own in round 3 alone."""

    def round(self, state: FlhcState, cohort: Cohort, fed: Federation):
        outcome = super().round(state, cohort, fed)
        own = {"late": 1.0} if cohort.t == 3 else {}
        return replace(outcome, metrics=outcome.metrics | own)


@pytest.mark.parametrize("rounds_before", [0, 2])
def test_rows_of_an_algorithm_with_metrics_of_its_own_run_whole(tmp_path, rounds_before) -> None:
    """Neither FedAvg's trunk nor what is kept of strands has such metrics."""
    watched = {"name": f"{__name__}:Watched", "rounds_before": rounds_before}
    space = {
        "experiment": {**TINY, "algorithm": watched, "rounds": 3},
        "space": {THRESHOLD: {"between_merges": 3}},
    }
    rows = expand(parse_space(space))
    tree = plan(rows, VERSION, has_gpu=False)
    records = grown(tree, tmp_path / "sweep")
    assert_rows_equal_naive_runs(records, tmp_path / "sweep", tmp_path)
    found = list(records[0]["rows"].values())
    assert len({row["run"] for row in found}) == 3
    assert all(row["sources"] == {} for row in found)
    runs = [RunDirectory(tmp_path / "sweep" / run_path(row["run"])) for row in found]
    assert all(run.rounds()["largest_move"].notna().all() for run in runs)
    # What was trained is counted: the trunk, the clients' signatures, and every row from its start.
    sweep = _Sweep(parse_space(space), tmp_path / "sweep", rows, tree, {}, 0.0, Watch(), None)
    trunk = RunDirectory(tmp_path / "sweep" / tree.trunks[0].run)
    steps = int(trunk.rounds()["client_steps"].sum()) if rounds_before else 0
    steps += records[0]["client_steps"] + sum(run.summary()["client_steps"] for run in runs)
    assert sweep._steps_of_trunk(tree.trunks[0]) == steps


def test_a_metric_that_comes_too_late_to_be_known_is_not_lost_silently(tmp_path) -> None:
    late = {"algorithm": {"name": f"{__name__}:WatchedLate", "rounds_before": 1}, "rounds": 3}
    (record,) = grown(planned(late, {THRESHOLD: {"between_merges": 2}}), tmp_path)
    row = record["rows"]["0"]
    assert row["sources"] != {}
    with pytest.raises(ExperimentError, match="round 3 returned the metric 'late'"):
        finished(row, tmp_path)


def test_a_cluster_is_trained_by_the_first_row_that_has_it(tmp_path) -> None:
    """Cuts of one tree: every client of a row has one run that trains it, and no cluster two."""
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 3}
    (record,) = grown(planned(flhc, {THRESHOLD: {"between_merges": 5}}), tmp_path)
    rows = record["rows"].values()
    assert record["strands"] < sum(row["strands"] for row in rows)
    trained = {row["run"]: Strands(tmp_path / run_path(row["run"])).only() for row in rows}
    assert sum(map(len, trained.values())) < len(trained) * 6
    for row in rows:
        clients = sorted(i for who in row["sources"].values() for i in who)
        assert clients == list(range(6))
        for run, who in row["sources"].items():
            assert set(who) <= set(trained[run].tolist())


def test_a_run_of_strands_that_was_cut_short_goes_on_to_the_same_numbers(tmp_path) -> None:
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 4}
    (record,) = grown(planned(flhc, {THRESHOLD: {"between_merges": 3}}), tmp_path)
    row = list(record["rows"].values())[1]
    trainers = [tmp_path / run_path(key) for key in row["sources"]]
    assert len(trainers) > 1
    for trainer in trainers:
        held = parse_experiment(RunDirectory(trainer).config())
        run_experiment(held, trainer, resume=True, should_stop=lambda: True)
        assert not Strands(trainer).is_finished()
        assert max(Strands(trainer).rounds()) == 2
    naive = run_experiment(parse_experiment(row["plain"]), tmp_path / "naive")
    assert_same_run(finished(row, tmp_path), naive)


def test_rows_are_put_together_with_every_protocol_of_their_evaluation(tmp_path) -> None:
    evaluate = {"on": "global", "fine_tune": {"epochs": 1}}
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 3, "evaluate": evaluate}
    records = grown(planned(flhc, {THRESHOLD: {"between_merges": 3}}), tmp_path / "sweep")
    assert any(len(row["sources"]) > 1 for row in records[0]["rows"].values())
    assert_rows_equal_naive_runs(records, tmp_path / "sweep", tmp_path)
    row = next(iter(records[0]["rows"].values()))
    found = RunDirectory(tmp_path / "sweep" / run_path(row["run"]))
    assert found.rounds()["client_steps_evaluation"].nunique() == 1  # of everybody, in each round
    assert set(found.clients()["part"]) >= {"global", "tuned_test", "tuned_global"}
    assert {"tuned_accuracy_mean", "global_accuracy_mean"} <= set(found.summary())


def test_one_weaver_serves_trunks_that_differ_in_their_cohorts(tmp_path) -> None:
    """Half of six clients a round are blocks of 3, all of them blocks of 6."""
    flhc = {"algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 2}
    varied = {"participation": [0.5, 1.0], THRESHOLD: {"between_merges": 2}}
    weaver, blocks = Weaver(), []
    for record in grown(planned(flhc, varied), tmp_path):
        for number, row in record["rows"].items():
            naive = run_experiment(parse_experiment(row["plain"]), tmp_path / "naive" / number)
            assert_same_run(finished(row, tmp_path, weaver), naive)
            blocks.append(naive.summary["block"])
    assert blocks == [3, 3, 6, 6]
