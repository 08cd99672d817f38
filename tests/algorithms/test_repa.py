"""REPA and WD: identities, what they find, who comes later, and what it costs."""

import numpy as np
import pytest
import torch

from flray.algorithms.repa import Repa
from flray.client.tasks import Train
from flray.clustering.statistics import Statistics
from flray.clustering.update import Update
from flray.config.experiment import parse_experiment
from flray.execution.executor import Inline
from flray.execution.federation import Cohort
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory
from flray.runs.preparing import deal, prepare

from scenarios import (
    federation_of,
    line_federation,
    run_experiment,
    some_long,
    state_of,
    tiny_experiment,
)

NUMBER = "algorithm.clustering.partition.number="
EARLY = ["algorithm={name: repa, rounds_before: 2}", NUMBER + "2"]


@pytest.mark.parametrize(
    ("name", "rounds_before"), [("repa", 0), ("repa", 9), ("wd", 0), ("wd", 2)]
)
def test_one_cluster_without_proximal_term_is_fedavg(
    tiny_run, known_run, name, rounds_before
) -> None:
    one = f"algorithm={{name: {name}, mu: 0, rounds_before: {rounds_before}}}"
    result, fedavg = tiny_run(one, NUMBER + "1"), known_run()
    assert result.summary["params_sha256"] == fedavg.summary["params_sha256"]
    assert bool(read_clusterings(result.path)) == (rounds_before < 9)


def test_the_proximal_term_acts_after_the_clustering_alone(tiny_run) -> None:
    runs = [tiny_run(*EARLY, f"algorithm.mu={mu}") for mu in (0, 0.5)]
    losses = [run.clients.query("part == 'test'").groupby("round")["loss"].mean() for run in runs]
    assert losses[0][2] == losses[1][2]
    assert losses[0][3] != losses[1][3]


SMALL = [
    "dataset={name: digits, size: 8}",
    "model={name: repa_net, latent: 16}",
    "train={optimizer: adam, lr: 0.003, epochs: 1, batch_size: 20}",
    "participation=1",
    "rounds=2",
    "evaluate.every=2",
]
GROUPS = [*SMALL, "split={name: label_groups, clients: 10}", EARLY[0], NUMBER + "5"]


