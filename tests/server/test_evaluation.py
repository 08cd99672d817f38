import numpy as np
import pytest
import torch

from flray.engines.training import Training
from flray.execution.federation import Federation
from flray.models import MODELS
from flray.models.bank import ModelBank, build_seeded, params_of, stack
from flray.server.evaluation import distinct, score_clients

from scenarios import federation_over, host_over, noise_dataset, ragged_split, recorded


def federation(dropout: float = 0.0) -> tuple[Federation, list]:
    split = ragged_split((1, 3, 9))
    modules = [
        build_seeded(lambda: MODELS["mlp200"]((1, 8, 8), 10, hidden=16, dropout=dropout), seed)
        for seed in (0, 1)
    ]
    host = host_over(modules[0], noise_dataset(13, (1, 8, 8)), split)
    return federation_over(host, Training()), modules


def test_grouped_scores_are_those_of_each_client_alone() -> None:
    fed, modules = federation(dropout=0.5)
    bank = ModelBank(stack([dict(params_of(m)) for m in modules]), np.array([0, 1, 0]))
    part = (np.array([2, 5]), np.array([5, 7, 8]), np.array([0, 2, 12]))  # shared examples too
    scores = score_clients(fed, bank, np.arange(3), part)
    examples = fed.executor.host.examples
    for i, ids in enumerate(part):
        module = build_seeded(
            lambda: MODELS["mlp200"]((1, 8, 8), 10, hidden=16), int(bank.owner[i])
        )
        x, y = examples.batch(torch.from_numpy(ids))
        with torch.no_grad():
            logits = module.eval()(x)
        assert scores.correct[i] == int((logits.argmax(1) == y).sum())
        assert scores.total[i] == len(ids)
        expected = torch.nn.functional.cross_entropy(logits, y).item()
        assert np.isclose(scores.loss[i], expected, atol=1e-6)


def test_an_example_is_predicted_once_for_each_model() -> None:
    fed, modules = federation()
    bank = ModelBank(stack([dict(params_of(m)) for m in modules]), np.array([0, 1, 0]))
    fed, calls = recorded(fed)
    part = (np.array([1, 2]), np.array([1, 2]), np.array([2, 3]))
    score_clients(fed, bank, np.arange(3), part)
    ((jobs,),) = (call.jobs for call in calls)
    assert [(job.row, job.examples.tolist()) for job in jobs] == [(0, [1, 2, 3]), (1, [1, 2])]


@pytest.mark.parametrize("top", [40, 100_000])  # many for their range, and few
def test_examples_that_clients_share_are_found_as_sorting_finds_them(top: int) -> None:
    rng = np.random.default_rng(0)
    joined = np.concatenate([rng.choice(top, 20, replace=False) for _ in range(3)])
    ids, positions = distinct(joined)
    assert ids.tolist() == sorted(set(joined.tolist()))
    assert len(ids) < 60 or top > 40
    assert ids[positions].tolist() == joined.tolist()
    assert [values.tolist() for values in distinct(np.empty(0, np.int64))] == [[], []]
