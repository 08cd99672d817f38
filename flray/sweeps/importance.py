"""What the samples of a sweep say about each key: how much of the metric's variance it explains.

Used for sweeps whose values were drawn or suggested; a grid shows it in its heatmaps.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FEWEST_SAMPLES = 10
LOG_RATIO = 20  # largest to smallest value from which a number is taken by its logarithm


def importances(samples: pd.DataFrame, metric: "pd.Series[float]") -> "pd.Series[float]":
    """The share of the metric's variance that each column explains by itself and with others.

    Shares sum to 1, the largest comes first. They are those of Optuna: Hutter, Hoos, Leyton-Brown:
    An efficient approach for assessing hyperparameter importance (fANOVA). ICML 2014. Empty for
    fewer than ten samples, for one column, or where the metric does not vary. Equal samples give
    equal shares: the forest behind them has a fixed seed.

    Args:
        samples: A row for each sample, numbers or text; rows with gaps are left out.
        metric: The metric of each sample, in the order of the samples.
    """
    samples = samples.loc[:, samples.nunique() > 1].dropna()
    values = metric.loc[samples.index]
    if len(samples) < FEWEST_SAMPLES or len(samples.columns) < 2 or values.nunique() < 2:
        return pd.Series(dtype=float)
    import optuna  # a second to import, and seldom needed

    distributions = {str(key): _distribution(samples[key]) for key in samples}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a new study is an INFO of its own
    try:
        study = optuna.create_study()
        for row, value in zip(samples.to_dict("records"), values, strict=True):
            params = {str(key): cell for key, cell in row.items()}
            trial = optuna.trial.create_trial(
                params=params, distributions=distributions, value=float(value)
            )
            study.add_trial(trial)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return pd.Series(shares).sort_values(ascending=False, kind="stable")


def _distribution(column: "pd.Series[float]") -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if not pd.api.types.is_numeric_dtype(column):
        return CategoricalDistribution(column.unique().tolist())
    low, high = float(np.min(column)), float(np.max(column))
    return FloatDistribution(low, high, log=low > 0 and high > LOG_RATIO * low)
