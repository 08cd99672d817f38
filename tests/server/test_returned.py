"""What algorithms and scores of one's own return or raise is reported with their name."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import flray
from flray.algorithms.algorithm import Outcome
from flray.algorithms.fedavg import FedAvg
from flray.client.scores import MeanScore
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError
from flray.runs.rehearsal import describe

from scenarios import TINY

WRONG = {
    "no outcome of init": (
        *("init", "w"),
        r"FedAvg.init must return Outcome\(state, metrics, clusterings\), got str",
    ),
    "no outcome": ("round", None, r"FedAvg.round must return Outcome\(.*, got NoneType"),
    "a metric that is a tensor": (
        *("round", Outcome("w", {"norm": torch.ones(())})),
        r"numbers as metrics, got Tensor for 'norm'; .* after float\(...\)",
    ),
    "a metric that is text": ("round", Outcome("w", {"note": "hi"}), "got str for 'note'"),
    "ids alone": (
        *("cohort", np.arange(2)),
        r"FedAvg.cohort must return Cohort\(t, clients\), got ndarray of shape \(2,\)",
    ),
    "no bank": ("deploy", None, "FedAvg.deploy must return a ModelBank, got NoneType"),
    "too few labels": (
        *("partition", np.zeros(2, int)),
        r"FedAvg.partition must return a NumPy array \(6,\) .*, got ndarray of shape \(2,\)",
    ),
    "labels in a list": ("partition", [0] * 6, "array .* of whole numbers, .*, got list"),
    "no data": (
        *("init", Outcome({"f": len})),
        "cannot checkpoint a builtin_function_or_method at state/f: state is made of dataclasses",
    ),
}


@pytest.mark.parametrize(("method", "returned", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_result_of_a_method_is_refused_by_its_name(
    method, returned, message, monkeypatch
) -> None:
    monkeypatch.setattr(FedAvg, method, lambda *_: returned)
    with pytest.raises(ExperimentError, match=message):
        flray.run(TINY, rounds=1)


TAKEN = [
    *("round", "cohort_size", "accuracy_mean", "holdout_loss_mean", "tuned_accuracy_se_sample"),
    *("clusters", "clients_evaluated", "ari", "seconds", "seconds_train", "bytes_up_model"),
    *("client_steps", "clustering_clusters", "logged_norm"),
]


@pytest.mark.parametrize("method", ["init", "round"])
def test_a_metric_named_like_a_recorded_column_is_refused_by_its_name(method, monkeypatch) -> None:
    for name in TAKEN:
        outcome = Outcome("w", {"train_loss": 0.5, "norm": 0.5, name: 77.0})
        monkeypatch.setattr(FedAvg, method, lambda *_, outcome=outcome: outcome)
        message = f"^FedAvg.{method} must .*, got '{name}', .* choose another, such as 'my_{name}'$"
        with pytest.raises(ExperimentError, match=message):
            flray.run(TINY, rounds=1, evaluate={"every": 9})


def test_a_metric_with_a_name_of_its_own_is_recorded(monkeypatch) -> None:
    average = FedAvg.round

    def watched(*arguments):
        outcome = average(*arguments)
        return replace(outcome, metrics=outcome.metrics | {"norm": 77.0, "loss": 78.0})

    monkeypatch.setattr(FedAvg, "round", watched)
    result = flray.run(TINY, rounds=2)
    assert result.rounds["norm"].tolist() == [77.0] * 2
    assert result.summary["loss"] == 78.0


class InPlace(FedAvg):
    def round(self, state, cohort, fed):
        outcome = super().round(state, cohort, fed)
        for leaf in state.bank.params.values():
            leaf.mul_(0.9)
        return outcome


class InPlaceAtDeploy(FedAvg):
    def deploy(self, state, clients, fed):
        next(iter(state.bank.params.values())).zero_()
        return super().deploy(state, clients, fed)


@pytest.mark.parametrize(("method", "name"), [(InPlace(), "round"), (InPlaceAtDeploy(), "deploy")])
def test_a_method_that_changes_its_state_in_place_is_refused_by_its_name(method, name) -> None:
    message = (
        rf"^{type(method).__name__}.{name} must not change the state that it is given, and has "
        r"changed state.bank.params.layers.\S+ in place; compute a new tensor"
    )
    with pytest.raises(ExperimentError, match=message):
        flray.run(TINY, algorithm=method, rounds=2)


class Still(FedAvg):
    def gradient(self, grad, w, batch, w0, memo):
        return {name: w[name] - w0[name] for name in w}


@pytest.mark.parametrize("engine", ["loop", "vectorized", "lightning"])
@pytest.mark.parametrize("mark", ["unmarked", "is_affine", "is_stacked"])
def test_a_hook_that_never_calls_grad_is_refused_by_its_name(engine, mark, monkeypatch) -> None:
    monkeypatch.setattr(Still.gradient, mark, True, raising=False)
    message = r"^Still.gradient must call grad\(w, batch\), .* begin it with g = grad\(w, batch\)"
    with pytest.raises(ExperimentError, match=message):
        flray.run(TINY, algorithm=Still(), rounds=1, execution={"engine": engine})


class Forgetful(FedAvg):
    def gradient(self, grad, w, batch, w0, memo):
        grad(w, batch)


class Partial(FedAvg):
    def gradient(self, grad, w, batch, w0, memo):
        return dict(list(grad(w, batch).items())[1:])


class PartialByStart(FedAvg):
    """Leaves out what starts at other values than 0, as all weights do."""

    def gradient(self, grad, w, batch, w0, memo):
        return {name: g for name, g in grad(w, batch).items() if not w0[name].any()}


class PartlyNone(FedAvg):
    def gradient(self, grad, w, batch, w0, memo):
        return {name: g if name.endswith("weight") else None for name, g in grad(w, batch).items()}


NOTHING = "must return a dict of tensors by parameter.* got NoneType"
TOO_LITTLE = r"must return a tensor for each parameter, .* has none for \S+;"


@pytest.mark.parametrize("engine", ["loop", "vectorized", "lightning"])
@pytest.mark.parametrize("mark", ["unmarked", "is_affine", "is_stacked"])
@pytest.mark.parametrize(("method", "message"), [(Forgetful, NOTHING), (Partial, TOO_LITTLE)])
def test_a_hook_that_returns_too_little_is_refused_by_its_name(
    engine, method, message, mark, monkeypatch
) -> None:
    monkeypatch.setattr(method.gradient, mark, True, raising=False)
    with pytest.raises(ExperimentError, match=f"^{method.__name__}.gradient {message}"):
        flray.run(TINY, algorithm=method(), rounds=1, execution={"engine": engine})


@pytest.mark.parametrize("engine", ["loop", "vectorized", "lightning"])
@pytest.mark.parametrize("method", [PartialByStart, PartlyNone])
def test_a_parameter_left_out_by_its_value_or_as_none_is_refused_by_its_name(
    engine, method, monkeypatch
) -> None:
    mark = "is_affine" if engine == "vectorized" else "unmarked"
    monkeypatch.setattr(method.gradient, mark, True, raising=False)
    with pytest.raises(ExperimentError, match=f"^{method.__name__}.gradient {TOO_LITTLE}"):
        flray.run(TINY, algorithm=method(), rounds=1, execution={"engine": engine})


@pytest.mark.parametrize("method", [Still(), Forgetful()])
def test_such_a_hook_is_refused_before_the_run(method) -> None:
    with pytest.raises(ExperimentError, match=f"^{type(method).__name__}.gradient must "):
        describe(parse_experiment(TINY | {"algorithm": method}))


@pytest.mark.parametrize("method", ["init", "cohort", "round", "deploy", "partition"])
def test_an_error_in_a_method_names_the_method_its_line_and_the_error(method, monkeypatch) -> None:
    monkeypatch.setattr(FedAvg, method, lambda *_: {}["nothing"])
    message = rf"^FedAvg.{method} \(test_returned.py, line \d+\): KeyError: 'nothing'$"
    with pytest.raises(ExperimentError, match=message):
        flray.run(TINY, rounds=1)


@dataclass(frozen=True)
class FailingTerms(MeanScore):
    name = "mine"

    def of_examples(self, output, targets):
        return {}["nothing"]


@dataclass(frozen=True)
class FailingValue(MeanScore):
    name = "mine"

    def of_examples(self, output, targets):
        return output[:, 0]

    def value(self, terms):
        return {}["nothing"]


@pytest.mark.parametrize("score", [FailingTerms, FailingValue])
def test_an_error_in_a_score_names_the_score_its_line_and_the_error(score) -> None:
    keys = TINY | {"rounds": 1, "evaluate": {"scores": [score()]}}
    for start in (lambda keys: describe(parse_experiment(keys)), flray.run):
        with pytest.raises(
            ExperimentError, match=r"^score mine \(test_returned.py, line \d+\): KeyE"
        ):
            start(keys)
