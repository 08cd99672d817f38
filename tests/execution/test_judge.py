"""What an algorithm may ask clients beside training: how good models are on their own data."""

import numpy as np
import pytest
import torch

from flray.client.tasks import ClientsJob, ExampleLosses, Judge, _means
from flray.execution import federation as federation_module
from flray.execution.federation import Cohort, Federation
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, build_seeded, load_params, params_of, stack
from flray.models.mixing import HeldModels
from flray.models.mlp200 import Mlp200

from scenarios import host_over, noise_dataset, ragged_split, tiny_federation


def two_models(fed: Federation) -> ModelBank:
    """The initial model, and one that is not it; nobody uses the second."""
    params = {name: torch.cat([leaf, leaf.flip(-1)]) for name, leaf in fed.initial.items()}
    return ModelBank(params, np.zeros(fed.num_clients, np.int64))


@pytest.mark.parametrize("part", ["train", "validation"])
def test_judgement_is_the_mean_over_a_clients_own_examples(part) -> None:
    fed = tiny_federation("split.validation=0.3")
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
        tiny_federation(f"execution.block={size}").judge(
            two_models(tiny_federation()), Cohort(1, np.arange(6)), "train"
        )
        for size in (1, 4)
    ]
    assert np.array_equal(found[0].loss, found[1].loss)


def test_very_many_clients_are_judged_in_larger_blocks(monkeypatch) -> None:
    """A block of two, or half of the clients at once: the same numbers."""
    fed = tiny_federation("execution.block=2")
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


def test_a_client_is_judged_to_the_bits_of_its_own_mean() -> None:
    """Of clients with one example and with none too."""
    sizes = (1, 0, 3, 9, 200, 40, 0)
    module = build_seeded(lambda: Mlp200((1, 28, 28), 10, hidden=20), 0)
    host = host_over(
        module, noise_dataset(sum(sizes)), ragged_split(sizes), "vectorized", threads=2
    )
    bank = stack([params_of(build_seeded(lambda: Mlp200((1, 28, 28), 10, 20), n)) for n in (1, 2)])
    judged = Judge("train", 1)(host, bank, ClientsJob(np.arange(len(sizes))))
    losses = ExampleLosses(1)(host, bank, ClientsJob(np.arange(len(sizes))))
    for size, (loss, accuracy), own in zip(sizes, judged, losses, strict=True):
        assert own.loss.shape == (size, 2)
        if size:
            assert loss.tolist() == [own.loss[:, u].copy().mean() for u in range(2)]
            assert loss[0] != loss[1]
            assert (accuracy * size).tolist() == pytest.approx(np.round(accuracy * size).tolist())
        else:
            assert np.isnan([loss, accuracy]).all()


def test_means_of_parts_have_the_bits_of_each_alone() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 300, 50)
    values = rng.exponential(size=(2, sizes.sum()))
    parts = np.split(values, np.cumsum(sizes)[:-1], axis=1)
    expected = np.stack([part.mean(1) if part.size else [np.nan] * 2 for part in parts], axis=1)
    assert np.array_equal(_means(values, sizes), expected, equal_nan=True)


def test_a_client_without_validation_examples_has_no_loss() -> None:
    fed = tiny_federation("split.validation=0")
    found = fed.judge(two_models(fed), Cohort(1, fed.clients), "validation")
    assert np.isnan(found.loss).all()


def test_a_client_without_steps_has_no_part_in_the_training_loss() -> None:
    losses, num_steps = np.array([0.0, 2.0, 4.0]), np.array([0, 1, 3])
    assert Trained(np.arange(3), HeldModels({}), losses, num_steps).metrics() == {"train_loss": 3.0}
    assert Trained(np.arange(1), HeldModels({}), losses[:1], num_steps[:1]).metrics() == {}


def test_a_model_that_hears_nobody_stays_whether_it_is_used_or_not() -> None:
    """Row 0 hears clients 0 and 2, weighted by their examples; nobody chose row 1."""
    fed = tiny_federation()
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
