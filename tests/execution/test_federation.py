"""The federation's own arithmetic, without anything to run on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flray.data.datasets.synthetic import Synthetic
from flray.data.events import make_timeline
from flray.data.global_test import with_global_test
from flray.data.split import Split
from flray.engines.training import plain_gradient
from flray.errors import ClientFailure, ExperimentError
from flray.execution.executor import Failed
from flray.execution.federation import Cohort, Federation, Oracle, Share, nobody
from flray.models.bank import ModelBank
from flray.models.mixing import Relation

from scenarios import least_move, models_at, recorded, same_bits, tiny_federation


def test_of_no_members_nobody_is_sampled() -> None:
    assert tiny_federation().sample(1, nobody()).tolist() == []
    assert len(tiny_federation().sample(1, np.array([3]))) == 1


def test_an_empty_cohort_trains_nobody_and_changes_no_model() -> None:
    fed = tiny_federation()
    bank = fed.initial_bank()
    trained = fed.train(bank, Cohort(1, nobody()), lambda *_: {})
    assert trained.metrics() == {}
    assert fed.meter.counts["client_steps"] == 0
    mixed = fed.mix(Relation.joint(fed.num_clients), trained, bank)
    assert mixed.sha256() == bank.sha256()


def test_a_relation_of_fewer_clients_than_there_are_is_refused() -> None:
    fed = tiny_federation()
    cohort = Cohort(1, fed.clients[:2])
    of_the_cohort = Relation.of_matrix(np.eye(2))
    with pytest.raises(ExperimentError, match=r"relation .* of each of \d+ clients, got 2"):
        fed.average(of_the_cohort, fed.initial_bank(), cohort, plain_gradient)


def test_a_misspelt_name_in_what_clients_run_is_their_failure() -> None:
    fed = tiny_federation()
    message = r"client 0 failed: NameError: name 'undefined' .* \(test_federation.py, line \d+\)"
    with pytest.raises(ClientFailure, match=message):
        fed.map(lambda *_: undefined, Cohort(1, fed.clients[:2]))  # noqa: F821


def own_models(fed: Federation) -> ModelBank:
    """A row for each client, in descending order of the clients."""
    scale = 1 + torch.arange(fed.num_clients) / 10
    params = {k: torch.stack([s * v[0] for s in scale]) for k, v in fed.initial.items()}
    return ModelBank(params, np.arange(fed.num_clients)[::-1].copy())


@pytest.mark.parametrize("clients", [[2], [1, 4], [0, 1, 2, 3, 4]])
def test_only_the_rows_that_the_cohort_uses_are_sent(clients) -> None:
    fed, calls = recorded(tiny_federation())
    bank = own_models(fed)
    cohort = Cohort(1, np.array(clients))
    trained = fed.train(bank, cohort, plain_gradient)
    everybody = fed.train(bank, Cohort(1, np.arange(fed.num_clients)), plain_gradient)
    few, all_rows = (call.bank for call in calls)
    assert {len(leaf) for leaf in few.values()} == {len(clients)}
    assert all_rows is bank.params
    assert same_bits(trained.params, models_at(everybody.params, clients))
    assert least_move(bank.of_clients(cohort.clients), trained.params) > 1e-3


def test_a_bank_with_fewer_rows_than_the_cohort_is_sent_as_it_is() -> None:
    """It is the one that was evaluated, so an executor that has it need not send it again."""
    fed, calls = recorded(tiny_federation())
    bank = fed.initial_bank().split(np.arange(fed.num_clients) % 2)
    fed.train(bank, Cohort(1, np.array([0, 2])), plain_gradient)
    assert calls[0].bank is bank.params


def shifted(grad, w, batch, w0, memo):  # noqa: ARG001
    """A gradient that adds the client's own number and a shared one to every element."""
    return {name: g + memo["own"] + memo["all"] for name, g in grad(w, batch).items()}


