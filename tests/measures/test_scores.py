import math

import numpy as np
import pytest

from flray.columns import ScoreColumns
from flray.measures.ground_truth import overlap_errors
from flray.measures.scores import (
    ClientScores,
    partition_scores,
    rounds_to_target,
    summarise,
)
from flray.measures.stopping import Stop


def client_scores(correct, total, loss=None):
    loss = np.zeros(len(total)) if loss is None else np.array(loss)
    return ClientScores(np.arange(len(total)), np.array(correct), np.array(total), loss)


def test_summary_of_unequal_clients_by_hand():
    """Accuracies 1, 1/2, 0 on 10, 20, 10 examples, 32 of the examples distinct.

    mean 1/2; weighted 20/40; variance (1/4 + 0 + 1/4) / 3 = 1/6; se over clients
    sqrt(1/6) / sqrt(3) = sqrt(1/18); binomial se sqrt(1/4 / 32) = sqrt(1/128).
    """
    summary = summarise(client_scores([10, 10, 0], [10, 20, 10], [0.5, 1.0, 3.0]), 32, target=0.5)
    assert summary == pytest.approx(
        {
            "accuracy_mean": 1 / 2,
            "accuracy_weighted": 1 / 2,
            "accuracy_se_binomial": math.sqrt(1 / 128),
            "accuracy_se_clients": math.sqrt(1 / 18),
            "accuracy_variance": 1 / 6,
            "accuracy_worst": 0.0,
            "accuracy_worst_decile": 0.0,
            "clients_reaching_target": 2 / 3,
            "loss_mean": 1.5,
        }
    )


def test_mean_is_over_clients_and_weighted_over_examples():
    summary = summarise(client_scores([1, 0], [1, 9]), num_examples=10)
    assert summary["accuracy_mean"] == 0.5
    assert summary["accuracy_weighted"] == 0.1


def test_worst_decile_is_the_mean_of_the_lowest_tenth():
    # 25 clients with 0, 1, ..., 24 of 24 right, shuffled: the lowest two are 0 and 1/24.
    correct = np.roll(np.arange(25), 11)
    summary = summarise(client_scores(correct, np.full(25, 24)), num_examples=1)
    assert summary["accuracy_worst"] == 0.0
    assert summary["accuracy_worst_decile"] == pytest.approx(1 / 48)


def test_a_client_exactly_at_the_target_reaches_it():
    for correct, total, target in [(99, 100, 0.99), (29, 100, 0.29), (7, 10, 0.7), (58, 100, 0.58)]:
        scores = client_scores([correct, correct - 1], [total, total])
        assert summarise(scores, 1, target)["clients_reaching_target"] == 0.5


def test_without_target_the_share_reaching_it_is_nan():
    assert math.isnan(summarise(client_scores([1], [2]), 2)["clients_reaching_target"])


def test_clients_without_examples_are_left_out_of_everything():
    with_empty = client_scores([3, 0, 1], [4, 0, 4], [1.0, np.nan, 2.0])
    assert with_empty.clients.tolist() == [0, 2]
    assert with_empty.accuracy.tolist() == [0.75, 0.25]
    assert summarise(with_empty, 8, 0.5) == summarise(client_scores([3, 1], [4, 4], [1, 2]), 8, 0.5)


def test_scores_of_some_clients_keep_their_values():
    some = client_scores([3, 2, 1], [4, 4, 4]).of(np.array([2, 0, 7]))
    assert some.clients.tolist() == [0, 2]
    assert some.correct.tolist() == [3, 1]


@pytest.mark.filterwarnings("error")
def test_an_infinite_score_is_no_warning():
    errors = {ScoreColumns("mae"): np.array([np.inf, 1.0])}
    infinite = ClientScores(np.arange(2), np.zeros(2), np.ones(2, int), np.ones(2), errors)
    summary = summarise(infinite, 2)
    assert summary["mae_mean"] == summary["mae_worst"] == np.inf
    assert math.isnan(summary["mae_variance"])


