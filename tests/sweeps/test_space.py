"""Spaces: what they may say, and what they are told when they say it wrong."""

import numpy as np
import pytest
import yaml
from scipy.cluster.hierarchy import fcluster
from scipy.cluster.hierarchy import linkage as scipy_linkage
from sklearn.cluster import AgglomerativeClustering

from flray.clustering.merges import MergePoint, between_merges
from flray.config.experiment import parse_experiment
from flray.config.overrides import THRESHOLD
from flray.errors import ExperimentError
from flray.sweeps.forms import BetweenMerges, Grid
from flray.sweeps.rows import expand, known_and_examples, rounds_to_cluster_after
from flray.sweeps.search import Suggestions
from flray.sweeps.space import parse_space, read_space

from scenarios import TINY

DISTANCE = "algorithm.clustering.distance"
LINKAGE = "algorithm.clustering.partition.linkage"
FLHC = {**TINY, "algorithm": "flhc"}


def space(varied, **more):
    return parse_space({"experiment": FLHC, "space": varied, **more})


def overrides(parsed):
    return [row.overrides for row in expand(parsed)]


def test_lists_are_a_grid_in_which_the_last_key_turns_fastest() -> None:
    rows = overrides(space({"train.lr": [0.1, 0.2], "seed": [0, 1, 2]}))
    assert rows[:4] == [
        {"train.lr": 0.1, "seed": 0},
        {"train.lr": 0.1, "seed": 1},
        {"train.lr": 0.1, "seed": 2},
        {"train.lr": 0.2, "seed": 0},
    ]
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ([0.1], (0.1,)),
        (0.3, (0.3,)),
        ({"grid": [0.1, 0.2]}, (0.1, 0.2)),
        ({"linspace": [1, 2, 3]}, (1.0, 1.5, 2.0)),
        ({"logspace": [0.01, 1, 3]}, (0.01, 0.1, 1.0)),
    ],
)
def test_forms_of_a_grid(form, values) -> None:
    assert space({"train.lr": form}).varied["train.lr"] == Grid(pytest.approx(values))


def test_seeds_count_from_the_experiments_own() -> None:
    parsed = parse_space({"experiment": {**FLHC, "seed": 5}, "space": {"seeds": 3}})
    assert parsed.varied["seed"] == Grid((5, 6, 7))


def test_exceptions_match_all_their_keys() -> None:
    """3 metrics by 2 linkages less ward with l1 and with cosine, which cannot be: 4."""
    ward = {LINKAGE: "ward", DISTANCE: ["l1", "cosine"]}
    grid = {DISTANCE: ["l1", "l2", "cosine"], LINKAGE: ["single", "ward"]}
    rows = overrides(space(grid, **{"except": [ward]}))
    assert rows == [
        {DISTANCE: "l1", LINKAGE: "single"},
        {DISTANCE: "l2", LINKAGE: "single"},
        {DISTANCE: "l2", LINKAGE: "ward"},
        {DISTANCE: "cosine", LINKAGE: "single"},
    ]
    with pytest.raises(ExperimentError, match=r"ward merges .* `except` leaves combinations out"):
        expand(space(grid))


def test_exceptions_leave_out_rows_of_baselines_too() -> None:
    """Few clients with many images and many with few, by two methods; what is left is paired."""
    grid = {"split.clients": [10, 50], "train.epochs": [5, 1]}
    pairs = [{"split.clients": 10, "train.epochs": 1}, {"split.clients": 50, "train.epochs": 5}]
    rows = overrides(space(grid, baseline={"algorithm": "fedavg"}, **{"except": pairs}))
    assert [(row["split.clients"], row["train.epochs"]) for row in rows] == 2 * [(10, 5), (50, 1)]


def test_a_baseline_is_a_row_for_each_combination_that_still_applies() -> None:
    """2 metrics by 2 seeds, and FedAvg once for each seed: the metric is not its own."""
    grid = {DISTANCE: ["l1", "cosine"], LINKAGE: "single", "seed": [0, 1]}
    rows = expand(space(grid, baseline={"algorithm": "fedavg"}))
    assert len(rows) == 4 + 2
    assert [row.overrides for row in rows[4:]] == [
        {"algorithm": "fedavg", "seed": 0},
        {"algorithm": "fedavg", "seed": 1},
    ]
    assert rows[5].plain["algorithm"] == {"name": "fedavg"}
    several = space(grid, baseline=[{"algorithm": "fedavg"}, {"algorithm": "local"}])
    assert len(expand(several)) == 4 + 4


def test_a_configuration_that_repeats_is_one_row() -> None:
    rows = expand(space({"seed": [0, 1]}, baseline={"algorithm": "flhc"}))
    assert len(rows) == 2


def test_every_row_is_evaluated_in_the_rounds_after_clusterings() -> None:
    """FedAvg too, or the ratio to it would be missing there; round 5 is evaluated anyway."""
    given = {"algorithm.rounds_before": [1, 2, 4], "evaluate.every": 5, "rounds": 10}
    rows = expand(space(given, baseline={"algorithm": "fedavg"}))
    assert [row.plain["algorithm"]["name"] for row in rows] == ["flhc"] * 3 + ["fedavg"]
    assert [row.plain["evaluate"]["also"] for row in rows] == [[2, 3]] * 4


