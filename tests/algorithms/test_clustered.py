"""Clustered methods since 2021: identities, planted groups, equality with libraries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from flray.algorithms.clove import best_number
from flray.algorithms.flexcfl import FlexCfl
from flray.algorithms.flhc import FlhcState
from flray.algorithms.ifca import Ifca, farthest
from flray.client.subspace import DescribeSubspace, singular_vectors
from flray.client.tasks import ClientsJob
from flray.clustering.points import Points
from flray.clustering.subspace import PrincipalAngles
from flray.data.dataset import Normalization
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.models.bank import ModelBank
from flray.records.checkpoint import CheckpointStore
from flray.records.clusterings import read_clusterings
from flray.records.run_directory import RunDirectory

from linear import linear_federation
from scenarios import Line, host_over, line_federation, noise_dataset, ragged_split, sha

PACFL = "{name: pacfl, clustering: {partition: {linkage: average, number: 2}}}"


def _bases(num: int, p: int = 3, d: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.linalg.qr(rng.normal(size=(d, p)))[0].T for _ in range(num)]


def _points(bases: list[np.ndarray]) -> Points:
    owner = np.repeat(np.arange(len(bases)), [len(basis) for basis in bases])
    return Points(np.arange(len(bases)), torch.from_numpy(np.concatenate(bases)), owner)


def _ragged() -> list[np.ndarray]:
    """Subspaces of one to three dimensions: one twice, one a hair away, one turned about 180°."""
    bases = _bases(6)
    bases[1], bases[2] = bases[1][:1], bases[2][:2]
    near = bases[0] + 1e-9 * np.random.default_rng(1).normal(size=bases[0].shape)
    return [*bases, bases[0], np.linalg.qr(near.T)[0].T, -bases[3]]


def test_smallest_principal_angle_is_scipys() -> None:
    bases = _ragged()
    D = PrincipalAngles()(_points(bases))
    for i, basis in enumerate(bases):
        for j in range(i):
            expected = np.rad2deg(subspace_angles(basis.T, bases[j].T).min())
            assert D[i, j] == pytest.approx(expected, abs=1e-6)  # of float32
            assert D[i, j] == D[j, i]


@pytest.mark.parametrize("form", ["trace", "entries"])
def test_angles_of_clients_with_fewer_vectors_are_of_those_they_have(form) -> None:
    bases = _ragged()
    D = PrincipalAngles(form)(_points(bases))
    for i, basis in enumerate(bases):
        for j in range(i):
            angles = np.rad2deg(np.arccos(np.clip(basis @ bases[j].T, -1, 1)))
            expected = np.diag(angles).sum() if form == "trace" else angles.min()
            assert D[i, j] == pytest.approx(expected)


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_subspaces_are_of_pixels_as_they_are(augment) -> None:
    """Whatever the normalisation of the dataset, by which main directions and angles differ."""
    centred = replace(
        noise_dataset(53, (1, 8, 8), augment), normalization=Normalization((0.5,), (0.25,))
    )
    split = ragged_split()
    host = host_over(Line(), centred, split)
    (basis,) = DescribeSubspace(3, per_label=False, t=1)(host, {}, ClientsJob(np.array([3])))
    pixels = centred.images[split.train[3]].reshape(40, -1) / 255
    expected = np.linalg.svd(pixels)[2][:3]
    assert np.abs((basis * expected).sum(1)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(200, 90), (90, 200)])
def test_first_singular_vectors_of_many_inputs_are_those_of_the_whole_svd(shape) -> None:
    inputs = torch.from_numpy(np.random.default_rng(0).random(shape))
    found, whole = singular_vectors(inputs, 3), torch.linalg.svd(inputs).Vh[:3].numpy()
    signs = np.sign((found * whole).sum(1, keepdims=True))
    assert found == pytest.approx(signs * whole, abs=1e-6)
    assert (np.take_along_axis(found, np.abs(found).argmax(1, keepdims=True), 1) > 0).all()


def test_the_largest_singular_vector_is_found_whatever_its_entries_sum_to() -> None:
    """Half of the inputs lie along e0 - e1, at right angles to a vector of ones."""
    inputs = np.zeros((200, 100))
    inputs[:100, :2] = (5, -5)
    inputs[100:, 2:] = np.random.default_rng(0).random((100, 98))
    found = singular_vectors(torch.from_numpy(inputs), 3)
    assert np.abs(found[0, :2]) == pytest.approx([0.5**0.5, 0.5**0.5], abs=1e-6)
    assert np.sum(found[0, :2]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("copies", [5, 200])
def test_inputs_that_span_fewer_dimensions_have_fewer_vectors(copies) -> None:
    """Two clients with copies of one image each are as far apart as the images, 60°."""
    images = np.zeros((2, 100))
    images[0, 0], images[1, :2] = 1, (0.5, 0.75**0.5)
    bases = [singular_vectors(torch.from_numpy(np.tile(x, (copies, 1))), 3) for x in images]
    assert [basis.shape for basis in bases] == [(1, 100)] * 2
    assert PrincipalAngles()(_points(bases))[0, 1] == pytest.approx(60, abs=1e-4)


@pytest.mark.parametrize("num", [4, 100])
def test_inputs_of_zeros_are_at_right_angles_to_all_others(num) -> None:
    nothing = singular_vectors(torch.zeros(num, 80, dtype=torch.float64), 3)
    assert nothing.tolist() == [[0.0] * 80]
    assert PrincipalAngles()(_points([nothing, np.eye(3, 80), nothing])).tolist() == [
        [0, 90, 0],
        [90, 0, 90],
        [0, 90, 0],
    ]
    assert PrincipalAngles()(_points([nothing, nothing])).tolist() == [[0, 0], [0, 0]]


def test_labels_with_one_direction_span_one_dimension() -> None:
    """The same direction twice, but for rounding to float32, is no second one."""
    x, y = _bases(1, p=2)[0]
    twice = np.stack([x, x + 1e-8 * y])
    assert PrincipalAngles()(_points([twice, y[None]]))[0, 1] == pytest.approx(90, abs=1e-4)


def test_the_smallest_angle_depends_on_the_subspace_alone() -> None:
    bases = _bases(2)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    turned = [bases[0], turn @ bases[1]]
    assert PrincipalAngles()(_points(bases)) == pytest.approx(PrincipalAngles()(_points(turned)))
    entries = PrincipalAngles("entries")
    assert entries(_points(bases))[0, 1] != pytest.approx(entries(_points(turned))[0, 1])


def test_pacfl_with_the_largest_angle_is_fedavg_and_with_none_is_local(tiny_run, known_run) -> None:
    one = "algorithm={name: pacfl, clustering: {partition: {linkage: average, threshold: 90}}}"
    assert sha(tiny_run(one)) == sha(known_run())
    each = "algorithm={name: pacfl, clustering: {partition: {linkage: average, threshold: 0}}}"
    assert sha(tiny_run(each, "participation=1")) == sha(
        tiny_run("algorithm=local", "participation=1")
    )


def test_clove_with_one_model_is_fedavg(tiny_run, known_run) -> None:
    assert sha(tiny_run("algorithm={name: clove, number: 1}")) == sha(known_run())


FLEXCFL = "{name: flexcfl, clustering: {embed: {number: 2}, partition: {number: 2}}}"


@pytest.mark.parametrize("algorithm", ["{name: clove, number: 2}", PACFL, FLEXCFL])
def test_groups_with_labels_of_their_own_are_found(tiny_run, algorithm) -> None:
    split = "split={name: label_groups, clients: 8, groups: 2}"
    result = tiny_run(f"algorithm={algorithm}", split, "rounds=4", "participation=1")
    assert result.summary["ari"] == 1.0


def test_more_clusters_must_have_a_better_silhouette() -> None:
    losses = np.array([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1], [0.0, 1.1], [1.1, 0.0]])
    assert best_number(losses, largest=5) == 2


def test_one_client_is_one_cluster() -> None:
    assert best_number(np.array([[0.5, 1.0]]), largest=2) == 1


def test_pacfl_draws_its_cohort_whatever_the_clusters(tiny_run) -> None:
    """Half of eight clients train in a round, in two clusters as in one."""
    split = "split={name: label_groups, clients: 8, groups: 2}"
    result = tiny_run(f"algorithm={PACFL}", split, "rounds=2", "participation=0.5")
    assert result.rounds["cohort_size"].tolist() == [4, 4]


SHARED = "{name: flhc, rounds_before: 2, cohort_size: joint, shared_layers: %d%s}"
TWO = ", clustering: {partition: {name: kmeans, number: 2}}"


class TestSharedLayers:
    def test_all_of_them_are_fedavg(self, tiny_run, known_run) -> None:
        all_shared = tiny_run(f"algorithm={SHARED % (2, TWO)}")
        assert sha(all_shared) == sha(known_run())
        assert all_shared.summary["clusters"] == 2
        assert sha(tiny_run(f"algorithm={SHARED % (1, TWO)}")) != sha(known_run())

    @pytest.mark.parametrize("change", ["server_lr=0.5", "unheard=stale"])
    def test_have_the_same_bits_in_all_rows(self, tiny_run, change) -> None:
        """Two clusters, a newcomer that waits for one, holdout clients."""
        join = "events=[{round: 4, kind: join, clients: [0]}]"
        split = "split={name: dirichlet, clients: 8, alpha: 0.5, min_samples: 2, holdout: 2}"
        overrides = [split, join, f"aggregate.{change}", "participation=0.25", "rounds=5"]
        watched = {"on_round": lambda _row: None}  # so that each round has a checkpoint
        result = tiny_run(f"algorithm={SHARED % (1, TWO)}", *overrides, **watched)
        store = CheckpointStore(RunDirectory(result.path).checkpoints)
        for t in (4, 5):
            checkpoint = store.load_latest(up_to=t)
            assert checkpoint.round == t
            params = checkpoint.state.bank.params
            first, last = params["layers.1.weight"], params["layers.4.weight"]
            assert (first == first[0]).all()
            assert len(last) > 1
            assert not torch.equal(last[0], last[1])

    def test_more_than_there_are_is_refused(self, tiny_run) -> None:
        with pytest.raises(ExperimentError, match=r"at most the 2 layers of this model .*, got 3"):
            tiny_run(f"algorithm={SHARED % (3, '')}")
        with pytest.raises(ExperimentError, match="shared_layers must be 0 with keep_pass"):
            tiny_run("algorithm={name: flhc, keep_pass: true, shared_layers: 1}")


DIGITS = [
    "dataset={name: digits, size: 8}",
    "split={name: label_swap, clients: 20, groups: 4}",
    "model=mlp200",
    "train={lr: 0.1, epochs: 3}",
    "rounds=2",
]


class TestFedClust:
    def test_with_all_layers_is_flhc_before_the_first_round(self, tiny_run) -> None:
        """Weights and updates from a common start have the same L2 distances."""
        stages = "{signature: {name: %s, layers: all}, partition: {linkage: average, threshold: 1}}"
        one, other = (
            tiny_run(f"algorithm={{name: {name}, rounds_before: 0, cohort_size: joint, "
                     f"clustering: {stages % signature}}}", "execution.precision=float64")
            for name, signature in (("fedclust", "weights"), ("flhc", "update"))
        )  # fmt: skip
        assert sha(one) == sha(other)
        assert one.summary["clusters"] > 1

    def test_with_an_infinite_threshold_is_fedavg_and_with_none_is_local(
        self, tiny_run, known_run
    ) -> None:
        key = (
            "algorithm={name: fedclust, clustering: {partition: {linkage: average, threshold: %s}}}"
        )
        assert sha(tiny_run(key % ".inf")) == sha(known_run())
        alone = sha(tiny_run(key % "0", "participation=1"))
        assert alone == sha(tiny_run("algorithm=local", "participation=1"))

    def test_finds_groups_of_labels_and_is_blind_to_swapped_ones(self, tiny_run) -> None:
        """Label skew is the paper's; at the same λ = 1 swapped labels are one cluster."""
        groups = "split={name: label_groups, clients: 20}"
        found, blind = (
            tiny_run(*DIGITS, split, "algorithm=fedclust") for split in (groups, "seed=0")
        )
        assert (found.summary["ari"], found.summary["clusters"]) == (1.0, 5)
        assert (blind.summary["ari"], blind.summary["clusters"]) == (0.0, 1)

    def test_sends_the_last_layer_alone(self, tiny_run) -> None:
        row = tiny_run("algorithm=fedclust", "rounds=1").rounds.iloc[0]
        assert row["bytes_up_signature"] == 6 * (16 * 10 + 10) * 4  # clients, parameters, bytes


