"""Measures of a clustering: by hand, as columns of a run, and that they change nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from flray.clustering.distances import L2
from flray.clustering.pipeline import Clustering
from flray.clustering.points import Partition, Points
from flray.columns import CLUSTERING, ERRORS
from flray.config.experiment import parse_experiment
from flray.data.events import make_timeline
from flray.errors import ExperimentError
from flray.measures.drift import drift_similarity
from flray.measures.label_similarity import cosines
from flray.measures.measure import ClusteringContext
from flray.measures.robustness import Robustness
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.runs.preparing import prepare

from scenarios import line_federation

OPTIONS = Robustness(draws=6)


class Placing:
    """Puts the similar client j of client r into the cluster place[r][j]."""

    def __init__(self, place, labels) -> None:
        self.place, self.labels, self.asked = place, labels, []

    def partition(self, state):
        return np.array(self.labels)

    def nearest_clusters(self, state, clients, fed):
        self.asked = clients.tolist()
        assert fed.num_steps(clients, fed.training).all()
        pairs = [divmod(i - 4, OPTIONS.draws) for i in clients.tolist()]
        return clients, np.array([self.place[r][j] for r, j in pairs])


def row(place, labels=(0, 0, 0, 1)) -> tuple[dict, Placing]:
    """Of four clients in clusters of three and one, to which the algorithm gives these numbers."""
    fed = line_federation([(1, 0)] * 4, [1, 2, 3, 4], [1] * 4, [[0.0, 0.0]], lr=0.1)
    points = Points.vectors(np.arange(4), torch.eye(4, dtype=torch.float64))
    partition = Partition(np.array([0, 0, 0, 1]))
    found = Clustering(points.clients, points, L2()(points), None, partition)
    split = replace(fed.timeline.at(1), similar=(np.arange(3),) * (4 * OPTIONS.draws))
    fed = replace(fed, timeline=make_timeline(split, ()))
    algorithm = Placing(place, labels)
    return OPTIONS(ClusteringContext(found, split, fed, algorithm, None)), algorithm


class TestRobustness:
    def test_clients_that_follow_whom_they_resemble(self) -> None:
        found, algorithm = row([[0] * 6] * 3 + [[1] * 6])
        assert found["robustness"] == 1.0
        assert found["robustness_se"] == 0.0
        assert len(algorithm.asked) == 2 * OPTIONS.draws  # n for each cluster

    def test_clusters_go_by_the_numbers_of_the_algorithm(self) -> None:
        """Clusters that were found again keep the numbers that they had."""
        found, _ = row([[7] * 6] * 3 + [[2] * 6], labels=(7, 7, 7, 2))
        assert found["robustness"] == 1.0
        assert (found["size_smallest"], found["size_largest"]) == (1, 3)

    def test_all_in_the_large_cluster(self) -> None:
        """Clusters 1 and 0: mean 1/2, spread 1/2 over two clusters; 3 of 4 clients are right."""
        found, _ = row([[0] * 6] * 4)
        assert found["robustness"] == 0.5
        assert found["robustness_se"] == pytest.approx(0.5 / np.sqrt(2))
        assert found["robustness_clients"] == 0.75
        assert (found["size_smallest"], found["size_largest"]) == (1, 3)

    def test_each_draw_is_another_client_of_a_member(self) -> None:
        """Half of the draws go astray in the cluster of one; its six draws are all of client 3."""
        found, algorithm = row([[0] * 6] * 3 + [[0, 1] * 3])
        assert found["robustness"] == (1 + 0.5) / 2
        of_three = [i for i in algorithm.asked if (i - 4) // OPTIONS.draws == 3]
        assert [(i - 4) % OPTIONS.draws for i in of_three] == list(range(6))


MEASURED = ["evaluate.similarity=true", "evaluate.robustness={draws: 5}"]
NUMBER = "algorithm.clustering.partition.number=2"


@pytest.mark.parametrize(
    ("name", "rounds_before"), [("repa", 0), pytest.param("wd", 2, marks=pytest.mark.long)]
)
def test_measures_are_columns_of_the_clustering_and_of_the_summary(
    tiny_run, name, rounds_before
) -> None:
    algorithm = f"algorithm={{name: {name}, rounds_before: {rounds_before}}}"
    plain, measured = tiny_run(algorithm, NUMBER), tiny_run(algorithm, NUMBER, *MEASURED)
    for key in ("params_sha256", "bytes_up", "bytes_down", "client_steps", "split_sha256"):
        assert measured.summary[key] == plain.summary[key]
    rounds = measured.rounds.set_index("round")
    at = max(rounds_before, 1)
    for key in ("robustness", "uniformity", "label_correlation", "uniformity_labels"):
        column = rounds[f"clustering_{key}"].dropna()
        assert column.index.tolist() == [at]
        assert measured.summary[key] == column[at]
        assert key not in plain.summary
    assert 0 <= measured.summary["robustness"] <= 1


def test_clients_made_up_for_robustness_are_judged_on_their_examples(tiny_run) -> None:
    """The signature `losses` asks them for losses of models; what is trained stays the same."""
    losses = ("algorithm={name: repa, rounds_before: 0}", NUMBER, "algorithm.clustering.embed=unit")
    losses += ("algorithm.clustering.signature={name: losses, number: 3}",)
    plain, measured = tiny_run(*losses), tiny_run(*losses, *MEASURED)
    assert measured.summary["params_sha256"] == plain.summary["params_sha256"]
    assert 0 <= measured.summary["robustness"] <= 1


RAW = "algorithm.clustering.embed=none"  # the points of a clustering are then the signatures


def test_similarity_by_hand(tiny_run) -> None:
    repa = ("algorithm={name: repa, rounds_before: 1}", NUMBER, "evaluate.similarity=true")
    result, raw = tiny_run(*repa), tiny_run(*repa, RAW)
    config = RunDirectory(result.path).config()
    split = prepare(parse_experiment(config)).payload.timeline.at(1)
    found = read_clusterings(result.path)[1]
    counts = np.stack([np.bincount(split.labels[ids], minlength=10) for ids in split.train])
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    norm = np.linalg.norm
    alike = {(i, j): counts[i] @ counts[j] / norm(counts[i]) / norm(counts[j]) for i, j in pairs}
    e = read_clusterings(raw.path)[1].points
    assert np.abs(e - found.points).max() > 0.1  # clustered are the standardised signatures
    sent = [e[i] @ e[j] / norm(e[i]) / norm(e[j]) for i, j in pairs]
    expected = np.corrcoef(sent, list(alike.values()))[0, 1]
    assert result.summary["label_correlation"] == pytest.approx(expected, rel=1e-6)
    within = [
        np.mean([v for (i, j), v in alike.items() if found.labels[i] == found.labels[j] == c])
        for c in (0, 1)
        if (found.labels == c).sum() > 1
    ]
    assert result.summary["uniformity"] == pytest.approx(np.mean(within))


def test_uniformity_of_planted_groups_is_one(tiny_run) -> None:
    """Two labels in each of five groups: REPA and the labels themselves find them, chance not."""
    groups = ["dataset={name: digits, size: 8}", "split={name: label_groups, clients: 20}"]
    groups += ["model=mlp200", "train={lr: 0.1, epochs: 3}", "rounds=2", "evaluate.every=2"]
    groups += ["algorithm={name: repa, rounds_before: 2}", "participation=1"]
    groups += ["algorithm.clustering.partition.number=5", "evaluate.similarity=true"]
    summary = tiny_run(*groups).summary
    assert summary["uniformity"] == summary["uniformity_labels"] > 0.99
    assert summary["uniformity_random"] < 0.6
    assert summary["label_correlation"] > 0.6


class TestDrift:
    """REPA's Fig. 1: how alike clients see the same images, by a network trained beforehand."""

    PIPELINES = "[identity, invert, rotate]"
    RUN = (
        "dataset={name: digits, size: 28}",
        f"split={{name: image_shift, form: shared, pipelines: {PIPELINES}, clients: 6, "
        "samples_per_client: 40}",
        "model={name: mlp200, hidden: 8}",
        "algorithm={name: repa, rounds_before: 1}",
        "rounds=1",
        "evaluate.drift={encoder: {dataset: {name: synthetic, num_train: 200}, model: conv_ae, "
        "epochs: 1}, images: 12}",
        NUMBER,
    )

    @pytest.fixture
    def run(self, tiny_run, tmp_path, monkeypatch):
        monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
        return lambda *overrides: tiny_run(*self.RUN, *overrides)

    def test_the_similarity_is_one_less_the_mean_divergence(self) -> None:
        """By scipy, whose distance is the root of the divergence, pair by pair and image by
        image."""
        p = np.random.default_rng(0).dirichlet(np.ones(5), (4, 3))  # (V, n, E)
        found = drift_similarity(p)
        for i in range(4):
            for j in range(4):
                apart = [jensenshannon(p[i, k], p[j, k], base=2) ** 2 for k in range(3)]
                assert found[i, j] == pytest.approx(1 - np.mean(apart))

    def test_clients_of_one_pipeline_see_images_alike(self, run) -> None:
        result = run()
        experiment = parse_experiment(RunDirectory(result.path).config())
        dataset = experiment.dataset.build().load()
        drift = experiment.settings.evaluate.drift
        seen = drift.between_clients(experiment.split.build(), dataset, 0)
        same = np.equal.outer(np.arange(6) % 3, np.arange(6) % 3)
        assert (seen[same] == 1).all()
        assert (seen[~same] < 1).all()
        e = read_clusterings(run(RAW).path)[1].points
        pairs = np.triu_indices(6, 1)
        expected = np.corrcoef(cosines(e)[pairs], seen[pairs])[0, 1]
        assert result.summary["drift_correlation"] == pytest.approx(expected, rel=1e-6)
        assert result.summary["data_correlation"] != result.summary["drift_correlation"]

    def test_it_changes_nothing_else_and_is_undefined_where_all_see_alike(self, run) -> None:
        alike = "split.pipelines=[identity]"
        measured, plain = run(alike), run(alike, "evaluate.drift=null")
        assert measured.summary["params_sha256"] == plain.summary["params_sha256"]
        assert "drift_correlation" not in measured.summary
        assert measured.rounds["clustering_drift_correlation"].isna().all()
        assert "clustering_drift_correlation" not in plain.rounds

    def test_a_split_without_pipelines_is_refused(self, run) -> None:
        with pytest.raises(ExperimentError, match=r"evaluate\.drift .* image_shift or rotation"):
            run("split={name: iid, clients: 6}")

    def test_an_encoder_of_other_images_is_refused(self, run) -> None:
        with pytest.raises(ExperimentError, match=r"encoder is for images \(1, 28, 28\)"):
            run("dataset.size=8")