def test_a_method_that_shares_no_round_with_fedavg_is_evaluated_as_the_space_asks() -> None:
    given = {"algorithm.rounds_before": [1, 2], "evaluate.every": 5, "rounds": 10}
    baselines = [{"algorithm": name} for name in ("fedavg", "local", "fedprox")]
    also = [row.plain["evaluate"]["also"] for row in expand(space(given, baseline=baselines))]
    assert also == [[2, 3], [2, 3], [2, 3], [], []]


def test_rows_of_a_search_are_evaluated_after_every_clustering_that_may_be() -> None:
    """Random draws of 1, 2 and 3 are known before; Optuna may suggest any of 1 to 3."""
    drawn = {"algorithm.rounds_before": {"randint": [1, 3]}, THRESHOLD: {"between_merges": 2}}
    fixed = {"evaluate.every": 5, "rounds": 10, "seed": [0, 1]}
    for name, samples in (("random", 30), ("optuna", 1)):
        search = {"name": name, "samples": samples}
        parsed = space(drawn | fixed, baseline={"algorithm": "fedavg"}, search=search)
        known = expand(parsed)
        baselines = [row for row in known if row.plain["algorithm"]["name"] == "fedavg"]
        assert [row.plain["seed"] for row in baselines] == [0, 1]
        suggested = []
        if name == "optuna":
            rounds = rounds_to_cluster_after(parsed, experiments_of(parsed))
            suggested = Suggestions(parsed, rounds, len(known), []).ask("a")
            assert len(suggested) == 2
        cut = [row.at(0.5) for row in (*known, *suggested) if row.merge_point is not None]
        assert len(cut) == len(known) + len(suggested) - 2 > 0
        for row in (*baselines, *cut, *known, *known_and_examples(parsed)[1]):
            assert row.plain["evaluate"]["also"] == [2, 3, 4]
            assert (row.plain["evaluate"]["every"], row.plain["rounds"]) == (5, 10)


def experiments_of(parsed):
    known, examples = known_and_examples(parsed)
    return [parse_experiment(row.plain) for row in known + examples]


def test_thresholds_between_merges_by_hand() -> None:
    """Heights 0.5, 2 and 8: equal ratios from 0.5 to 8, raised by half a step where they meet one.

    Half of a step that is a factor of 4 is a factor of 2, of one that is 2 a factor of sqrt(2).
    """
    tree = np.array([[0, 1, 0.5, 2], [2, 4, 2.0, 3], [3, 5, 8.0, 4]])
    assert between_merges(tree, 3) == pytest.approx([1.0, 4.0, 16.0])
    root = 2**0.5
    expected = [0.5 * root, 1.0, 2.0 * root, 4.0, 8.0 * root]
    assert between_merges(tree, 5) == pytest.approx(expected)
    assert between_merges(tree[:0], 2).tolist() == [0.0, 0.0]  # one client
    same_height = np.array([[0, 1, 3.0, 2], [2, 3, 3.0, 3]])
    assert (between_merges(same_height, 2) > 3.0).all()
    parsed = space({THRESHOLD: {"between_merges": 3}, "seed": [0, 1]})
    assert parsed.varied[THRESHOLD] == BetweenMerges(3)
    assert [row.merge_point for row in expand(parsed)[:3]] == [
        MergePoint(0, 3),
        MergePoint(0, 3),
        MergePoint(1, 3),
    ]
    row = expand(parsed)[0].at(0.25)
    assert row.plain["algorithm"]["clustering"]["partition"]["threshold"] == 0.25
    assert row.overrides[THRESHOLD] == 0.25


@pytest.mark.parametrize("linkage", ["single", "complete", "average", "ward"])
def test_scipy_and_sklearn_agree_at_thresholds_between_merges(linkage) -> None:
    """They differ on a merge: there scipy merges and scikit-learn does not."""
    points = np.random.default_rng(0).normal(size=(8, 3))
    tree = scipy_linkage(points, linkage)

    def of_sklearn(threshold: float) -> int:
        fit = AgglomerativeClustering(None, linkage=linkage, distance_threshold=threshold)
        return int(fit.fit(points).n_clusters_)

    lowest = float(tree[0, 2])
    on_a_merge = int(fcluster(tree, lowest, "distance").max())
    assert on_a_merge != of_sklearn(lowest)
    found = [int(fcluster(tree, t, "distance").max()) for t in between_merges(tree, 5)]
    assert found == [of_sklearn(t) for t in between_merges(tree, 5)]
    assert found[0] == 7
    assert found[-1] == 1
    assert len(set(found)) > 2


