"""The order of configurations: the one rule by which terminal, tables, pages and figures choose."""

import pandas as pd

DECIMALS = 12  # of a mean over seeds: what differs by less is equal


def candidates(missing: "pd.Series[int]") -> "pd.Series[bool]":
    """True for the configurations among which the best is chosen.

    These are the complete ones; where none is complete, all of them.

    Args:
        missing: how many rows of each configuration failed or did not finish.

    >>> candidates(pd.Series([0, 2])).tolist(), candidates(pd.Series([1, 2])).tolist()
    ([True, False], [True, True])
    """
    is_complete = missing == 0
    return is_complete | (not is_complete.any())


def ranks(
    values: "pd.Series[float]", missing: "pd.Series[int]", is_maximised: bool
) -> "pd.Series[int]":
    """The rank of each configuration, 1 is best; equal values share a rank.

    Configurations that are no candidates rank after all candidates.

    >>> ranks(pd.Series([0.9, 0.7, 0.8, 0.8]), pd.Series([1, 0, 0, 0]), True).tolist()
    [4, 3, 1, 1]
    """
    is_candidate = candidates(missing)
    own = values.round(DECIMALS).groupby(is_candidate).rank("min", ascending=not is_maximised)
    return (own + is_candidate.sum() * ~is_candidate).astype(int)
