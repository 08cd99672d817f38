"""Trained models that stay with hosts: the same bits as in one process, whoever has them."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from flray.client.host import Host
from flray.client.keeping import Ask
from flray.clustering.update import flatten, updates
from flray.engines.training import plain_gradient
from flray.errors import ClientFailure, ExperimentError
from flray.execution.executor import Failed, Inline
from flray.execution.federation import Cohort, Federation
from flray.models.mixing import Relation
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import with_recorded_block
from flray.runs.preparing import prepare

from scenarios import pairwise, tiny_experiment, tiny_federation

pytestmark = pytest.mark.slow


@dataclass
class Hosts:
    """An executor over hosts of this process, which forget their models when they are told to."""

    hosts: list[Host]
    clients_per_job: int | None = None
    trainings_kept: int = 2
    retries: int = 0
    forgets: list[int] = field(default_factory=list)  # the next asked of these have lost all
    maps: list[str] = field(default_factory=list)

    def map(self, task, bank, jobs):
        self.maps.append(type(task).__name__)
        outputs = []
        for k, job in enumerate(jobs):
            number = getattr(job, "host", k % len(self.hosts))
            if isinstance(task, Ask) and number in self.forgets:
                self.forgets.remove(number)
                self.hosts[number].kept.clear()
            try:
                outputs.append(task(self.hosts[number], bank, job))
            except LookupError as error:
                outputs.append(Failed(error))
        return outputs

    def close(self) -> None: ...


def federation(*overrides: str) -> Federation:
    return tiny_federation("execution.block=2", *overrides)


def hosted(fed: Federation, number: int) -> tuple[Federation, Hosts]:
    assert isinstance(fed.executor, Inline)
    hosts = [replace(fed.executor.host, number=k, kept={}) for k in range(number)]
    executor = Hosts(hosts)
    return replace(fed, executor=executor), executor


def mixed(fed: Federation, clusters: list[int]) -> tuple[str, float]:
    relation = Relation.of_clusters(np.array(clusters))
    bank = fed.initial_bank().split(np.array(clusters))
    cohort = Cohort(1, np.array([0, 1, 2, 4, 5]))
    after, trained = fed.average(relation, bank, cohort, plain_gradient)
    assert after.sha256() != bank.sha256()
    return after.sha256(), trained.metrics()["train_loss"]


@pytest.mark.parametrize(
    ("clusters", "number", "per_job"),
    pairwise([(0,) * 6, (0, 1, 0, 0, 1, 2), (0, 0, 0, 1, 2, 3)], [1, 2, 3], [None, 1]),
)
def test_means_of_hosts_are_those_of_one_process(clusters, number, per_job) -> None:
    fed = federation()
    spread, executor = hosted(fed, number)
    executor.clients_per_job = per_job
    assert mixed(spread, clusters) == mixed(fed, clusters)
    assert executor.maps[:2] == ["Train", "Ask"]


def test_a_mean_brings_one_model_from_each_block() -> None:
    """Three blocks of two clients; the integers have the size of the models."""
    fed, executor = hosted(federation(), 2)
    sizes: list[int] = []
    plain_map = executor.map

    def measured(task, bank, jobs):
        outputs = plain_map(task, bank, jobs)
        if isinstance(task, Ask):
            sizes.extend(sum(leaf.nbytes for leaf in answer.values()) for answer in outputs)
        return outputs

    executor.map = measured
    bank = fed.initial_bank()
    fed.average(Relation.joint(6), bank, Cohort(1, np.arange(6)), plain_gradient)
    assert sizes == [bank.bytes_per_model] * 3


@pytest.mark.parametrize("lost", [[0], [0, 1], [1, 1]])
def test_models_that_were_lost_are_trained_again_to_the_same_bits(lost) -> None:
    fed = federation()
    spread, executor = hosted(fed, 2)
    executor.forgets.extend(lost)
    assert mixed(spread, [0] * 6) == mixed(fed, [0] * 6)
    assert executor.maps.count("Train") > 1


def test_hosts_that_never_have_the_models_end_the_run() -> None:
    fed, executor = hosted(federation(), 1)
    executor.forgets.extend([0] * 100)
    with pytest.raises(ClientFailure, match="trained models were lost 3 times"):
        mixed(fed, [0] * 6)


def test_models_are_brought_in_the_order_of_clients() -> None:
    """Whole, some leaves of them, and without the clients that took no step."""
    fed = federation()
    spread, _ = hosted(fed, 2)
    cohort = Cohort(1, np.array([0, 1, 2, 4, 5]))
    here = fed.train(fed.initial_bank(), cohort, plain_gradient)
    there = spread.train(fed.initial_bank(), cohort, plain_gradient)
    assert there.models.task.num_kept == 2
    some = replace(there, num_steps=np.array([3, 0, 3, 0, 3])).with_steps()
    assert some.clients.tolist() == [0, 2, 5]
    first = next(iter(fed.initial))
    assert list(there.leaves([first])) == [first]
    for name, leaf in here.params.items():
        assert torch.equal(leaf, there.params[name])
        assert torch.equal(leaf[[0, 2, 4]], some.params[name])
        assert len(torch.unique(leaf.flatten(1), dim=0)) == 5  # all differ


def test_a_host_keeps_the_models_of_the_last_two_trainings() -> None:
    fed, executor = hosted(federation(), 1)
    cohort, bank = Cohort(1, np.arange(6)), fed.initial_bank()
    first, second, third = (fed.train(bank, cohort, plain_gradient) for _ in range(3))
    assert len(executor.hosts[0].kept) == 2
    executor.maps.clear()
    assert set(third.params) == set(second.params)
    assert executor.maps == ["Ask", "Ask"]
    assert torch.equal(next(iter(first.params.values())), next(iter(third.params.values())))
    assert "Train" in executor.maps


def test_a_client_that_is_not_finite_is_not_part_of_a_mean() -> None:
    """Block 0 holds clients 0 and 1; one of them diverges and is dropped."""

    def diverging(grad, w, batch, w0, memo):  # noqa: ARG001
        return {name: g + memo["own"] for name, g in grad(w, batch).items()}

    fed = replace(federation("execution.engine=loop"), on_client_failure="drop")
    spread, _ = hosted(fed, 2)
    memo = {"own": torch.tensor([0.0, torch.nan, 0.0, 0.0])}
    cohort, bank = Cohort(1, np.arange(4)), fed.initial_bank()
    hashes = set()
    for each in (fed, spread):
        trained = each.train(bank, cohort, diverging, memo)
        assert trained.clients.tolist() == [0, 2, 3]
        after = each.mix(Relation.joint(6), trained, bank)
        assert all(leaf.isfinite().all() for leaf in after.params.values())
        hashes.add(after.sha256())
    assert len(hashes) == 1


def actors(count: object, *overrides: str) -> list[str]:
    return ["execution.executor=ray", f"execution.actors={{count: {count}}}", *overrides]


@pytest.mark.parametrize(
    ("overrides", "block", "idle"),
    [
        ([], 6, None),
        (actors(2), 3, 0),
        (actors(4), 2, 1),
        (actors("per_client"), 1, 0),
        (actors(4, "execution.block=6"), 6, 3),
    ],
)
def test_the_default_block_divides_a_cohort_among_actors(overrides, block, idle) -> None:
    """A cohort of six; blocks of two are three, so that one of four actors is idle."""
    experiment = tiny_experiment("participation=1", *overrides)
    parts = prepare(experiment, experiment.settings.execution.actors)
    assert parts.payload.settings.block == block
    if idle is None:
        assert parts.plan is None
    else:
        assert parts.plan.num_idle == idle
        assert (f"{idle} of the actors are idle" in str(parts.plan)) == (idle > 0)
    in_a_sweep = prepare(experiment)
    assert in_a_sweep.payload.settings.block == (experiment.settings.execution.block or 6)


def test_a_run_goes_on_with_the_block_it_began_with(tiny_run, tmp_path) -> None:
    """On two actors a cohort of six would be blocks of three."""
    out = tmp_path / "run"
    part = tiny_run("participation=1", out=out, should_stop=lambda: True)
    assert part.summary is None
    directory = RunDirectory(out)
    assert directory.config()["execution"]["block"] == 6
    elsewhere = tiny_experiment("participation=1", *actors(2))
    assert with_recorded_block(elsewhere, directory).settings.execution.block == 6
    directory.check_resume(elsewhere.plain)
    other = tiny_experiment("participation=1", "execution.block=3")
    with pytest.raises(ExperimentError, match=r"execution.block is 6 there and 3 here"):
        directory.check_resume(other.plain)
    done = tiny_run("participation=1", out=out, resume=True)
    assert done.summary["params_sha256"] == tiny_run("participation=1").summary["params_sha256"]


@pytest.mark.parametrize("models_at_a_time", [1, 3, 100])
@pytest.mark.parametrize("num_hosts", [0, 2])
def test_updates_are_the_same_by_parts(models_at_a_time, num_hosts, monkeypatch) -> None:
    """Parts that take blocks apart, and one that is everything."""
    fed = federation()
    if num_hosts:
        fed, _ = hosted(fed, num_hosts)
    owner = np.array([0, 1, 0, 1, 0, 1])
    bank = fed.initial_bank().split(owner)
    next(iter(bank.params.values()))[1] += 1.0
    trained = fed.train(bank, Cohort(1, np.array([0, 1, 2, 4, 5])), plain_gradient)
    bytes_each = bank.bytes_per_model
    monkeypatch.setattr("flray.execution.trained.PART_BYTES", models_at_a_time * bytes_each)
    rows = owner[trained.clients]
    found = updates(trained, bank.params, rows)
    expected = flatten(trained.params) - flatten(bank.params)[torch.from_numpy(rows)]
    assert torch.equal(found, expected)
    assert len(list(trained.in_parts())) == -(-5 // models_at_a_time)