def test_random_draws_are_the_same_for_every_seed_and_grow_by_adding() -> None:
    drawn = {
        "train.lr": {"loguniform": [0.01, 1.0]},
        "train.epochs": {"randint": [1, 3]},
        "train.momentum": {"uniform": [0.0, 0.9]},
        "participation": {"choice": [0.5, 1.0]},
        "seed": [0, 1],
    }
    few = overrides(space(drawn, search={"name": "random", "samples": 3}))
    many = overrides(space(drawn, search={"name": "random", "samples": 4}))
    assert len(few) == 6
    assert [r for r in many if r["seed"] == 0][:3] == [r for r in few if r["seed"] == 0]
    rates = [{k: v for k, v in r.items() if k != "seed"} for r in few]
    assert rates[:3] == rates[3:]
    assert len({r["train.lr"] for r in rates}) == 3
    assert all(0.01 <= r["train.lr"] <= 1 and r["train.epochs"] in (1, 2, 3) for r in rates)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spce": {}}, r"unknown key 'spce' of a space \(did you mean 'space'\?\)"),
        ({"space": {"train.lr": {"unifrm": [0, 1]}}}, r"forms .* \(did you mean 'uniform'\?\)"),
        ({"space": {"train.lrr": [0.1]}}, r"unknown key 'train.lrr' \(did you mean 'lr'\?\)"),
        ({"space": {"train.lr": []}}, "train.lr: grid must be a list of at least one value"),
        ({"space": {"train.lr": [0.1, 0.1]}}, "train.lr: grid names 0.1 twice"),
        ({"space": {"train.lr": {"logspace": [0, 1, 3]}}}, "logspace must start above 0"),
        ({"space": {"train.lr": {"uniform": [1, 0]}}}, "goes from low to high"),
        ({"space": {"train.lr": {"uniform": [0, float("inf")]}}}, "both finite"),
        ({"space": {"train.lr": {"uniform": [0.1, 1]}}}, "drawn at random, but search is grid"),
        ({"space": {"train.lr": {"between_merges": 3}}}, f"between_merges is for {THRESHOLD}"),
        ({"space": {THRESHOLD: {"between_merges": 1}}}, "whole number >= 2, got 1"),
        ({"space": {"seeds": 0}}, "seeds must be a whole number >= 1"),
        ({"space": {"seed": [0], "seeds": 2}}, "both seed and seeds"),
        ({"search": "rndom"}, r"unknown search 'rndom' \(did you mean 'random'\?\)"),
        ({"search": {"name": "random", "samples": 3}}, "nothing to draw"),
        ({"scheduler": {"name": "asha", "grce": 1}}, r"'scheduler.grce' \(did you mean 'grace'"),
        ({"mode": "best"}, "mode must be one of max, min"),
        ({"concurrency": 0}, "concurrency must be >= 1"),
        ({"except": [{"seed": 1}]}, r"unknown key 'seed' in except\[0\]"),
        ({"space": {"seed": [0]}, "except": [{"seed": 1}]}, "seed is never 1; it is one of 0"),
        ({"space": {"seed": [0]}, "except": [{"seed": 0}]}, "the space has no rows"),
        ({"experiment": 3}, "experiment must be a file"),
        ({"experiment": "nowhere.yaml"}, "no experiment file"),
        ({"baseline": "fedavg"}, "baseline must be a mapping"),
    ],
)
def test_what_is_wrong_is_named(given, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        expand(parse_space({"experiment": FLHC} | given))


def test_between_merges_needs_a_tree() -> None:
    components = {"relate": {"name": "threshold"}, "partition": "components"}
    flat = {**TINY, "algorithm": {"name": "flhc", "clustering": components}}
    kinds = {THRESHOLD.rpartition(".")[0]: {"name": "kmeans", "number": 2}}
    with pytest.raises(ExperimentError, match="threshold"):
        expand(parse_space({"experiment": flat, "space": {THRESHOLD: {"between_merges": 3}}}))
    with pytest.raises(ExperimentError, match="threshold"):
        expand(space({**kinds, THRESHOLD: {"between_merges": 3}}))


def test_a_file_and_what_the_command_line_says(tmp_path) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(FLHC))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**FLHC, "rounds": 7}))
    plain = {"experiment": "one.yaml", "space": {"train.lr": [0.1, 0.2], "seed": [0, 1]}}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(plain))
    told = ["train.lr=0.5", "seeds=3", "rounds=9", "metric=loss_mean", "mode=min"]
    parsed = read_space(tmp_path / "space.yaml", [*told, "space.train.epochs=[1, 2]"])
    assert parsed.varied == {
        "train.lr": Grid((0.5,)),
        "train.epochs": Grid((1, 2)),
        "seed": Grid((0, 1, 2)),
    }
    assert parsed.options.metric == "loss_mean"
    assert {row.plain["rounds"] for row in expand(parsed)} == {9}
    whole = read_space(tmp_path / "space.yaml", ["space={seeds: 3}", "space.train.epochs=2"])
    assert whole.varied == {"train.epochs": Grid((2,)), "seed": Grid((0, 1, 2))}
    two = read_space(tmp_path / "space.yaml", ["experiment=[one.yaml, two.yaml]"])
    assert [row.overrides["experiment"] for row in expand(two)] == ["one"] * 4 + ["two"] * 4
    again = parse_space(yaml.safe_load(yaml.safe_dump(two.plain)))
    assert expand(again) == expand(two)
    with pytest.raises(ExperimentError, match="no space file"):
        read_space(tmp_path / "none.yaml")
