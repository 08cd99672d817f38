"""The order of configurations: the one rule by which terminal, tables, pages and figures choose."""

from collections.abc import Hashable

import numpy as np
import pandas as pd

from flray.columns import CLUSTERS, VALIDATION_LOSS_MEAN

DECIMALS = 12  # decimals of a mean over seeds; what differs by less is equal
# What decides between equal values of the metric, one after the other; lower is better.
TIE_BREAKERS = (VALIDATION_LOSS_MEAN, CLUSTERS)


def candidates(missing: "pd.Series[int]") -> "pd.Series[bool]":
    """True for the configurations among which the best is chosen.

    These are the complete ones; where none is complete, all of them.

    Args:
        missing: How many rows of each configuration failed or did not finish.

    >>> candidates(pd.Series([0, 2])).tolist(), candidates(pd.Series([1, 2])).tolist()
    ([True, False], [True, True])
    """
    is_complete = missing == 0
    return is_complete | (not is_complete.any())


def ranks(
    configurations: pd.DataFrame, metric: str, missing: "pd.Series[int]", is_maximised: bool
) -> "pd.Series[int]":
    """The rank of each configuration, 1 is best.

    Equal values of the metric are ordered by the validation loss, then by the number of clusters,
    where the configurations have these columns; what is equal in all of them shares a rank.
    Configurations that are no candidates rank after all candidates.

    >>> frame = pd.DataFrame({"x": [0.9, 0.7, 0.8, 0.8, 0.8], "clusters": [1, 1, 5, 2, 2]})
    >>> ranks(frame, "x", pd.Series([1, 0, 0, 0, 0]), True).tolist()
    [5, 4, 3, 1, 1]
    """
    values = configurations[metric].round(DECIMALS)
    keys = [~candidates(missing), -values if is_maximised else values]
    keys += [configurations[c].round(DECIMALS) for c in TIE_BREAKERS if c in configurations]
    rows = np.stack([key.astype(float).fillna(np.inf) for key in keys], axis=1)
    _, order = np.unique(rows, axis=0, return_inverse=True)  # lexicographic
    return pd.Series(order.ravel(), configurations.index).rank(method="min").astype(int)


def simplest(
    configurations: pd.DataFrame,
    metric: str,
    missing: "pd.Series[int]",
    is_maximised: bool,
    error: float,
) -> Hashable:
    """The index of the configuration with the fewest clusters whose metric is within `error` of the
    best; of several such ones, of that with the best rank.

    >>> frame = pd.DataFrame({"x": [0.90, 0.89, 0.80], "clusters": [8, 4, 1]})
    >>> simplest(frame, "x", pd.Series([0, 0, 0]), True, error=0.02)
    1
    """
    order = ranks(configurations, metric, missing, is_maximised)
    best = configurations[metric].iloc[int(np.argmin(order))]
    apart = (configurations[metric] - best).abs()
    is_near = candidates(missing) & (apart.round(DECIMALS) <= error)
    near = configurations[is_near].assign(rank=order)
    first: Hashable = near.sort_values([CLUSTERS, "rank"], kind="stable").index[0]
    return first