def test_the_proximal_term_pulls_towards_the_model_that_was_sent() -> None:
    """Eq. 8: the gradient of μ/2 (3 - 1)² is μ (3 - 1) = 1 with μ = 0.5, beside a loss's own 10."""
    w, w0 = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}

    def own(at, batch):
        assert (at, batch) == (w, "batch")
        return {"w": torch.tensor([10.0])}

    assert Repa(mu=0.5).gradient(own, w, "batch", w0, {})["w"].item() == 11.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run with each encoder, for the tests of TestEncoders."""
    out = tmp_path_factory.mktemp("encoders")
    common = [*GROUPS, "split.samples_per_client=70", "rounds=3"]
    return {
        kind: run_experiment(tiny_experiment(*common, f"model.encoder={kind}"), out / kind)
        for kind in ("sae", "clf", "ae")
    }


@pytest.mark.slow
class TestEncoders:
    @pytest.mark.parametrize("kind", ["sae", "clf", "ae"])
    def test_each_finds_the_label_groups(self, runs, kind) -> None:
        """Seeds 0, 1, 2 had ARI 1.0 with each."""
        assert runs[kind].summary["ari"] >= 0.95

    def test_they_describe_clients_in_other_ways(self, runs) -> None:
        points = [read_clusterings(run.path)[2].points for run in runs.values()]
        assert len({array.tobytes() for array in points}) == 3

    def test_the_classifier_is_trained_alike_beside_each(self, runs) -> None:
        banks = {kind: state_of(run).bank for kind, run in runs.items()}
        assert any(name.startswith("embedder.") for name in banks["sae"].params)
        for kind in ("sae", "ae"):
            for name, leaf in banks["clf"].params.items():
                # Stacks of models of other sizes are divided otherwise, which changes last bits.
                torch.testing.assert_close(banks[kind].params[name], leaf, rtol=1e-4, atol=1e-4)

    def test_the_encoder_stays_as_it_was_at_the_clustering(self, runs) -> None:
        state = state_of(runs["sae"])
        for name, leaf in state.bank.params.items():
            moved = (leaf - state.joint.params[name]).abs().max()
            assert (moved < 1e-6) == name.startswith("embedder."), name

    def test_after_the_clustering_only_classifiers_travel(self, runs) -> None:
        sae, clf = (runs[kind].rounds.set_index("round") for kind in ("sae", "clf"))
        assert sae["bytes_up_model"][2] > 2 * clf["bytes_up_model"][2]
        assert sae["bytes_up_model"][3] == clf["bytes_up_model"][3]
        assert sae["bytes_down_signature"][2] == clf["bytes_down_signature"][2]  # both an encoder


def test_it_never_sees_swapped_labels(tiny_run) -> None:
    """Groups that call the same images by other names look alike to an encoder."""
    swapped = "split={name: label_swap, clients: 20, groups: 4}"
    fast = ["model=mlp200", "train={lr: 0.1, epochs: 3}", NUMBER + "4"]
    assert tiny_run(*GROUPS, *fast, NUMBER + "5").summary["ari"] >= 0.95
    assert abs(tiny_run(*GROUPS, *fast, swapped).summary["ari"]) < 0.2


PIPELINES = "[identity, invert, rotate, blur]"
SHIFTED = [
    *SMALL,
    "split={name: image_shift, form: shared, clients: 16, samples_per_client: 60, labels: skew}",
    f"split.pipelines={PIPELINES}",
    EARLY[0],
    NUMBER + "4",
]


@pytest.mark.parametrize("kind", some_long(["sae", "clf"], ["clf"]))
def test_it_finds_pipelines_of_images(tiny_run, kind) -> None:
    """Seeds 0, 1, 2 had ARI 1.0 with both; with ae 1.0, 1.0, 0.82."""
    assert tiny_run(*SHIFTED, f"model.encoder={kind}").summary["ari"] >= 0.95


@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_weight_differences_do_not_find_them(tiny_run, epochs) -> None:
    """Seeds 0, 1, 2 had ARI -0.11, 0.03, 0.04 with f = 1, and 0.03, 0.03, 0.16 with f = 2."""
    wd = ["algorithm={name: wd, rounds_before: 2}", NUMBER + "4", "model.encoder=clf"]
    signature = f"algorithm.clustering.signature={{name: update, epochs: {epochs}}}"
    assert tiny_run(*SHIFTED, *wd, signature).summary["ari"] < 0.5


def test_a_weight_difference_is_that_of_f_epochs() -> None:
    """One step an epoch on (w x - y)^2 with x = (1, 0): w - y shrinks to (1 - 2 η)^f of itself."""
    fed = line_federation([(1, 0), (1, 0)], [9, 2], [1, 1], [[4.0, 4.0]], lr=0.25)
    for epochs in (None, 1, 2, 3):
        points, _ = Update(epochs)(fed, fed.initial_bank(), Cohort(1, fed.clients), {})
        left = 0.5 ** (epochs or 1)
        moves = [(y - 4) * (1 - left) for y in (9, 2)]
        np.testing.assert_allclose(points.array(), [[m, 0] for m in moves], rtol=1e-12)


def test_weight_differences_are_of_one_epoch_unless_told(tiny_run) -> None:
    """f = 1: where a round has three epochs of all clients, the clustering costs a third more."""
    wd = ["algorithm={name: wd, rounds_before: 2}", NUMBER + "2"]
    steps = tiny_run(*wd, "train.epochs=3", "participation=1").rounds["client_steps"].tolist()
    assert steps == [steps[0], steps[0] * 4 / 3, steps[0], steps[0]]


def test_unit_differences_have_directions_alone(tiny_run) -> None:
    wd = ["algorithm={name: wd, rounds_before: 1}", NUMBER + "2"]
    raw, unit = (tiny_run(*wd, f"algorithm.clustering.embed={e}") for e in ("none", "unit"))
    raw, unit = (read_clusterings(run.path)[1].points for run in (raw, unit))
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), rtol=1e-6)


HELD = ["split={name: dirichlet, clients: 12, alpha: 0.5, min_samples: 8, holdout: 4}", "rounds=4"]


def held_out() -> np.ndarray:
    experiment = tiny_experiment(*HELD)
    return deal(experiment, experiment.dataset.build().load()).holdout


class TestThoseWhoComeLater:
    def test_holdout_clients_are_placed_without_labels_or_training(
        self, tiny_run, monkeypatch
    ) -> None:
        """Other labels for the same images change no place, and no holdout client trains."""
        trained, run, holdout = [], Inline._run, held_out()

        def noting(self, task, bank, job):
            if isinstance(task, Train):
                trained.extend(map(int, job.clients))
            return run(self, task, bank, job)

        monkeypatch.setattr(Inline, "_run", noting)
        pairs = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        relabel = [{"round": 1, "kind": "relabel", "clients": holdout.tolist(), "labels": pairs}]
        common = [*EARLY, *HELD, NUMBER + "3"]
        plain, other = tiny_run(*common), tiny_run(*common, f"events={relabel}")
        labels = [state_of(result).labels for result in (plain, other)]
        np.testing.assert_array_equal(*labels)
        assert len(set(labels[0][holdout])) == 2
        assert plain.summary["split_sha256"] != other.summary["split_sha256"]
        assert plain.summary["holdout_accuracy_mean"] != other.summary["holdout_accuracy_mean"]
        assert trained
        assert not set(trained) & set(holdout)
        assert plain.summary["holdout_labels_read"] is False

    def test_holdout_clients_join_the_cluster_of_their_group(self, tiny_run) -> None:
        """Described by 3 images instead of 34, seeds 0, 1, 2 put 2, 0 and 3 of 8 elsewhere."""
        held = "split={name: label_groups, clients: 40, holdout: 8}"
        fast = ["model=mlp200", "train={lr: 0.1, epochs: 3}", NUMBER + "5", "rounds=3"]
        result = tiny_run(*GROUPS, held, *fast)
        split = prepare(parse_experiment(RunDirectory(result.path).config())).payload.timeline.at(1)
        labels = state_of(result).labels
        of_group = {int(split.groups[i]): int(labels[i]) for i in split.clients}
        assert len(set(of_group.values())) == 5
        assert [of_group[int(split.groups[i])] for i in split.holdout] == list(
            labels[split.holdout]
        )

    def test_the_nearest_centroid_is_that_of_clients_that_train(self, tiny_run) -> None:
        """By hand: statistics in units of the training clients' spread, then their means."""
        result, holdout = tiny_run(*EARLY, *HELD, NUMBER + "3"), held_out()
        state, found = state_of(result), read_clusterings(result.path)[2]
        assert not set(found.clients) & set(holdout)
        known = state.known.array()
        spread = np.where(known.std(0) == 0, 1, known.std(0))
        np.testing.assert_allclose(found.points, (known - known.mean(0)) / spread, atol=1e-9)
        centroids = np.stack([found.points[found.labels == k].mean(0) for k in range(3)])
        experiment = parse_experiment(RunDirectory(result.path).config())
        fed = federation_of(experiment)
        signature = Repa().clustering.signature
        new, _ = signature(fed, state.joint, Cohort(2, holdout), {})
        placed = (new.array() - known.mean(0)) / spread
        nearest = ((placed[:, None] - centroids) ** 2).sum(2).argmin(1)
        assert state.labels[holdout].tolist() == nearest.tolist()

    def test_a_newcomer_is_placed_after_its_first_round_and_then_trains(self, tiny_run) -> None:
        join = "events=[{round: 4, kind: join, clients: [3]}]"
        result = tiny_run(*EARLY, join, "participation=1", "rounds=5")
        assert result.rounds["cohort_size"].tolist() == [5, 5, 5, 5, 6]
        assert state_of(result).labels[3] >= 0

    def test_weight_differences_of_holdout_clients_take_their_labels(self, tiny_run) -> None:
        wd = ["algorithm={name: wd, rounds_before: 2}", NUMBER + "2"]
        result = tiny_run(*wd, *HELD)
        assert result.summary["holdout_labels_read"] is True
        read = result.rounds.set_index("round")["holdout_labels_read"].fillna(0)
        assert read.to_dict() == {1: 0, 2: 4, 3: 0, 4: 0}
        assert tiny_run(*wd).summary["holdout_labels_read"] is False

    def test_what_a_place_costs_is_counted(self, tiny_run) -> None:
        """An encoder down and statistics up, for each of 8 clients and each of 4 held out."""
        result = tiny_run(*EARLY, *HELD)
        encoder, latent, float32 = 64 * 16 + 16, 16, 4  # mlp200 of 16 units without its last layer
        row = result.rounds.set_index("round").loc[2]
        assert row["bytes_down_signature"] == (8 + 4) * encoder * float32
        assert row["bytes_up_signature"] == (8 + 4) * 4 * latent * float32  # mean, three quantiles


