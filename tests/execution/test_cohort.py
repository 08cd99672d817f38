"""How many clients take part in a round."""

from flray.execution.cohort import cohort_size


def test_a_percentage_of_a_hundred_clients_is_that_many() -> None:
    """int(0.29 * 100) is 28: floating point puts the product below the whole number."""
    percents = list(range(1, 101))
    assert [cohort_size(100, percent / 100) for percent in percents] == percents


def test_a_run_has_cohorts_of_that_size(tiny_run) -> None:
    result = tiny_run("split={name: iid, clients: 100}", "participation=0.29", "rounds=1")
    assert result.rounds["cohort_size"].tolist() == [29]
