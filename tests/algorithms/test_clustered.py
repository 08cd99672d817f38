"""Clustered methods since 2021: identities, planted groups, equality with libraries."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from flray.algorithms.clove import best_number
from flray.clustering.points import Points
from flray.clustering.subspace import PrincipalAngles
from flray.errors import ExperimentError
from flray.records.checkpoint import CheckpointStore
from flray.records.run_directory import RunDirectory

PACFL = "{name: pacfl, clustering: {partition: {linkage: average, number: 2}}}"


def sha(result) -> str:
    return result.summary["params_sha256"]


def _bases(num: int, p: int = 3, d: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.linalg.qr(rng.normal(size=(d, p)))[0].T for _ in range(num)]


def _points(bases: list[np.ndarray]) -> Points:
    owner = np.repeat(np.arange(len(bases)), [len(basis) for basis in bases])
    return Points(np.arange(len(bases)), torch.from_numpy(np.concatenate(bases)), owner)


def test_smallest_principal_angle_is_scipys() -> None:
    bases = _bases(4)
    D = PrincipalAngles()(_points(bases))
    for i in range(4):
        for j in range(i):
            expected = np.rad2deg(subspace_angles(bases[i].T, bases[j].T).min())
            assert D[i, j] == pytest.approx(expected)


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


@pytest.mark.parametrize("algorithm", ["{name: clove, number: 2}", PACFL])
def test_groups_with_labels_of_their_own_are_found(tiny_run, algorithm) -> None:
    split = "split={name: label_groups, clients: 8, groups: 2}"
    result = tiny_run(f"algorithm={algorithm}", split, "rounds=4", "participation=1")
    assert result.summary["ari"] == 1.0


def test_more_clusters_must_have_a_better_silhouette() -> None:
    losses = np.array([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1], [0.0, 1.1], [1.1, 0.0]])
    assert best_number(losses, largest=5) == 2


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
        result = tiny_run(f"algorithm={SHARED % (1, TWO)}", *overrides)
        store = CheckpointStore(RunDirectory(result.path).checkpoints)
        for t in (4, 5):
            params = store.load_latest(up_to=t).state.bank.params
            first, last = params["layers.1.weight"], params["layers.4.weight"]
            assert (first == first[0]).all()
            assert len(last) > 1
            assert not torch.equal(last[0], last[1])

    def test_more_than_there_are_is_refused(self, tiny_run) -> None:
        with pytest.raises(ExperimentError, match=r"at most the 2 layers of this model .*, got 3"):
            tiny_run(f"algorithm={SHARED % (3, '')}")
        with pytest.raises(ExperimentError, match="shared_layers must be 0 with keep_pass"):
            tiny_run("algorithm={name: flhc, keep_pass: true, shared_layers: 1}")
