"""The order of configurations, and the simplest of those about as good as the best."""

import pandas as pd
import pytest

from flray.sweeps.ranking import ranks, simplest

LOSS = "validation_loss_mean"


def frame(**columns: list[float | None]) -> pd.DataFrame:
    return pd.DataFrame(columns, dtype=float)


COMPLETE = pd.Series([0, 0, 0, 0])


def test_ties_are_broken_by_validation_loss_then_by_fewer_clusters() -> None:
    """The first has the best metric, the others tie; the second has the least loss of these."""
    tied = frame(x=[0.9, 0.8, 0.8, 0.8], **{LOSS: [9.0, 0.1, 0.2, 0.2]}, clusters=[9, 9, 3, 2])
    assert ranks(tied, "x", COMPLETE, True).tolist() == [1, 2, 4, 3]
    assert ranks(tied, "x", COMPLETE, False).tolist() == [4, 1, 3, 2]
    assert ranks(tied[["x", "clusters"]], "x", COMPLETE, True).tolist() == [1, 4, 3, 2]
    assert ranks(tied[["x"]], "x", COMPLETE, True).tolist() == [1, 2, 2, 2]


def test_a_loss_that_is_not_known_or_differs_by_rounding_decides_nothing() -> None:
    tied = frame(x=[0.3, 0.1 + 0.2, 0.3, 0.3], **{LOSS: [None, 0.2, 0.2 + 1e-15, 0.5]})
    assert ranks(tied, "x", COMPLETE, True).tolist() == [4, 1, 1, 3]


@pytest.mark.parametrize(("error", "expected"), [(0.0, 0), (0.01, 1), (0.02, 2), (0.5, 3)])
def test_the_simplest_has_the_fewest_clusters_within_one_standard_error(error, expected) -> None:
    found = frame(x=[0.90, 0.89, 0.88, 0.70], clusters=[8, 6, 4, 1])
    assert simplest(found, "x", COMPLETE, True, error) == expected
    assert simplest(found.assign(x=-found["x"]), "x", COMPLETE, False, error) == expected


def test_of_several_simplest_the_better_one_is_taken_and_no_incomplete_one() -> None:
    found = frame(x=[0.90, 0.87, 0.88, 0.89], clusters=[8, 4, 4, 1])
    assert simplest(found, "x", pd.Series([0, 0, 0, 1]), True, 0.05) == 2
