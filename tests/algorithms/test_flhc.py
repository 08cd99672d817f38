"""FL+HC: its identities, what it finds, and who comes later."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import pdist, squareform

from flray.algorithms.flhc import Flhc, UpdateClustering
from flray.algorithms.wd import Wd
from flray.clustering.hierarchical import Hierarchical
from flray.clustering.update import Weights
from flray.data.events import Timeline
from flray.engines.rates import RateSchedule
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.records.clusterings import read_clusterings
from flray.sweeps.keys import branch_key

from linear import linear_federation
from scenarios import clusters_of_permuted_clients, sha

SWAPPED = [
    "dataset={name: digits, size: 8}",
    "split={name: label_swap, clients: 20, groups: 4}",
    "model=mlp200",
    "train={lr: 0.2, epochs: 3, batch_size: 20}",
]
FLHC = [
    "algorithm={name: flhc, rounds_before: 3}",
    "algorithm.clustering.partition={name: hierarchical, threshold: 1.5}",
]


@pytest.mark.parametrize("distance", ["l1", "l2", "cosine"])
def test_an_infinite_threshold_is_fedavg(tiny_run, known_run, distance) -> None:
    """One cluster of everybody: the cohorts are FedAvg's, and so is every bit."""
    endless = "{name: hierarchical, linkage: complete, threshold: .inf}"
    clustering = f"{{distance: {distance}, partition: {endless}}}"
    flhc = tiny_run(f"algorithm={{name: flhc, rounds_before: 2, clustering: {clustering}}}")
    assert sha(flhc) == sha(known_run())
    assert list(read_clusterings(flhc.path)) == [2]


def test_until_the_clustering_it_is_fedavg(tiny_run, known_run) -> None:
    late = "algorithm={name: flhc, rounds_before: 4}"
    assert sha(tiny_run(late)) == sha(known_run())


def test_a_threshold_of_zero_makes_everybody_its_own_cluster(tiny_run) -> None:
    alone = "{name: hierarchical, linkage: single, threshold: 0.0}"
    result = tiny_run(
        f"algorithm={{name: flhc, rounds_before: 1, clustering: {{partition: {alone}}}}}"
    )
    assert result.summary["clusters"] == 6
    assert (result.rounds["cohort_size"] == [3, 6, 6, 6]).all()  # max(0.5 * 1, 1) of each cluster


@pytest.mark.parametrize(
    ("cohort_size", "participation", "size"),
    [
        pytest.param("of_all", 0.5, 20, marks=pytest.mark.long),
        ("of_cluster", 0.5, 8),
        ("of_all", 0.1, 8),
        pytest.param("of_cluster", 0.1, 4, marks=pytest.mark.long),
    ],
)
def test_cohorts_of_clusters(tiny_run, cohort_size, participation, size) -> None:
    """Four clusters of five: min(max(α 20, 1), 5) clients of each, or max(α 5, 1)."""
    result = tiny_run(
        *SWAPPED,
        *FLHC,
        "rounds=4",
        f"algorithm.cohort_size={cohort_size}",
        f"participation={participation}",
        "algorithm.clustering.partition={name: hierarchical, number: 4, threshold: null}",
    )
    assert result.rounds["cohort_size"].tolist() == [*3 * [20 * participation], size]


def test_a_kept_pass_is_one_more_round_of_fedavg(tiny_run) -> None:
    """With one cluster, everybody heard and one batch per client, so that order does not matter."""
    common = [
        "participation=1",
        "train={lr: 0.1, epochs: 1, batch_size: 2000}",
        "execution.precision=float64",
    ]
    everybody = "clustering: {partition: {name: hierarchical, number: 1, threshold: null}}"
    kept, discarded = (
        tiny_run(
            *common,
            "rounds=3",
            f"algorithm={{name: flhc, rounds_before: 2, keep_pass: {keep}, {everybody}}}",
        )
        for keep in ("true", "false")
    )
    fedavg = tiny_run(*common, "rounds=4")
    losses = [
        r.clients.query("part == 'test'").groupby("round")["loss"].mean()
        for r in (kept, discarded, fedavg)
    ]
    assert losses[0][3] == pytest.approx(losses[2][4], rel=1e-12)
    assert losses[1][3] == pytest.approx(losses[2][3], rel=1e-12)
    assert losses[2][4] < losses[2][3]