@pytest.mark.parametrize("own", [None, [1, 4]])
def test_memo_reaches_its_client_and_shared_everybody(own) -> None:
    """With lr 0.1 and no momentum, a step adds -0.1 (own + all) to the plain step: own rows are
    0.1 i, and 0.2 is shared; one step, so nothing else follows from it."""
    fed, calls = recorded(tiny_federation())
    one_step = replace(fed.training, momentum=0.0, epochs=1, batch_size=1000)
    cohort = Cohort(1, np.array([0, 1, 4]))
    memo, shared = {"own": torch.tensor([0.0, 0.1, 0.4])}, {"all": torch.tensor(0.2)}
    if own is not None:  # a run of a sweep that trains some of the clients
        fed = replace(fed, share=Share(np.array(own), after=0))
    bank = fed.initial_bank()
    plain = fed.train(bank, cohort, plain_gradient, training=one_step)
    found = fed.train(bank, cohort, shifted, memo, shared=shared, training=one_step)
    assert found.clients.tolist() == (own or [0, 1, 4])
    for name, leaf in found.params.items():
        for k, i in enumerate(found.clients):
            apart = leaf[k] - plain.params[name][k]
            torch.testing.assert_close(apart, torch.full_like(apart, -0.1 * (0.1 * i + 0.2)))
    assert calls[-1].task.shared["all"] is shared["all"]
    assert all(set(job.memo) == {"own"} for job in calls[-1].jobs)


def test_a_share_of_a_federation_counts_the_cohort_and_scores_its_own_after_the_clustering() -> (
    None
):
    fed = tiny_federation()
    part = replace(fed, share=Share(np.array([1, 4]), after=2))
    cohort, bank = Cohort(3, np.array([0, 1, 4])), fed.initial_bank()
    trained = part.train(bank, cohort, plain_gradient)
    part.count_models(bank, cohort, trained)
    assert part.meter.counts["bytes_up_model"] == 3 * bank.bytes_per_model
    assert [each.clients.tolist() for each in part.share.trained] == [[1, 4]]
    assert replace(part, t=2).scored().tolist() == list(range(6))
    assert replace(part, t=3).scored().tolist() == [1, 4]


def test_steps_are_those_of_the_training_that_was_used() -> None:
    fed = tiny_federation()
    bank, cohort = fed.initial_bank(), Cohort(1, fed.clients)
    sizes = fed.num_examples[fed.clients]
    batches = -(-sizes // fed.training.batch_size)  # per epoch, of which there are two
    own = fed.train(bank, cohort, plain_gradient)
    assert own.num_steps.tolist() == (2 * batches).tolist()
    fed.meter.read_and_reset()
    pairs = fed.train(bank, cohort, plain_gradient, training=fed.training.paired())
    expected = [2 * (b // 2 if b > 1 else n > 1) for b, n in zip(batches, sizes, strict=True)]
    assert pairs.num_steps.tolist() == expected
    assert fed.meter.counts["client_steps"] == sum(expected) < own.num_steps.sum()


def test_labels_that_only_the_global_test_set_has_are_counted_for_nobody() -> None:
    """One client with an image of label 0 and two of label 1; the dataset has ten labels."""
    dataset = Synthetic(num_train=20, num_test=20, size=2).load()
    ids = (np.array([0, 1, 2]),)
    split = Split(np.array([0, 1, 11]), np.array([0, 1, 1]), ids, ids, ids)
    whole = with_global_test(make_timeline(split, ()), dataset).at(1)
    assert whole.labels.max() == 9
    assert Oracle(whole).label_counts(np.array([0])).tolist() == [[1, 2]]


def test_the_failure_of_a_gpu_is_told_by_what_happened_and_not_by_how_to_debug_it() -> None:
    error = RuntimeError(
        "CUDA error: device-side assert triggered\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert Failed(error).reason == "RuntimeError: CUDA error: device-side assert triggered"
    assert Failed(AssertionError()).reason == "AssertionError"