def test_nothing_to_summarise_is_an_error():
    with pytest.raises(ValueError, match="no client has examples"):
        summarise(client_scores([0], [0]), 1)
    with pytest.raises(ValueError, match="num_examples must be >= 1, got 0"):
        summarise(client_scores([1], [1]), 0)


def test_impossible_scores_are_refused():
    with pytest.raises(ValueError, match="between 0 and total"):
        client_scores([3], [2])
    with pytest.raises(ValueError, match="one length"):
        ClientScores(np.arange(2), np.zeros(3, int), np.ones(3, int), np.zeros(3))


def test_partition_scores_of_one_wrong_client_by_hand():
    """Clusters {a a b} {b}: pairs together in both 1, in clusters 3, in groups 2, of 6 in all.

    ARI = (1 - 3*2/6) / ((3 + 2)/2 - 3*2/6) = 0. With H in nats: I = 3/4 ln(4/3) + ... below.
    """
    joint = {(0, "a"): 2 / 4, (0, "b"): 1 / 4, (1, "b"): 1 / 4}
    clusters, groups = {0: 3 / 4, 1: 1 / 4}, {"a": 1 / 2, "b": 1 / 2}
    information = sum(p * math.log(p / clusters[c] / groups[g]) for (c, g), p in joint.items())
    entropy = [-sum(p * math.log(p) for p in part.values()) for part in (clusters, groups)]
    scores = partition_scores([0, 0, 0, 1], [0, 0, 1, 1])
    assert scores["ari"] == pytest.approx(0.0, abs=1e-12)
    assert scores["nmi"] == pytest.approx(information / (sum(entropy) / 2))
    assert scores["purity"] == 3 / 4


def test_purity_is_not_symmetric():
    assert partition_scores([0, 1, 2, 3], [0, 0, 0, 0])["purity"] == 1.0
    assert partition_scores([0, 0, 0, 0], [0, 1, 2, 3])["purity"] == 0.25


def test_partition_of_other_clients_is_refused():
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(2,\)"):
        partition_scores([0, 1, 1], [0, 1])


def test_a_mean_of_clients_that_all_have_the_target_reaches_it():
    """The mean of three times 0.7 is 0.7 - 2e-16."""
    found = summarise(client_scores([7, 7, 7], [10, 10, 10]), 30, 0.7)
    assert found["clients_reaching_target"] == 1
    assert rounds_to_target([1], [found["accuracy_mean"]], 0.7) == 1
    assert Stop(target=0.7).reason([found["accuracy_mean"]]) == "target"


def test_rounds_to_target_takes_the_first_and_skips_rounds_without_evaluation():
    accuracy = [math.nan, 0.5, math.nan, 0.9, 0.6]
    assert rounds_to_target([0, 1, 2, 3, 4], accuracy, 0.6) == 3
    assert rounds_to_target([0, 1, 2, 3, 4], accuracy, 0.5) == 1
    assert rounds_to_target([0, 1, 2, 3, 4], accuracy, 0.95) is None
    assert rounds_to_target([], [], 0.5) is None


def test_overlap_errors_are_counted_client_by_client():
    """FLIS, Fig. 3: truth(i, j) if j holds at least ceil(labels of i / 2) of i's labels."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 3, (7, 4)) * (rng.random((7, 4)) < 0.6)
    counts[:, 0] += counts.sum(1) == 0  # nobody without labels
    together = rng.random((7, 7)) < 0.5
    expected = dict.fromkeys(["overlap_fp", "overlap_fn", "equal_fp", "equal_fn"], 0.0)
    for i in range(7):
        for j in set(range(7)) - {i}:
            mine, theirs = (set(np.flatnonzero(counts[k])) for k in (i, j))
            half = len(mine & theirs) >= math.ceil(len(mine) / 2)
            for name, truth in (("overlap", half), ("equal", mine == theirs)):
                expected[f"{name}_fp"] += (together[i, j] and not truth) / 7
                expected[f"{name}_fn"] += (truth and not together[i, j]) / 7
    assert overlap_errors(together, counts) == pytest.approx(expected)
    assert min(expected.values()) > 0
