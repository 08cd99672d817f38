import numpy as np
import pytest

from flray.clustering.relations import Kernel, Threshold

D = np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 2.0], [4.0, 2.0, 0.0]])


def test_neighbours_are_strictly_nearer_than_gamma():
    assert Threshold(2.0)(D).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert Threshold(2.1)(D).tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


def test_everybody_is_nearer_than_infinity_and_nobody_nearer_than_next_to_nothing():
    assert Threshold(np.inf)(D).tolist() == np.ones((3, 3)).tolist()
    assert Threshold(1e-300)(D).tolist() == np.eye(3).tolist()


def test_kernel_strengths_by_hand():
    """Distances 1, 2, 4: median 2, so exp(-1/8), exp(-1/2), exp(-2)."""
    strengths = [np.exp(-1 / 8), np.exp(-1 / 2), np.exp(-2)]
    for kernel in (Kernel(), Kernel("median"), Kernel(2.0)):
        R = kernel(D)
        assert [R[0, 1], R[1, 2], R[0, 2]] == pytest.approx(strengths)
    R = Kernel(1.0)(D)
    assert [R[0, 1], R[1, 2], R[0, 2]] == pytest.approx([np.exp(-0.5), np.exp(-2), np.exp(-8)])


def test_strengths_below_the_cutoff_are_zero():
    R = Kernel(2.0, cutoff=0.3)(D)
    assert R[0, 2] == 0
    assert R[1, 2] == pytest.approx(np.exp(-1 / 2))
    assert Kernel(2.0, cutoff=1.0)(D).tolist() == np.eye(3).tolist()


def test_the_kernel_of_coinciding_clients_is_its_limit():
    coinciding = np.zeros((4, 4))
    coinciding[3, :3] = coinciding[:3, 3] = 5.0  # 3 of 6 pairs at 0: the median is 2.5
    assert Kernel()(coinciding)[0, 3] == pytest.approx(np.exp(-2))
    coinciding = np.zeros((5, 5))
    coinciding[4, :4] = coinciding[:4, 4] = 5.0  # 6 of 10: the median is 0
    assert Kernel()(coinciding).tolist() == (coinciding == 0).astype(float).tolist()
    assert Kernel()(np.zeros((1, 1))).tolist() == [[1.0]]


def test_a_kernel_far_too_narrow_is_the_identity_without_a_warning(recwarn):
    assert Kernel(1e-200)(D).tolist() == np.eye(3).tolist()
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Threshold(0.0), "gamma must be > 0, got 0.0"),
        (lambda: Threshold(-1.0), "gamma must be > 0, got -1.0"),
        (lambda: Threshold(np.nan), "gamma must be > 0, got nan"),
        (lambda: Kernel(0.0), "sigma must be > 0 or median, got 0.0"),
        (lambda: Kernel(np.nan), "sigma must be > 0 or median, got nan"),
        (lambda: Kernel(cutoff=-0.1), "cutoff must lie between 0 and 1, got -0.1"),
        (lambda: Kernel(cutoff=1.5), "cutoff must lie between 0 and 1, got 1.5"),
    ],
)
def test_bad_fields_are_named_with_their_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()