def test_only_updates_have_a_pass_to_keep() -> None:
    with pytest.raises(ValueError, match="keep_pass needs the trained models"):
        Flhc(keep_pass=True, clustering=UpdateClustering(signature=Weights()))


def test_rows_of_a_sweep_with_other_cohorts_share_no_training() -> None:
    """The state after the clustering is the same, what follows is not."""
    plain = {"algorithm": {"name": "flhc"}, "events": [], "rounds": 5}
    keys = {
        branch_key("prefix", _with_cohorts(plain, size), Flhc(cohort_size=size), "state")
        for size in ("of_all", "of_cluster")
    }
    assert len(keys) == 2


def _with_cohorts(plain, size):
    return plain | {"algorithm": plain["algorithm"] | {"cohort_size": size}}


def test_clustering_before_the_first_round(tiny_run) -> None:
    found = tiny_run("algorithm={name: flhc, rounds_before: 0}")
    assert list(read_clusterings(found.path)) == [0]
    assert found.summary["round_after_clustering"] == 1


def test_it_finds_swapped_labels_and_wins(tiny_run) -> None:
    flhc = tiny_run(*SWAPPED, *FLHC, "rounds=8")
    fedavg = tiny_run(*SWAPPED, "rounds=8")
    assert flhc.summary["ari"] == 1.0
    assert flhc.summary["clusters"] == 4
    assert flhc.summary["accuracy_mean"] > fedavg.summary["accuracy_mean"] + 0.05


def test_it_finds_label_groups(tiny_run) -> None:
    groups = ["split={name: label_groups, clients: 20}", *SWAPPED[:1], *SWAPPED[2:]]
    found = tiny_run(*groups, *FLHC, "rounds=4")
    assert found.summary["ari"] >= 0.95
    assert found.summary["clusters"] == 5


def test_the_pass_counts_steps_and_bytes_but_no_round(tiny_run, known_run) -> None:
    """6 clients train once more, each gets a model and sends one."""
    flhc = tiny_run("algorithm={name: flhc, rounds_before: 4}")
    fedavg = known_run()
    model = fedavg.summary["bytes_up"] // (3 * 4)  # 3 of 6 clients in 4 rounds
    assert flhc.summary["bytes_up"] - fedavg.summary["bytes_up"] == 6 * model
    assert flhc.rounds["bytes_up_signature"].sum() == 6 * model
    assert len(flhc.rounds) == len(fedavg.rounds)
    extra = flhc.summary["client_steps"] - fedavg.summary["client_steps"]
    everybody = tiny_run("participation=1", "rounds=1").summary["client_steps"]
    assert extra == everybody > 0


def test_rounds_of_a_clustering_are_evaluated_whatever_the_interval(tiny_run) -> None:
    result = tiny_run("algorithm={name: flhc, rounds_before: 2}", "evaluate.every=100", "rounds=6")
    evaluated = result.rounds.loc[result.rounds["accuracy_mean"].notna(), "round"]
    assert evaluated.tolist() == [2, 3, 6]
    summary, after = result.summary, result.rounds.set_index("round").loc[3]
    assert summary["accuracy_mean_after_clustering"] == after["accuracy_mean"]
    assert summary["round_after_clustering"] == 3
    also = tiny_run("evaluate={every: 100, also: [3]}", "rounds=6")
    assert also.rounds["accuracy_mean"].notna().tolist() == [False, False, True, False, False, True]


def test_what_is_kept_of_a_clustering(tiny_run) -> None:
    larger = ["dataset.size=28", "train={lr: 0.1, epochs: 3}"]
    result = tiny_run(*SWAPPED, *larger, *FLHC, "rounds=3")
    found = read_clusterings(result.path)[3]
    assert found.D.shape == (20, 20)
    assert found.linkage.shape == (19, 4)
    assert found.R is None
    # 20 updates of 159,010 params are kept as coordinates with the same distances.
    assert (found.points.shape, int(found.projected_from)) == ((20, 19), 159_010)
    np.testing.assert_allclose(squareform(pdist(found.points)), found.D, rtol=1e-9)
    assert (found.groups == np.repeat(np.arange(4), 5)).all()
    row = result.rounds.set_index("round").loc[3]
    assert row["clustering_ari"] == 1.0
    assert row["clustering_false_positives"] == row["clustering_false_negatives"] == 0.0


