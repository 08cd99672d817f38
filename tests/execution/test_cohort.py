"""How many clients take part in a round."""

from flray.execution.cohort import cohort_size


def test_a_percentage_of_a_hundred_clients_is_that_many() -> None:
    """int(0.29 * 100) is 28: floating point puts the product below the whole number."""
    percents = list(range(1, 101))
    assert [cohort_size(100, percent / 100) for percent in percents] == percents
