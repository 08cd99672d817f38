"""Clustering as an event: when it happens, what becomes of clusters, and drift in between."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flray.algorithms.feddrift import (
    FedDrift,
    FedDriftState,
    merged,
    merges,
    model_distances,
    strengths,
)
from flray.algorithms.flhc import Flhc
from flray.algorithms.recluster import Recluster, least_cosine
from flray.algorithms.regrouping import Regrouping, matched, regrouped_bank
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.partitions import KMeans
from flray.clustering.pipeline import Pipeline
from flray.clustering.points import Points
from flray.clustering.two_level import TwoLevel
from flray.config.experiment import parse_experiment
from flray.data.events import Event, make_timeline
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.execution.executor import Inline
from flray.execution.federation import Cohort
from flray.models.bank import ModelBank
from flray.models.mixing import Aggregation
from flray.randomness import generator
from flray.records.checkpoint import CheckpointStore
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.sweeps.branching import branches

from linear import START, linear_federation, local_sgd, vector
from scenarios import sha, some_long, state_of, tiny_experiment

DIGITS = [
    "dataset={name: digits, size: 8}",
    "split={name: label_swap, clients: 12, groups: 2}",
    "model=mlp200",
    "train={lr: 0.2, epochs: 3, batch_size: 20}",
    "participation=1",
]
FLHC = "algorithm={name: flhc, rounds_before: 2, clustering: {partition: {threshold: 1.5}}%s}"
# Half of the first of two groups has other labels from round 6 on: three groups.
DRIFT = "events=[{round: 6, kind: relabel, clients: [0, 1, 2], labels: [[4, 5], [6, 7], [8, 9]]}]"
WHENS = ("once", "every", "on_drift", "auto")
SMALL = {"dataset": "digits", "split": {"name": "iid", "clients": 4}, "model": "mlp200"}
SMALL |= {"rounds": 3}


def aris(result) -> list[float]:
    return result.rounds["ari"].tolist()


class TestDrift:
    @pytest.mark.parametrize("then", some_long(["anew", "split"], ["split"]))
    def test_clients_are_clustered_again_once_their_losses_jump(self, tiny_run, then) -> None:
        again = f", recluster: {{when: on_drift, then: {then}}}"
        result = tiny_run(*DIGITS, DRIFT, FLHC % again, "rounds=6")
        assert aris(result) == [0, 1, 1, 1, 1, 1]
        assert result.rounds["clusters"].tolist() == [1, 2, 2, 2, 2, 3]
        assert list(read_clusterings(result.path)) == [2, 6]  # evidence of each
        assert result.rounds["clustering_ari"].dropna().tolist() == [1, 1]

    def test_clusters_found_once_stay(self, tiny_run) -> None:
        result = tiny_run(*DIGITS, DRIFT, FLHC % "", "rounds=6")
        assert aris(result)[4] == 1
        assert aris(result)[5] < 0.8

    def test_a_client_that_changed_moves(self, tiny_run) -> None:
        """Clients 0 and 11, of different groups, exchange their data and say so."""
        exchange = "events=[{round: 4, kind: exchange, clients: [0, 11]}]"
        moves = "recluster: {when: on_drift, then: move, drift_by: events}"
        common = [*DIGITS, exchange, "rounds=5"]
        assert aris(tiny_run(*common, FLHC % f", {moves}"))[3:] == [1, 1]
        assert aris(tiny_run(*common, FLHC % ""))[3] < 0.8
        flexcfl = (
            "algorithm={name: flexcfl, clustering: {embed: {number: 2}, partition: {number: 2}}}"
        )
        assert aris(tiny_run(*common, flexcfl)) == [1] * 5

    def test_newcomers_and_clients_that_leave(self, tiny_run) -> None:
        """Client 3 leaves before the drift and is back after it, client 11 comes for the first
        time in the round of the drift."""
        events = DRIFT[:-1] + ", {round: 4, kind: leave, clients: [3]}, "
        events += "{round: 7, kind: join, clients: [3]}, {round: 6, kind: join, clients: [11]}]"
        result = tiny_run(*DIGITS, events, FLHC % ", recluster: {when: on_drift}", "rounds=7")
        assert aris(result)[-1] == 1
        assert result.rounds["cohort_size"].tolist() == [11, 11, 11, 10, 10, 10, 12]


class TestEvery:
    def test_with_the_same_clusters_changes_no_bit(self, tiny_run) -> None:
        flhc = "{name: flhc, rounds_before: 1, clustering: {partition: {threshold: 0.8}}%s}"
        again = ", recluster: {when: every, every: 1, then: %s}"
        groups = ["split={name: label_groups, clients: 8, groups: 2}", "rounds=3"]
        once = tiny_run(*groups, f"algorithm={flhc % ''}")
        assert once.summary["clusters"] == 2
        for then in ("anew", "split", "merge", "move"):
            often = tiny_run(*groups, f"algorithm={flhc % (again % then)}")
            assert sha(often) == sha(once), then
            assert list(read_clusterings(often.path)) == [1, 2, 3]

    def test_until_a_round(self) -> None:
        due = [
            Recluster(when="every", every=2, until=7).is_due(None, t - 1, t) for t in range(2, 12)
        ]
        assert [t for t, is_due in enumerate(due, start=2) if is_due] == [3, 5, 7]


class TestAuto:
    AUTO = ", recluster: {when: auto%s}"

    def test_clusters_when_updates_have_stopped_turning(self, tiny_run) -> None:
        """For the first time in round 2, which has the first cosine, and after the drift of round 6
        once the cluster that it turned goes straight on."""
        flhc = FLHC.replace("rounds_before: 2", "rounds_before: 1") % (self.AUTO % "")
        result = tiny_run(*DIGITS, DRIFT, flhc, "rounds=8")
        assert list(read_clusterings(result.path)) == [2, 7]
        assert aris(result)[1:5] == [1] * 4
        assert aris(result)[5] < 0.8
        assert aris(result)[6:] == [1, 1]
        assert (result.rounds["bytes_up_signature"] > 0).tolist() == [
            t in (2, 7) for t in range(1, 9)
        ]

    def test_that_never_sees_a_turn_clusters_once(self, tiny_run) -> None:
        """All cosines are at least -1: a clustering in round 2, and no other."""
        flhc = FLHC.replace("rounds_before: 2", "rounds_before: 1") % (self.AUTO % ", steady: -1")
        once = tiny_run(*DIGITS, FLHC % "", "rounds=4")
        assert sha(tiny_run(*DIGITS, flhc, "rounds=4")) == sha(once)
        assert once.summary["clusters"] == 2

    def test_that_always_sees_a_turn_is_fedavg(self, tiny_run) -> None:
        flhc = FLHC % (self.AUTO % ", steady: 1")
        fedavg = tiny_run(*DIGITS, "algorithm=fedavg", "rounds=3")
        assert sha(tiny_run(*DIGITS, flhc, "rounds=3")) == sha(fedavg)

    @pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.long), 6])
    def test_resumes_to_the_same_bits(self, tiny_run, tmp_path, stop) -> None:
        auto = [FLHC % (self.AUTO % ""), *DIGITS, DRIFT, "rounds=7"]
        whole, seen = tiny_run(*auto), []
        out = tmp_path / "stopped"
        tiny_run(*auto, out=out, on_round=seen.append, should_stop=lambda: len(seen) >= stop)
        assert sha(tiny_run(*auto, out=out, resume=True)) == sha(whole)
        assert list(read_clusterings(whole.path)) == [2, 7]

    def test_its_rows_of_a_sweep_run_alone(self) -> None:
        """The round of their clustering is not known before, so no prefix ends there."""
        rows = [{"name": "flhc", "rounds_before": 1, "recluster": {"when": w}} for w in WHENS]
        experiments = [parse_experiment({**SMALL, "algorithm": row}) for row in rows]
        assert [branches(e) for e in experiments] == [True, True, True, False]

    def test_a_turn_is_told_by_the_cluster_that_turned_most(self) -> None:
        """Cluster 0 turns by a right angle, cluster 1 goes on, cluster 2 was not heard before."""
        before = Points.vectors(np.arange(2), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        now = Points.vectors(np.arange(3), torch.tensor([[0.0, 1.0], [0.0, 9.0], [1.0, 1.0]]))
        assert least_cosine(before, now) == 0
        assert np.isnan(least_cosine(None, now))
        assert np.isnan(least_cosine(before.of(np.array([1])), now.of(np.array([0]))))


class TestSweeps:
    def test_rows_of_a_sweep_share_no_rounds_after_it(self) -> None:
        assert Flhc(recluster=Recluster(when="every")).spent_fields is None
        assert Flhc().spent_fields is not None


PIPELINE = Pipeline()


def regrouped(values, old, then: str, movers=None, pipeline=PIPELINE):
    """Clusters of clients with these points, by default merged up to the distance 1."""
    points = Points.vectors(np.arange(len(values)), torch.tensor(values)[:, None])
    fed = SimpleNamespace(
        seed=0,
        t=1,
        generator=lambda *where: generator(0, *where),
        meter=SimpleNamespace(phase=lambda _: nullcontext()),
    )
    return Regrouping(pipeline, points, np.array(old), fed, movers).after(then)[1].tolist()


class TestRegrouping:
    VALUES = (0.0, 0.1, 5.0, 5.1, 5.2, 9.0)

    def test_anew_keeps_the_numbers_of_old_clusters(self) -> None:
        assert regrouped(self.VALUES, [1, 1, 1, 1, 1, 0], "anew") == [2, 2, 1, 1, 1, 0]

    def test_clients_that_changed_carry_no_number_on(self) -> None:
        """Three of five clients of cluster 0 drifted away: the other two are cluster 0."""
        values, old, drifted = (0.0, 0.1, 5.0, 5.1, 5.2), [0] * 5, np.array([2, 3, 4])
        assert regrouped(values, old, "anew") == [1, 1, 0, 0, 0]
        assert regrouped(values, old, "anew", drifted) == [0, 0, 1, 1, 1]

    def test_split_divides_clusters_and_joins_none(self) -> None:
        """Clients 2 and 3 are near client 4, which is in another cluster."""
        assert regrouped(self.VALUES, [0, 0, 0, 0, 4, 4], "split") == [0, 0, 5, 5, 4, 6]

    def test_merge_joins_clusters_and_divides_none(self) -> None:
        assert regrouped(self.VALUES, [0, 0, 1, 1, 2, 2], "merge") == [0, 0, 1, 1, 2, 2]
        assert regrouped(self.VALUES, [0, 1, 2, 2, 3, 3], "merge") == [0, 0, 2, 2, 3, 3]

    @pytest.mark.parametrize(
        "partition", [Hierarchical(number=2), KMeans(2), TwoLevel(groups=4, number=2)]
    )
    def test_too_few_for_the_number_of_clusters_stay_as_they_are(self, partition) -> None:
        pipeline = Pipeline(partition=partition)
        assert regrouped((0.0, 9.0, 5.0), [0, 0, 1], "split", pipeline=pipeline) == [0, 2, 1]
        assert regrouped((0.0, 9.0, 5.0), [0, 0, 0], "merge", pipeline=pipeline) == [0, 0, 0]

    def test_move_goes_to_the_nearest_mean(self) -> None:
        old = [0, 1, 1, 1, 1, 0]  # means 4.5 and 3.85
        assert regrouped(self.VALUES, old, "move") == [1, 1, 0, 0, 0, 0]
        assert regrouped(self.VALUES, old, "move", np.array([1])) == [0, 0, 1, 1, 1, 0]
        assert regrouped(self.VALUES, [0, 0, 1, 1, 0, 1], "move", np.array([4])) == [
            0,
            0,
            1,
            1,
            1,
            1,
        ]

    def test_clients_without_a_cluster_wait_unless_all_is_found_anew(self) -> None:
        old = [0, -1, 1, 1, 1, 1]
        for then in ("split", "merge", "move"):
            assert regrouped(self.VALUES, old, then)[1] == -1
        assert regrouped(self.VALUES, old, "anew")[1] == 0

    def test_absent_clients_follow_their_cluster(self) -> None:
        """Client 6 sent nothing; its cluster 1 was merged into cluster 0."""
        assert regrouped((0.0, 0.1, 0.2, 9.0), [0, 0, 1, 2, 1], "merge") == [0, 0, 0, 2, 0]


@pytest.mark.parametrize("seed", range(5))
def test_matching_is_the_best_permutation(seed) -> None:
    rng = np.random.default_rng(seed)
    new, old = rng.integers(0, 4, 30), rng.integers(0, 4, 30)
    best = max(np.sum(np.array(p)[new] == old) for p in itertools.permutations(range(4)))
    assert np.sum(matched(new, old, 4) == old) == best


class TestModels:
    BANK = ModelBank({"w": torch.tensor([[1.0], [5.0], [0.3]])}, np.array([0, 0, 1, 1, 2]))
    OLD = np.array([0, 0, 1, 1, -1])

    def models(self, labels, weights=None) -> list[float]:
        after = regrouped_bank(self.BANK, self.OLD, np.array(labels), weights)
        assert after.num_rows == len(np.unique(after.owner))  # the bank grows and shrinks
        return after.of_clients(np.arange(5))["w"].flatten().tolist()

    def test_of_old_clusters_stay_whoever_comes(self) -> None:
        assert self.models([0, 1, 1, 1, -1]) == pytest.approx([1, 5, 5, 5, 0.3])
        assert self.models([1, 1, 1, 0, -1]) == pytest.approx([5, 5, 5, 1, 0.3])

    def test_of_new_clusters_are_those_of_most_members(self) -> None:
        assert self.models([2, 2, 2, 1, -1]) == pytest.approx([1, 1, 1, 5, 0.3])

    def test_of_merged_clusters_are_means(self) -> None:
        weights = np.array([1.0, 2, 3, 3, 9])  # (3 * 1 + 6 * 5) / 9
        assert self.models([0, 0, 0, 0, -1], weights) == pytest.approx([33 / 9] * 4 + [0.3])
        assert self.models([0, 0, 1, 1, -1], weights) == self.models([0, 0, 1, 1, -1])

    def test_that_are_equal_merge_to_the_same_bits(self) -> None:
        rows = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(2, -1)
        bank = ModelBank({"w": rows}, np.array([0, 1, 1]))
        merged = regrouped_bank(
            bank, np.array([0, 1, 1]), np.zeros(3, np.int64), np.array([1.0, 3, 7])
        )
        assert torch.equal(merged.params["w"], rows[:1])


# Methods beside FL+HC that cluster by a pipeline, with a split in two groups that they find.
GROUPS = "split={name: label_groups, clients: 8, groups: 2%s}"
TWO = "clustering: {partition: {number: 2}}"
METHODS = {
    "repa": f"name: repa, rounds_before: 1, {TWO}",
    "wd": f"name: wd, rounds_before: 1, {TWO}",
    "flis_hc": "name: flis_hc, clustering: {partition: {threshold: 0.9}}",
}


def with_groups(name: str, recluster: str = "", holdout: int = 0) -> list[str]:
    """Overrides of a method on two groups."""
    split = GROUPS % (f", holdout: {holdout}, server: {100 * (name == 'flis_hc')}")
    again = f", recluster: {{{recluster}}}" if recluster else ""
    return [*DIGITS, split, f"algorithm={{{METHODS[name]}{again}}}", "evaluate.every=4"]


@pytest.mark.parametrize("name", some_long(METHODS, ["flis_hc"]))
class TestEveryMethod:
    def test_with_the_same_clusters_changes_no_bit(self, tiny_run, name) -> None:
        once = tiny_run(*with_groups(name), "rounds=2")
        assert once.summary["ari"] == 1
        for then in ("anew", "merge", "move"):
            again = with_groups(name, f"when: every, every: 1, then: {then}")
            often = tiny_run(*again, "rounds=2")
            assert sha(often) == sha(once), then
            assert list(read_clusterings(often.path))[-1] == 2

    def test_signatures_start_from_the_model_of_the_first_clustering(
        self, tiny_run, monkeypatch, name
    ) -> None:
        observe, started = Pipeline.observe, []

        def noting(self, fed, bank, cohort, memory):
            started.append(bank.sha256())
            return observe(self, fed, bank, cohort, memory)

        monkeypatch.setattr(Pipeline, "observe", noting)
        tiny_run(*with_groups(name, "when: every, every: 1"), "rounds=2")
        assert len(started) >= 2
        assert len(set(started)) == 1

    def test_resumes_between_clusterings_with_clients_that_come_and_go(
        self, tiny_run, tmp_path, name
    ) -> None:
        """Clients of both groups exchange their data in round 3; client 2 left in round 2 and is
        back in round 4, and client 5 comes in round 3; one client is never trained."""
        events = "events=[{round: 3, kind: exchange, clients: [0, 7]}, "
        events += "{round: 2, kind: leave, clients: [2]}, {round: 4, kind: join, clients: [2]}, "
        events += "{round: 3, kind: join, clients: [5]}]"
        drift = "when: on_drift, drift_by: events, then: anew"
        moving = [*with_groups(name, drift, holdout=1), events, "rounds=4"]
        whole, seen = tiny_run(*moving), []
        assert aris(whole)[-1] == 1
        assert list(read_clusterings(whole.path))[-1] in (3, 4)
        once = tiny_run(*with_groups(name, holdout=1), events, "rounds=4")
        assert aris(once)[-1] < 1
        out = tmp_path / "stopped"
        tiny_run(*moving, out=out, on_round=seen.append, should_stop=lambda: len(seen) >= 3)
        assert sha(tiny_run(*moving, out=out, resume=True)) == sha(whole)


class TestCflGp:
    def test_finds_swapped_labels_and_stays_with_them(self, tiny_run) -> None:
        numbers = "clustering: {embed: {number: 2}, partition: {number: 2}}"
        result = tiny_run(*DIGITS, f"algorithm={{name: cfl_gp, {numbers}}}", "rounds=5")
        assert aris(result) == [0, 1, 1, 1, 1]
        assert list(read_clusterings(result.path)) == [2, 4]

    def test_with_one_cluster_is_fedavg(self, tiny_run, known_run) -> None:
        one = "algorithm={name: cfl_gp, rounds_before: 1, clustering: {partition: {number: 1}}}"
        assert sha(tiny_run(one)) == sha(known_run())


class TestFedDrift:
    # One group, half of which has other labels from round 7 on. Steps begin in rounds 1, 4, 7, 10.
    ONE = "split={name: label_swap, clients: 8, groups: 1}"
    DRIFT = "events=[{round: 7, kind: relabel, clients: [0, 1, 2, 3], labels: [[4, 5], [6, 7]]}]"
    FEDDRIFT = "algorithm={name: feddrift, every: 3, delta: 0.5, eager: %s}"

    def test_gives_each_alarmed_client_a_model_and_merges_them(self, tiny_run) -> None:
        result = tiny_run(*DIGITS, self.ONE, self.DRIFT, self.FEDDRIFT % "false", "rounds=10")
        assert result.rounds["clusters"].tolist() == [1] * 6 + [5] * 3 + [2]
        assert aris(result)[-1] == 1
        assert list(read_clusterings(result.path)) == [1, 4, 7, 10]

    def test_eager_gives_them_one(self, tiny_run) -> None:
        result = tiny_run(*DIGITS, self.ONE, self.DRIFT, self.FEDDRIFT % "true", "rounds=7")
        assert result.rounds["clusters"].tolist() == [1] * 6 + [2]
        assert aris(result)[-1] == 1

    def test_without_other_data_history_changes_no_bit(self, tiny_run) -> None:
        runs = [
            tiny_run(f"algorithm={{name: feddrift, every: 1, delta: 0.3, history: {how}}}")
            for how in ("true", "false")
        ]
        assert sha(runs[0]) == sha(runs[1])

    @pytest.mark.parametrize("history", [True, pytest.param(False, marks=pytest.mark.long)])
    def test_former_models_train_on_former_data(self, tiny_run, history) -> None:
        """All clients get other labels in round 3 and start a model: with its data of rounds 1 and
        2 each goes on training the first one, for which it sends a model more."""
        drift = f"events=[{{round: 3, kind: relabel, clients: {list(range(8))}, labels: [[4, 5], "
        drift += "[6, 7], [0, 1], [2, 3]]}]"
        feddrift = "algorithm={name: feddrift, every: 2, delta: 0.5, eager: true, history: %s}"
        common = [*DIGITS, self.ONE, drift, "rounds=3", "train.epochs=6", "execution.block=3"]
        watched = {"on_round": lambda _row: None}  # so that each round has a checkpoint
        result = tiny_run(*common, feddrift % str(history).lower(), **watched)
        store = CheckpointStore(RunDirectory(result.path).checkpoints)
        checkpoints = [store.load_latest(up_to=t) for t in (2, 3)]
        assert [checkpoint.round for checkpoint in checkpoints] == [2, 3]
        before, after = (checkpoint.state for checkpoint in checkpoints)
        assert after.labels.tolist() == [1] * 8
        first, now = before.bank.params, after.bank.params
        assert [torch.equal(first[n][0], now[n][0]) for n in first] == [not history] * len(first)
        up = result.rounds["bytes_up_model"]
        assert up[2] == up[1] * (2 if history else 1)
        assert result.rounds["client_steps"][2] == result.rounds["client_steps"][1] * (1 + history)
        # FedAvg of round 3 on the old data, from the first model
        fedavg = tiny_run(*[o for o in common if o != drift], "algorithm=fedavg")
        expected = state_of(fedavg).bank.params
        assert [torch.equal(expected[n][0], now[n][0]) for n in now] == [history] * len(first)

    @pytest.mark.parametrize(("weights", "expected"), [("samples", 1.5), ("uniform", 1.0)])
    def test_examples_that_stay_count_once(self, weights, expected) -> None:
        """Two of four labels are swapped: the model trains on two old, two new and two examples
        that stayed, 6 / 4 of what the client holds; client 1 has no former data."""
        pairs = [[(0, 1), (1, 1), (2, 2), (3, 3)], [(1, 1)]]
        fed = linear_federation(pairs, Training(), Aggregation(weights=weights))
        swap = Event(round=2, kind="relabel", clients=(0,), labels=((2, 3),))
        fed = replace(fed, timeline=make_timeline(fed.timeline.at(1), [swap])).during(2)
        assert len(fed.timeline.trained_on(0, (2, 1))) == 6
        bank, loss = fed.initial_bank(), np.zeros(2)
        state = FedDriftState(bank, np.zeros(2, int), loss, np.array([1]), np.array([[0, -1]]))
        assert strengths(state, fed).tolist() == [[expected, 1.0]]

    def test_former_data_of_a_client_not_heard_are_stale(self) -> None:
        """Model 1 hears client 1, which trains it on (1, 3), and client 0, which has passed the one
        example that model 1 trains on to client 2 and is not heard: both count alike."""
        pairs, ours = [[(1, 2)], [(1, 3)], [(2, 1)]], Aggregation(unheard="stale")
        fed = linear_federation(pairs, Training(lr=0.1), ours)
        swap = Event(round=2, kind="exchange", clients=(0, 2))
        fed = replace(fed, timeline=make_timeline(fed.timeline.at(1), [swap])).during(2)
        start = {n: torch.cat([leaf, leaf + 1]) for n, leaf in fed.initial.items()}
        labels, former = np.array([0, 1, 0]), np.array([[1, -1, -1]])
        bank = replace(fed.initial_bank(), params=start, owner=labels)
        state = FedDriftState(bank, labels, np.zeros(3), np.array([1]), former)
        method = FedDrift(every=10)
        state = method.round(state, Cohort(2, np.array([1])), fed).state
        after = method.deploy(state, np.arange(3), fed)
        theta = START + 1
        expected = (theta + local_sgd(theta, pairs[1], 1, 0.1)) / 2
        assert vector(after, client=1) == pytest.approx(expected)
        assert vector(after, client=0) == pytest.approx(START)

    def test_with_an_infinite_threshold_is_fedavg(self, tiny_run, known_run) -> None:
        oblivious = "algorithm={name: feddrift, every: 1, delta: .inf}"
        assert sha(tiny_run(oblivious)) == sha(known_run())

    def test_without_a_drift_has_one_model(self, tiny_run) -> None:
        result = tiny_run("algorithm={name: feddrift, every: 1, delta: 0.3}", "participation=1")
        assert result.summary["clusters"] == 1
        down = result.rounds["bytes_down_losses"]
        assert (down == result.rounds["bytes_down_model"]).all()  # one model to each client

    def test_models_of_equal_losses_are_merged_to_the_same_bits(self) -> None:
        rng = np.random.default_rng(0)
        losses = np.repeat(rng.random((5, 1)), 2, axis=1)
        D, used = model_distances(losses, np.array([0, 1, 0, 1, 1]), np.arange(1.0, 6))
        assert D[0, 1] == D[1, 0] >= 0
        other = rng.random((5, 2))
        D, _ = model_distances(other, np.array([0, 1, 0, 1, 1]), np.arange(1.0, 6))
        assert (D == D.T).all()
        assert (np.diag(D) == 0).all()
        target = merges(np.zeros((2, 2)), used, 2, delta=1e-9)
        rows = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(2, -1)
        bank = ModelBank({"w": rows}, np.array([0, 1, 0, 1, 1]))
        after = merged(bank, np.array([4.0, 11.0]), target)
        assert torch.equal(after.params["w"], rows[:1])

    def test_a_merged_model_is_the_mean_by_examples(self) -> None:
        """Models 2 and 6 have 1 and 3 examples; model 9, which nobody uses, stays."""
        bank = ModelBank({"w": torch.tensor([[2.0], [9.0], [6.0]])}, np.zeros(2, np.int64))
        after = merged(bank, np.array([1.0, 0.0, 3.0]), np.array([0, 1, 0]))
        assert after.params["w"].flatten().tolist() == [5.0, 9.0]

    @pytest.mark.parametrize("history", [True, False])
    def test_former_data_count_in_a_merge(self, history) -> None:
        """Clients 0 and 2 exchange three examples of y = x / 2 - 1 / 4, model 0, for one of model
        1, y = 3 x / 2 + 3 / 4. By present data models have 3 and 2 examples, with former ones 6 and
        3, of which client 1 has one that stays."""
        pairs = [[(2, 1), (4, 2), (6, 3)], [(2, 4)], [(4, 7)]]
        fed = linear_federation(pairs, Training(lr=0.1))
        swap = Event(round=2, kind="exchange", clients=(0, 2))
        timeline = make_timeline(fed.timeline.at(1), [swap])
        host = Inline(replace(fed.executor.host, timeline=timeline))
        fed = replace(fed, timeline=timeline, executor=host).during(2)
        start = {n: torch.cat([leaf, leaf + 1]) for n, leaf in fed.initial.items()}
        labels, none = np.array([0, 1, 1]), np.empty(0, np.int64)
        bank = replace(fed.initial_bank(), params=start, owner=labels)
        state = FedDriftState(bank, labels, np.zeros(3), none, np.empty((0, 3), np.int64))
        method = FedDrift(every=1, delta=np.inf, history=history)
        after = method.round(state, Cohort(2, none), fed).state
        assert after.labels.tolist() == [0, 0, 0]
        assert (after.models >= 0).any() == history
        expected = START + (3 / 9 if history else 2 / 5)
        assert vector(after.bank, client=0) == pytest.approx(expected)


def test_what_it_does_not_know_is_refused(tiny_run) -> None:
    with pytest.raises(ExperimentError, match="jump must be > 1, got 1"):
        tiny_run(FLHC % ", recluster: {when: on_drift, jump: 1}")
    with pytest.raises(ExperimentError, match="when must be one of once, every, on_drift, auto"):
        tiny_run(FLHC % ", recluster: {when: sometimes}")
    with pytest.raises(ExperimentError, match="steady must be a cosine, between -1 and 1, got 2"):
        tiny_run(FLHC % ", recluster: {when: auto, steady: 2}")


@pytest.mark.parametrize("keys", ["when: on_drift, every: 3", "when: auto, every: 3", "every: 3"])
def test_an_interval_that_is_never_read_is_refused(keys: str) -> None:
    with pytest.raises(ExperimentError, match=r"recluster: every is read with when: every alone, "):
        tiny_experiment(FLHC % f", recluster: {{{keys}}}")


def test_an_interval_that_is_a_default_is_no_mistake() -> None:
    tiny_experiment("algorithm={name: cfl_gp, recluster: {when: on_drift}}")  # every is 2


CHANGING = ["ifca", "fedsem", "cfl", "flis_dc", "flt", "pca_km_hc", "clove", "feddrift", "fedsoft"]


@pytest.mark.parametrize("name", [*CHANGING, "fedem", "fedrc"])
def test_methods_whose_clusters_change_by_themselves_refuse_it(tiny_run, name) -> None:
    with pytest.raises(ExperimentError, match=r"algorithm.recluster does not fit \w+: c|s"):
        tiny_run(f"algorithm={{name: {name}, recluster: {{when: every}}}}")