class TestFlexCfl:
    NUMBER = "clustering: {embed: {number: 4}, partition: {number: 4}}"

    def test_finds_swapped_labels(self, tiny_run) -> None:
        result = tiny_run(*DIGITS, f"algorithm={{name: flexcfl, {self.NUMBER}}}")
        assert result.summary["ari"] == 1.0

    def test_places_others_by_the_directions_of_founders(self, tiny_run) -> None:
        """16 of 20 clients found the groups, the others train once more at the end of round 1."""
        few = f"algorithm={{name: flexcfl, founders: 16, {self.NUMBER}}}"
        result = tiny_run(*DIGITS, few, "participation=1")
        assert result.rounds["cohort_size"].tolist() == [16, 20]
        assert result.summary["ari"] == 1.0
        up = result.rounds["bytes_up_signature"]
        assert up[0] == 20 * result.rounds["bytes_up_model"][1] / 20

    def test_starts_groups_from_the_mean_of_founders(self, tiny_run) -> None:
        """One group of one batch a client: the pass is a round of FedAvg, to rounding."""
        one = "clustering: {partition: {number: 1}}"
        common = [
            "participation=1",
            "train={lr: 0.1, batch_size: 500}",
            "execution.precision=float64",
        ]
        found = tiny_run(*common, f"algorithm={{name: flexcfl, {one}}}", "rounds=2")
        fedavg = tiny_run(*common, "rounds=3")
        assert found.summary["loss_mean"] == pytest.approx(fedavg.summary["loss_mean"], rel=1e-12)

    def test_groups_attract_each_other(self) -> None:
        """θ = (3, 4) and (0, 2), η_G 1: (θ_1 + θ_2 / 2) / (1 + 1/2) and (θ_2 + θ_1 / 5) / 1.2."""
        rows = torch.tensor([[3.0, 4.0], [0.0, 2.0], [7.0, 7.0]])
        state = FlhcState(ModelBank({"w": rows}, np.array([0, 1, 2])), np.array([0, 1, -1]))
        after = FlexCfl(eta_g=1.0)._attracted(state).bank.params["w"]
        expected = torch.tensor([[2.0, 10 / 3], [0.5, 2.8 / 1.2], [7.0, 7.0]])
        torch.testing.assert_close(after, expected)

    @pytest.mark.parametrize("rounds", [2, 3])
    def test_groups_attract_each_other_from_the_round_after_the_clustering(
        self, tiny_run, rounds
    ) -> None:
        """Whether round 2 is chosen for it or found: with steady -1 steps are steady from 2 on."""
        common = f"algorithm={{name: flexcfl, {self.NUMBER}, eta_g: 0.5}}"
        auto = "algorithm.recluster={when: auto, steady: -1}"
        chosen, found, apart = (
            tiny_run(common, *rest, f"rounds={rounds}")
            for rest in (
                ["algorithm.rounds_before=2"],
                ["algorithm.rounds_before=1", auto],
                ["algorithm.rounds_before=1", auto, "algorithm.eta_g=0"],
            )
        )
        assert [list(read_clusterings(run.path)) for run in (chosen, found, apart)] == [[2]] * 3
        assert sha(found) == sha(chosen)
        assert (sha(found) == sha(apart)) == (rounds == 2)