def test_permuted_clients_are_clustered_alike(tiny_run) -> None:
    """Data go round in circles of four groups; whoever holds them is in the same cluster."""
    cycle = [*range(1, 20), 0]
    events = f"events=[{{round: 1, kind: exchange, clients: {list(range(20))}}}]"
    common = [
        *GROUPS,
        "split.clients=20",
        "model=mlp200",
        "train={lr: 0.1, epochs: 5, batch_size: 80}",
    ]
    common += ["execution.precision=float64"]
    plain, moved = (state_of(tiny_run(*common, *more)).labels for more in ([], [events]))
    together = [labels[:, None] == labels for labels in (plain, moved[cycle])]
    np.testing.assert_array_equal(*together)
    assert len(set(plain)) == 5


def test_an_encoder_may_be_pretrained_centrally(tiny_run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    encoder = "{dataset: {name: synthetic, num_train: 64, size: 8}, model: conv_ae, epochs: 1}"
    own = f"algorithm.clustering.signature={{name: statistics, encoder: {encoder}}}"
    result = tiny_run("algorithm={name: repa, rounds_before: 0}", NUMBER + "2", own)
    assert read_clusterings(result.path)[0].points.shape == (6, 4 * 128)
    assert len(list((tmp_path / "cache" / "encoders").iterdir())) == 1


@pytest.mark.parametrize(
    "engine", ["vectorized", pytest.param("lightning", marks=pytest.mark.long)]
)
def test_engines_agree_on_the_loss_of_the_classifier_alone(tiny_run, known_run, engine) -> None:
    """After the clustering the hook asks for another of the module's losses."""
    tiny = ["model={name: repa_net, latent: 4}", "train={lr: 0.05, epochs: 1, momentum: 0.5}"]
    common = [*EARLY, *tiny, "algorithm.rounds_before=1", "execution.precision=float64"]
    reference, other = (
        run(*common, f"execution.engine={each}", "rounds=3")
        for run, each in ((known_run, "loop"), (tiny_run, engine))
    )
    losses = [run.clients.query("part == 'test'")["loss"].to_numpy() for run in (reference, other)]
    assert np.abs(losses[0] - losses[1]).max() < 1e-10
    train = [run.rounds["train_loss"].to_numpy() for run in (reference, other)]
    np.testing.assert_allclose(*train, rtol=1e-9)
    assert train[0][2] < 0.9 * train[0][0]  # less than the three losses of the first round


@pytest.mark.parametrize("field", ["rounds_before", "mu"])
def test_bad_numbers(field) -> None:
    with pytest.raises(ValueError, match=f"{field} must be >= 0, got -1"):
        Repa(**{field: -1})


def test_bad_statistics() -> None:
    for wrong in ((), ("mean", "mean"), ("median",)):
        with pytest.raises(ValueError, match="statistics must be one or more of mean, std"):
            Statistics(wrong)
