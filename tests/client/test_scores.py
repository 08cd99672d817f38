"""Scores from terms of examples equal scikit-learn's, per client."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from flray.client.scores import SCORES, MeanScore, ModuleScore
from flray.client.torch_metric import TorchMetric
from flray.errors import ExperimentError

NUM, CLASSES = 40, 4


def _scored(name: str, output: torch.Tensor, targets: torch.Tensor) -> float:
    """Terms of two batches, put together as a host does."""
    score, middle = SCORES[name](), len(targets) // 3 + 1
    parts = (slice(middle), slice(middle, None))
    batches = [score.terms(output[part], targets[part]) for part in parts]
    return score.value(torch.cat(batches).double().numpy())


@pytest.fixture
def classified() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    # Class 3 never occurs in the targets
    return (
        torch.randn(NUM, CLASSES, generator=rng),
        torch.randint(CLASSES - 1, (NUM,), generator=rng),
    )


def _probabilities(output: np.ndarray) -> np.ndarray:
    return torch.tensor(output).double().softmax(1).numpy()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", lambda y, p: metrics.accuracy_score(y, p.argmax(1))),
        ("macro_f1", lambda y, p: metrics.f1_score(y, p.argmax(1), average="macro")),
        (
            "perplexity",
            lambda y, p: np.exp(metrics.log_loss(y, _probabilities(p), labels=range(CLASSES))),
        ),
        (
            "auroc",
            lambda y, p: np.mean(
                [metrics.roc_auc_score(y == k, _probabilities(p)[:, k]) for k in range(3)]
            ),
        ),
    ],
)
def test_scores_of_classes_equal_sklearn(name, expected, classified):
    output, targets = classified
    found = _scored(name, output, targets)
    assert found == pytest.approx(expected(targets.numpy(), output.numpy()), rel=1e-12)
    assert 0.2 < found < 10  # neither perfect nor nothing


def test_auroc_of_all_classes_and_of_two_is_that_of_sklearn():
    rng = torch.Generator().manual_seed(5)
    output = torch.randn(NUM, 3, generator=rng).round(decimals=1)  # with ties
    targets = torch.arange(NUM) % 3
    probabilities = _probabilities(output.numpy())
    of_three = metrics.roc_auc_score(targets, probabilities, multi_class="ovr")
    assert _scored("auroc", output, targets) == pytest.approx(of_three, rel=1e-12)
    of_two = metrics.roc_auc_score(targets % 2, _probabilities(output[:, :2].numpy())[:, 1])
    assert _scored("auroc", output[:, :2], targets % 2) == pytest.approx(of_two, rel=1e-12)
    assert np.isnan(_scored("auroc", output, 0 * targets))  # a client with one class
    with pytest.raises(ExperimentError, match="one class for each example"):
        SCORES["auroc"]().terms(torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64))


@pytest.mark.parametrize("name", ["accuracy", "macro_f1", "perplexity"])
def test_a_sequence_is_scored_by_its_positions(name, classified):
    output, targets = classified
    in_sequences = _scored(name, output.view(20, 2, CLASSES), targets.view(20, 2))
    assert in_sequences == pytest.approx(_scored(name, output, targets), rel=1e-12)


@pytest.mark.parametrize("shape", [(NUM,), (NUM, 3)])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mae", metrics.mean_absolute_error),
        ("mape", metrics.mean_absolute_percentage_error),
        ("r2", metrics.r2_score),
    ],
)
def test_scores_of_numbers_equal_sklearn(name, expected, shape):
    rng = torch.Generator().manual_seed(1)
    targets = torch.randn(shape, generator=rng) + 5
    output = targets + torch.randn(shape, generator=rng)
    wanted = expected(targets.double().numpy(), output.double().numpy())
    assert _scored(name, output, targets) == pytest.approx(wanted, rel=1e-12)
    if len(shape) == 1:  # a model has a column of outputs even for one number
        assert _scored(name, output[:, None], targets) == pytest.approx(wanted, rel=1e-12)


def test_rmse_is_the_root_of_the_mean_over_all_targets():
    output, targets = torch.tensor([[1.0, 5.0], [2.0, 2.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    assert _scored("rmse", output, targets) == 2.0  # errors 0, 4, 0, 0: root of 16 / 4


def test_r2_of_equal_targets_is_not_defined():
    assert np.isnan(_scored("r2", torch.randn(NUM), torch.ones(NUM)))


@pytest.mark.parametrize(
    ("metric", "options", "expected"),
    [
        (
            "classification.MulticlassCohenKappa",
            {"num_classes": CLASSES},
            lambda y, p: metrics.cohen_kappa_score(y, p.argmax(1)),
        ),
        (
            "classification.MulticlassF1Score",
            {"num_classes": CLASSES, "average": "weighted"},
            lambda y, p: metrics.f1_score(y, p.argmax(1), average="weighted"),
        ),
    ],
)
def test_metrics_of_torchmetrics_see_all_examples_of_a_client(
    metric, options, expected, classified
):
    output, targets = classified
    score = TorchMetric(metric, options)
    wanted = pytest.approx(expected(targets.numpy(), output.numpy()), rel=1e-6)
    for shape in ((NUM,), (NUM // 2, 2)):  # of examples, and of positions of sequences
        parts = zip(
            output.view(*shape, CLASSES).split(7), targets.view(shape).split(7), strict=True
        )
        terms = torch.cat([score.terms(*part) for part in parts])
        assert score.value(terms.numpy()) == wanted
    assert score.higher_is_better


@pytest.mark.parametrize("shape", [(NUM,), (NUM, 3)])
def test_metrics_of_torchmetrics_score_numbers(shape):
    rng = torch.Generator().manual_seed(1)
    targets = torch.randn(shape, generator=rng)
    output = targets + torch.randn(shape, generator=rng)
    score = TorchMetric("regression.ExplainedVariance")
    wanted = metrics.explained_variance_score(targets, output)
    assert score.value(score.terms(output, targets).numpy()) == pytest.approx(wanted, rel=1e-6)
    assert score.name == "explained_variance"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("regression.MeanError",), "torchmetrics.regression.MeanError cannot be used as a score"),
        (("MeanAbsoluteError", {"units": 3}), "Unexpected keyword arguments: `units`"),
        (("classification.MulticlassF1Score",), "num_classes"),
    ],
)
def test_metrics_that_torchmetrics_does_not_have_are_refused(fields, message):
    with pytest.raises(ExperimentError, match=message):
        TorchMetric(*fields)
    wrong = TorchMetric("classification.MulticlassAccuracy", {"num_classes": 9})
    with pytest.raises(ExperimentError, match=r"MulticlassAccuracy failed on outputs \(2, 3\)"):
        wrong.value(wrong.terms(torch.zeros(2, 3), torch.zeros(2).long()).numpy())


def test_a_score_of_the_module_is_the_mean_of_what_the_module_computed():
    score = ModuleScore("within", unit="%", higher_is_better=True)
    assert score.name == "within"
    terms = score.terms(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.zeros(4))
    assert score.value(terms.numpy()) == 0.75


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "NoneType"),
        (torch.ones(()), r"Tensor of the shape \(\)"),
        (torch.ones(3), r"Tensor of the shape \(3,\)"),
        (np.ones(2), "ndarray"),
    ],
)
def test_a_score_of_ones_own_without_a_value_for_each_example_is_refused(returned, got) -> None:
    class Mine(MeanScore):
        name = "mine"

        def of_examples(self, output, targets):
            return returned

    message = f"score mine: expected a tensor with a value for each of 2 examples, got {got}"
    with pytest.raises(ExperimentError, match=message):
        Mine().terms(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_a_score_of_ones_own_without_its_method_is_refused() -> None:
    with pytest.raises(ExperimentError, match="score MeanScore must define of_examples"):
        MeanScore().terms(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