class TestHypCluster:
    START = "algorithm={name: ifca, number: 2, start: clients}"

    def test_starts_from_models_of_clients(self) -> None:
        """(w x - y)² with x (1, 0), y 0, 4, 5, from w 0: steps of 0.5 reach y exactly.

        The model of client 0 fits client 2 worst, whose model is the second.
        """
        fed = line_federation([(1, 0)] * 3, [0, 4, 5], [1, 1, 1], [[0, 0], [9, 9]], lr=0.5)
        state = Ifca(number=2, start="clients", start_clients=3).init(fed).state
        assert state.bank.params["w"][:, 0].tolist() == [0, 5]
        assert Ifca(number=2).init(fed).state.bank.params["w"][1].tolist() == [9, 9]

    def test_a_client_whose_loss_is_not_known_is_not_the_farthest(self) -> None:
        """Clients 0 and 2 are far from each other; client 1 is taken if no other is left."""
        losses = np.array([[0.1, 9.0, 3.0], [np.nan] * 3, [3.0, 9.0, 0.1]])
        assert farthest(losses, 2).tolist() == [0, 2]
        assert farthest(losses, 3).tolist() == [0, 2, 1]

    def test_a_client_without_examples_has_no_model(self) -> None:
        """A step of 0.1 from (0.5, -0.25) on (x, y): + 0.1 (y - 0.5 x + 0.25) (x, 1)."""
        fed = linear_federation([[], [(1, 2)], [], [(1, 5)]], Training(lr=0.1))
        state = Ifca(number=2, start="clients", start_clients=4).init(fed).state
        slopes = state.bank.params["slope.weight"].flatten().tolist()
        assert slopes == pytest.approx([0.5 + 0.175, 0.5 + 0.475])

    def test_too_few_clients_that_train_are_refused_before_the_run(self) -> None:
        """Three of four clients have two examples each, the first has none."""
        pairs, start = [[], *[[(1, 2)] * 2] * 3], Ifca(number=3, start="clients")
        start.require(linear_federation(pairs, Training(batch_size=2, drop_last=True)))
        message = "needs the models of 3 clients, and 0 of those drawn .* lower train.batch_size"
        with pytest.raises(ExperimentError, match=message):
            start.require(linear_federation(pairs, Training(batch_size=3, drop_last=True)))
        with pytest.raises(ExperimentError, match=r"and 2 of those .* raise algorithm.start_cl"):
            start.require(linear_federation([[], *pairs[:3]], Training()))

    def test_of_one_model_is_fedavg(self, tiny_run, known_run) -> None:
        assert sha(tiny_run(self.START, "algorithm.number=1")) == sha(known_run())

    def test_counts_what_it_sends(self, tiny_run) -> None:
        """6 clients train a model each, and judge those of all."""
        row = tiny_run(self.START, "rounds=1").rounds.iloc[0]
        model = (64 * 16 + 16 + 16 * 10 + 10) * 4
        assert row["bytes_up_signature"] == 6 * model
        assert row["bytes_down_signature"] == (6 + 6 * 6) * model

    def test_refuses_what_it_has_no_use_for(self, tiny_run) -> None:
        with pytest.raises(ExperimentError, match="it needs restarts 1 and own all, got 3"):
            tiny_run(self.START, "algorithm.restarts=3")
        with pytest.raises(ExperimentError, match="start_clients must be at least the 2 models"):
            tiny_run(self.START, "algorithm.start_clients=1")
