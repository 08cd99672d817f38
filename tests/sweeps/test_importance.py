"""What samples say about each key."""

import numpy as np
import pandas as pd
import pytest

from flray.sweeps.importance import importances


def samples(number: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "lr": 10 ** rng.uniform(-3, 0, number),
            "linkage": rng.choice(["ward", "single"], number),
            "epochs": rng.integers(1, 6, number),
        }
    )


def test_the_key_that_decides_explains_the_variance() -> None:
    drawn = samples()
    found = importances(drawn, np.log10(drawn["lr"]))
    assert found.index[0] == "lr"
    assert found["lr"] > 0.9
    assert found.sum() == pytest.approx(1)
    by_name = importances(drawn, (drawn["linkage"] == "ward").astype(float))
    assert by_name.index[0] == "linkage"


def test_the_same_samples_give_the_same_shares_and_rows_with_gaps_are_left_out() -> None:
    drawn = samples()
    metric = drawn["lr"] + drawn["epochs"]
    found = importances(drawn, metric)
    gap = pd.concat([drawn, pd.DataFrame([{"lr": np.nan, "linkage": None}])], ignore_index=True)
    again = importances(gap, pd.concat([metric, pd.Series([99.0])], ignore_index=True))
    assert found.to_dict() == again.to_dict()


def test_few_samples_one_key_or_an_equal_metric_say_nothing() -> None:
    drawn = samples()
    assert importances(drawn[:9], drawn["lr"][:9]).empty
    assert importances(drawn[["lr"]], drawn["lr"]).empty
    assert importances(drawn, pd.Series(np.ones(len(drawn)))).empty
