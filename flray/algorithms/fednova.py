"""FedNova: FedAvg whose updates are divided by the number of local steps behind them.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020, arXiv 2007.07481. Section 5, with the accumulation vectors a_i
of Section 4.1 for SGD with and without momentum.

A client with more steps moves further, so that FedAvg minimises a mean in which it counts more than
n_i; here every client's update is one normalised gradient, weighted by n_i. With equal numbers of
steps this is FedAvg. Weight decay counts as a part of the gradient.

Deviates: statistics of BatchNorm are no gradients and are averaged as in FedAvg.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flray.algorithms.algorithm import Outcome
from flray.algorithms.fedavg import FedAvg, FedAvgState
from flray.data.dataset import Ids
from flray.engines.training import Training
from flray.errors import ExperimentError
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank
from flray.models.mixing import MixingRow, Relation


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg in which the update of a client is divided by ||a_i||_1, its effective steps.

    The mean of normalised updates is scaled by tau_eff, the mean number of steps, so that it is as
    long as FedAvg's. Needs SGD, with or without momentum, and `aggregate.unheard: ignore`. It has
    no keys:

        algorithm: fednova

    >>> FedNova().partition(FedAvgState(ModelBank({}, np.array([0, 0]))))  # one model, as FedAvg
    array([0, 0])
    """

    def require(self, fed: Federation) -> None:
        require_sgd(fed.training, "fednova")
        if fed.aggregation.unheard != "ignore":
            raise ExperimentError(
                "fednova normalises the updates of the clients it hears, others have none: set "
                f"aggregate.unheard=ignore, got {fed.aggregation.unheard}"
            )

    def round(self, state: FedAvgState, cohort: Cohort, fed: Federation) -> Outcome[FedAvgState]:
        trained = fed.train(state.bank, cohort, self.gradient)
        fed.count_models(state.bank, cohort, trained)
        heard = trained.with_steps()
        if not len(heard.clients):
            return Outcome(state, trained.metrics())
        with fed.meter.phase("mix"):
            moved = fed.aggregated([normalised_row(heard, fed)], heard.models, state.bank)
        buffers = {name: leaf for name, leaf in state.bank.params.items() if name in fed.buffers}
        statistics = ModelBank(buffers, state.bank.owner)
        means = fed.mix(Relation.joint(fed.num_clients), heard, statistics)
        bank = replace(moved, params=moved.params | means.params)
        return Outcome(FedAvgState(bank), trained.metrics())


def normalised_row(heard: Trained, fed: Federation) -> MixingRow:
    """Sec. 5: x' = x - tau_eff sum_i p_i d_i, written as a row of A X + B W."""
    n = fed.weights(heard.clients)
    p = n / n.sum()  # p_i = n_i / n
    a = effective_steps(heard.num_steps, fed.training.momentum)  # ||a_i||_1
    tau_eff = np.average(a, weights=n)  # sum_i p_i ||a_i||_1, so that FedAvg's length is kept
    # d_i = (x - x_i) / ||a_i||_1, hence x' = sum_i p_i (x + tau_eff / ||a_i||_1 (x_i - x))
    stretch = tau_eff / a
    eta = fed.aggregation.mean_weight
    left = 1 - eta + eta * float(p @ (1 - stretch))  # 1 - sum, exact where steps are equal
    kept = np.flatnonzero([left])
    return MixingRow(np.arange(len(p)), eta * p * stretch, kept, np.array([left])[kept])


def effective_steps(num_steps: Ids, momentum: float) -> NDArray[np.float64]:
    """How far steps with momentum go along a constant gradient, in steps without: ||a_i||_1.

    Wang 2020, Sec. 4.1: (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho).

    >>> effective_steps(np.array([1, 2, 3]), 0.0), effective_steps(np.array([1, 2, 3]), 0.5)
    (array([1., 2., 3.]), array([1.  , 2.5 , 4.25]))
    """
    tau, rho = num_steps.astype(np.float64), momentum
    return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


def require_sgd(training: Training, method: str) -> None:
    """Refuse an optimiser whose steps are not multiples of gradients."""
    if training.optimizer != "sgd":
        raise ExperimentError(
            f"{method} divides an update by the steps of SGD behind it, which "
            f"train.optimizer={training.optimizer} does not take: set train.optimizer=sgd"
        )