def test_a_killed_run_goes_on_to_the_same_clusters(tiny_run, tmp_path) -> None:
    """Stopped before the clustering, right after it, and a round later."""
    two = "algorithm.clustering.partition={name: hierarchical, number: 2}"
    command = (FLHC[0], two, "rounds=5")
    whole = tiny_run(*command)
    assert whole.summary["clusters"] == 2
    for stopped_after in (2, 3, 4):
        out, seen = tmp_path / f"stopped_{stopped_after}", []

        def stop(seen=seen, n=stopped_after) -> bool:
            return len(seen) >= n

        tiny_run(*command, out=out, on_round=seen.append, should_stop=stop)
        assert len(seen) == stopped_after
        again = tiny_run(*command, out=out, resume=True)
        assert sha(again) == sha(whole)
        assert list(read_clusterings(out)) == [3]


def test_permuted_clients_give_permuted_models(tiny_run) -> None:
    """Passing data around before round 1 renames the clients; with everybody heard the partition
    and all accuracies move with it."""
    number = "algorithm.clustering.partition={name: hierarchical, number: 4}"
    common = [*SWAPPED, *FLHC, number, "rounds=5", "participation=1"]
    assert clusters_of_permuted_clients(tiny_run, *common) > 1


class TestNewcomers:
    JOIN = "events=[{round: 6, kind: join, clients: [0, 7, 19]}]"

    def test_they_are_placed_in_their_group_and_train(self, tiny_run) -> None:
        result = tiny_run(*SWAPPED, *FLHC, "rounds=8", "participation=1", self.JOIN)
        sizes = result.rounds["cohort_size"].tolist()
        assert sizes == [17] * 6 + [20] * 2  # placed in round 6, training from round 7
        assert result.summary["ari"] == 1.0
        assert result.summary["clusters"] == 4
        placed = result.rounds.set_index("round")["bytes_up_signature"]
        assert placed[6] == pytest.approx(placed[3] * 3 / 17)  # what it cost is counted

    def test_holdout_clients_get_a_cluster_without_training_in_rounds(self, tiny_run) -> None:
        split = "split={name: label_swap, clients: 20, groups: 4, holdout: 4}"
        result = tiny_run(*SWAPPED, split, *FLHC, "rounds=8", "participation=1")
        assert result.rounds["cohort_size"].max() == 16
        assert result.summary["holdout_accuracy_mean"] > 0.7


def test_ward_needs_l2(tiny_run) -> None:
    with pytest.raises(ExperimentError, match=r"ward.*needs distance l2"):
        tiny_run("algorithm={name: flhc, clustering: {distance: l1}}")


def test_bad_rounds_before() -> None:
    with pytest.raises(ValueError, match="rounds_before must be >= 0, got -1"):
        Flhc(rounds_before=-1)


@pytest.mark.parametrize("method", [Flhc, Wd])
@pytest.mark.parametrize("lr", [0.05, RateSchedule(0.05, decay=0.3)])
def test_a_newcomer_is_placed_by_an_update_of_the_clustering_s_rate(method, lr) -> None:
    """Client 6 is client 5 again; at a later rate its update is nearer to that of 0, 1 and 2."""
    fed = linear_federation([[(1, 1)]] * 3 + [[(1, 9)]] * 4, Training(lr=lr, batch_size=10))
    everybody = fed.timeline.at(1)
    without = replace(everybody, absent=np.array([6]))
    fed = replace(fed, timeline=Timeline(((0, without), (4, everybody))))
    pipeline = replace(method().clustering, partition=Hierarchical(number=2))
    algorithm = method(rounds_before=1, clustering=pipeline)
    state = algorithm.init(fed).state
    for t in range(1, 6):
        now = fed.during(t)
        state = algorithm.round(state, algorithm.cohort(state, t, now), now).state
    assert state.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
