"""Scores from sums of terms equal scikit-learn's, per client."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from flray.client.scores import SCORES

NUM, CLASSES = 40, 4


def _scored(name: str, output: torch.Tensor, targets: torch.Tensor) -> float:
    """Terms of single examples, added in two parts, as hosts and servers do."""
    score = SCORES[name]()
    terms = score.terms(output, targets).numpy()
    sums = terms[:13].sum(0) + terms[13:].sum(0)
    return float(score.value(sums[None])[0])


@pytest.fixture
def classified() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    # Class 3 never occurs in the targets
    return (
        torch.randn(NUM, CLASSES, generator=rng),
        torch.randint(CLASSES - 1, (NUM,), generator=rng),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", lambda y, p: metrics.accuracy_score(y, p.argmax(1))),
        ("macro_f1", lambda y, p: metrics.f1_score(y, p.argmax(1), average="macro")),
        (
            "perplexity",
            lambda y, p: np.exp(
                metrics.log_loss(
                    y, torch.tensor(p).double().softmax(1).numpy(), labels=range(CLASSES)
                )
            ),
        ),
    ],
)
def test_scores_of_classes_equal_sklearn(name, expected, classified):
    output, targets = classified
    assert _scored(name, output, targets) == pytest.approx(
        expected(targets.numpy(), output.numpy()), rel=1e-6
    )


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
    assert _scored(name, output, targets) == pytest.approx(
        expected(targets.double().numpy(), output.double().numpy()), rel=1e-9
    )


def test_rmse_is_the_root_of_the_mean_over_all_targets():
    output, targets = torch.tensor([[1.0, 5.0], [2.0, 2.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    assert _scored("rmse", output, targets) == 2.0  # errors 0, 4, 0, 0: root of 16 / 4


def test_a_client_without_examples_has_no_score():
    for name, cls in SCORES.items():
        terms = cls().terms(
            torch.zeros(1, 2),
            torch.zeros(1, dtype=torch.int64) if cls.needs_classes else torch.zeros(1, 2),
        )
        assert np.isnan(cls().value(np.zeros((1, terms.shape[1])))).all(), name