def test_clusters_are_compared_with_label_sets_where_these_are_groups(tiny_run) -> None:
    """Clients of `label_swap` hold the same labels, those of `label_skew` two each."""
    common = ["participation=1", "algorithm={name: flhc, rounds_before: 1}", "rounds=2"]
    swapped = tiny_run("split={name: label_swap, clients: 6, groups: 2}", *common)
    skewed = tiny_run("split={name: label_skew, clients: 6}", *common)
    for result, is_there in ((swapped, False), (skewed, True)):
        for name in ERRORS:
            assert (CLUSTERING + name in result.rounds) == (name in result.summary) == is_there
    assert "ari" in swapped.summary
    several = tiny_run("split={name: label_skew, clients: 6, server: 50}", "algorithm=flis_dc")
    errors = several.rounds["clustering_overlap_fn"]
    assert errors.nunique() > 1
    assert several.summary["overlap_fn"] == pytest.approx(errors.mean())


def test_overlapping_clusters_are_recorded_as_such(tiny_run) -> None:
    """FLIS (DC) makes a cluster of each client's row of R; FLIS (HC) puts a client into one."""
    split = "split={name: dirichlet, clients: 6, alpha: 5, min_samples: 2, server: 50}"
    dc = tiny_run("algorithm={name: flis_dc, beta: 0.14}", split, "participation=1")
    hc = tiny_run("algorithm=flis_hc", split)
    found = read_clusterings(dc.path)[1]
    assert found.is_overlapping
    assert "overlapping cluster" in found.counted
    every = [found.members(label) for label in np.unique(found.labels)]
    assert np.array_equal(found.members(found.labels[0]), found.R[0] > 0)
    assert np.sum(every) > found.num_clients  # somebody is in two of them
    assert dc.summary["clusters_overlap"] is True
    assert dc.rounds["clustering_overlapping"].all()
    disjoint = read_clusterings(hc.path)[0]
    assert not disjoint.is_overlapping
    assert "clusters_overlap" not in hc.summary
    assert sum(disjoint.members(label).sum() for label in np.unique(disjoint.labels)) == 6


def test_cosines_of_counts() -> None:
    assert cosines(np.array([[1, 0], [5, 0], [0, 2]])).round(12).tolist() == [
        [1, 1, 0],
        [1, 1, 0],
        [0, 0, 1],
    ]
