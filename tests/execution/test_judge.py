"""What an algorithm may ask clients beside training: how good models are on their own data."""

import numpy as np
import pytest
import torch

from flray.client.tasks import Judge
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.execution import federation as federation_module
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, load_params
from flray.models.mixing import HeldModels
from flray.runs.assemble import build_federation, start_executor
from flray.runs.preparing import prepare

from scenarios import TINY


def federation(*overrides: str) -> Federation:
    experiment = parse_experiment(override(TINY, overrides))
    parts = prepare(experiment)
    return build_federation(experiment, parts, start_executor(parts))


def two_models(fed: Federation) -> ModelBank:
    """The initial model, and one that is not it; nobody uses the second."""
    params = {name: torch.cat([leaf, leaf.flip(-1)]) for name, leaf in fed.initial.items()}
    return ModelBank(params, np.zeros(fed.num_clients, np.int64))


@pytest.mark.parametrize("part", ["train", "validation"])
def test_judgement_is_the_mean_over_a_clients_own_examples(part) -> None:
    fed = federation("split.validation=0.3")
    bank, host = two_models(fed), fed.executor.host
    found = fed.judge(bank, Cohort(1, fed.clients), part)
    assert found.loss.shape == (6, 2)
    assert np.abs(found.loss[:, 0] - found.loss[:, 1]).max() > 1e-3
    for k, i in enumerate(found.clients):
        ids = getattr(host.timeline.at(1), part)[i]
        x, y = host.examples.batch(torch.from_numpy(ids))
        for u in range(2):
            load_params(host.module, bank.row(u))
            with torch.no_grad():
                logits = host.module.eval()(x)
            loss = torch.nn.functional.cross_entropy(logits, y).item()
            assert found.loss[k, u] == pytest.approx(loss, abs=1e-6)
            assert found.accuracy[k, u] == pytest.approx(
                float((logits.argmax(1) == y).float().mean())
            )


def test_judgement_does_not_depend_on_blocks() -> None:
    found = [
        federation(f"execution.block={size}").judge(
            two_models(federation()), Cohort(1, np.arange(6)), "train"
        )
        for size in (1, 4)
    ]
    assert np.array_equal(found[0].loss, found[1].loss)


def test_very_many_clients_are_judged_in_larger_blocks(monkeypatch) -> None:
    """A block of two, or half of the clients at once: the same numbers."""
    fed = federation("execution.block=2")
    few = fed.judge(two_models(fed), Cohort(1, fed.clients), "train")
    sizes = []
    task = Judge.__call__
    monkeypatch.setattr(federation_module, "FEWEST_BLOCKS", 2)
    monkeypatch.setattr(
        Judge, "__call__", lambda *given: (sizes.append(len(given[3].clients)), task(*given))[1]
    )
    many = fed.judge(two_models(fed), Cohort(1, fed.clients), "train")
    assert sizes == [3, 3]
    assert np.array_equal(few.loss, many.loss)


def test_a_client_without_validation_examples_has_no_loss() -> None:
    fed = federation("split.validation=0")
    found = fed.judge(two_models(fed), Cohort(1, fed.clients), "validation")
    assert np.isnan(found.loss).all()


def test_a_client_without_steps_has_no_part_in_the_training_loss() -> None:
    losses, num_steps = np.array([0.0, 2.0, 4.0]), np.array([0, 1, 3])
    assert Trained(np.arange(3), HeldModels({}), losses, num_steps).metrics() == {"train_loss": 3.0}
    assert Trained(np.arange(1), HeldModels({}), losses[:1], num_steps[:1]).metrics() == {}


def test_a_model_that_hears_nobody_stays_whether_it_is_used_or_not() -> None:
    """Row 0 hears clients 0 and 2, weighted by their examples; nobody chose row 1."""
    fed = federation()
    bank = two_models(fed)
    clients = np.array([0, 2])
    models = {name: torch.cat([leaf + 1, leaf + 3]) for name, leaf in fed.initial.items()}
    trained = Trained(clients, HeldModels(models), np.zeros(2), np.ones(2, np.int64))
    hears = np.zeros((2, fed.num_clients))
    hears[0] = 1.0
    mixed = fed.mix_rows(hears, trained, bank)
    n = fed.num_examples[clients] / fed.num_examples[clients].sum()
    for name, leaf in fed.initial.items():
        expected = leaf[0] + 1 * n[0] + 3 * n[1]
        assert torch.allclose(mixed.params[name][0], expected, atol=1e-6)
        assert torch.equal(mixed.params[name][1], bank.params[name][1])
    assert np.array_equal(mixed.owner, bank.owner)
