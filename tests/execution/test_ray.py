"""Client actors: one result whatever their number, and nothing lost when one dies."""

import os
import signal
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

import flray
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.data.datasets.synthetic import Synthetic
from flray.data.splits.pathological import Pathological
from flray.errors import ClientFailure, ExperimentError
from flray.execution import ray_pool
from flray.execution.client_actor import ClientActor
from flray.execution.cluster import connected
from flray.execution.executor import Failed
from flray.execution.federation import Cohort
from flray.execution.nodes import wait_for_resources
from flray.execution.patience import Patience
from flray.execution.resources import ActorPlan, Actors, Needs
from flray.execution.trained import Trained
from flray.records.run_directory import RunDirectory
from flray.server.actor import start_processes

from scenarios import (
    TINY,
    Result,
    ancestors,
    processes_below,
    run_experiment,
    tiny_experiment,
    tiny_federation,
    wait_for,
)

pytestmark = pytest.mark.slow

# Ragged clients, with everything that could tell two orders of work apart, and images large enough
# that module and data reach the actors through memory they share.
HARD = [
    "dataset.size=28",
    "algorithm=fedprox",
    "train.momentum=0.9",
    "model.dropout=0.5",
    "execution.block=2",
]
LIGHT = "num_cpus: 0.1"  # several actors on a small machine
CLIENT_ACTOR = "ray::ClientActor"  # how titles of client actors begin


@pytest.fixture(scope="module")
def cluster():
    before = ray.is_initialized()  # by other tests of this process
    with connected():
        yield
    assert ray.is_initialized() == before


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> str:
    result = flray.run(override(TINY, HARD), tmp_path_factory.mktemp("inline") / "run")
    return result.summary["params_sha256"]


PARTITION = "algorithm.clustering.partition={name: hierarchical, linkage: average, number: 3}"
CLUSTERED = ("flis_dc", "flis_hc", "repa", "fedrc", "clove", "pacfl", "fedsoft")
# How many actors, and what else is set.
CASES: dict[str, tuple[object, list[str]]] = {
    "fewer actors than blocks": (1, []),
    "more actors than blocks": (3, []),
    "fedavg": (2, ["algorithm=fedavg"]),
    "scaffold": (2, ["algorithm=scaffold", "train.lr=0.01"]),
    "flis_dc": (2, ["algorithm={name: flis_dc, beta: 0.1}", "split.server=50"]),
    # Predictions of all clients, and statistics of their latents: three clusters each.
    "flis_hc": (2, ["algorithm=flis_hc", "split.server=50", PARTITION, "train.lr=0.01"]),
    "repa": (2, ["algorithm={name: repa, rounds_before: 2}", PARTITION, "train.lr=0.01"]),
    "settings that act over rounds": (
        2,
        [
            "algorithm=fedavg",
            "train.lr={start: 0.1, decay: 0.5}",
            "aggregate={optimizer: fedadam, server_lr: 0.02}",
            "stop.patience=9",
        ],
    ),
    # Leaves beside the model's and what clients keep; weights of examples and mixtures.
    "apfl": (2, ["algorithm=apfl", "train.lr=0.01"]),
    "fedala": (2, ["algorithm=fedala", "train.lr=0.01"]),
    "fedrc": (2, ["algorithm=fedrc", "train.lr=0.1"]),
    # Two trainings a round, one with what clients keep; some leaves alone; steps inside a step; a
    # memo of each client; losses of all models; directions of data; own models and centres.
    "ditto": (2, ["algorithm=ditto", "train.lr=0.01"]),
    "fedrep": (2, ["algorithm={name: fedrep, head_epochs: 1}", "train.lr=0.01"]),
    "pfedme": (2, ["algorithm=pfedme", "train.lr=0.01"]),
    "fedamp": (2, ["algorithm=fedamp", "train.lr=0.01"]),
    "clove": (2, ["algorithm={name: clove, number: 2}", "train.lr=0.01"]),
    "pacfl": (2, ["algorithm=pacfl", PARTITION, "train.lr=0.01"]),
    "fedsoft": (2, ["algorithm=fedsoft", "train.lr=0.01"]),
    "an actor per client": ("per_client", ["split.clients=3", "participation=1"]),
    # An engine that trains in the module itself, whose weights came through the object store:
    # actors do not write to memory they share.
    "loop": (3, ["execution.engine=loop", "execution.block=1", "participation=0.34"]),
}


@pytest.fixture(scope="module")
def on_actors(request, tmp_path_factory) -> dict[str, Future[Result]]:
    """The cases, several at once: most of their time goes into starting actors."""
    request.getfixturevalue("cluster")
    folder = tmp_path_factory.mktemp("ray")

    def run(name: str) -> Result:
        count, more = CASES[name]
        pool = ["execution.executor=ray", f"execution.actors={{count: {count}, {LIGHT}}}"]
        return flray.run(TINY, folder / name, [*HARD, *more, *pool])

    asked = [item.callspec.params["name"] for item in request.session.items if _is_case(item)]
    with ThreadPoolExecutor(3) as at_once:
        return {name: at_once.submit(run, name) for name in asked}


def _is_case(item: pytest.Item) -> bool:
    return item.name.startswith("test_bits_on_actors") and item.path == Path(__file__)


QUICK = ("flis_hc", "loop")  # the others take a minute
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_bits_on_actors_are_those_of_one_process(name, on_actors, tmp_path) -> None:
    count, more = CASES[name]
    spread = on_actors[name].result()
    alone = flray.run(TINY, tmp_path / "inline", [*HARD, *more])
    assert spread.summary["params_sha256"] == alone.summary["params_sha256"]
    assert spread.rounds["round"].tolist() == [1, 2, 3, 4]
    assert (spread.summary["clusters"] > 1) == (name in CLUSTERED)
    (plan,) = RunDirectory(spread.path).plans()
    assert plan.startswith(f"{3 if count == 'per_client' else count} client actor")


@pytest.mark.usefixtures("cluster")
def test_memo_shared_and_pairs_on_actors_are_those_of_one_process() -> None:
    """Blocks of two on two actors; what arrives there is memory that cannot be written."""

    def corrected(grad, w, batch, w0, memo):  # noqa: ARG001  # local, so it is pickled by value
        g = grad(w, batch)
        ahead = grad({name: w[name] - 0.1 * g[name] for name in g}, batch.second)
        return {name: ahead[name] - memo[f"c_i/{name}"] + memo[f"c/{name}"] for name in g}

    def trained(*overrides: str) -> Trained:
        fed = tiny_federation(*HARD, *overrides)
        draw = torch.Generator().manual_seed(0)
        own = {
            f"c_i/{k}": torch.randn((6, *v.shape[1:]), generator=draw)
            for k, v in fed.initial.items()
        }
        shared = {
            f"c/{k}": torch.randn(v.shape[1:], generator=draw) for k, v in fed.initial.items()
        }
        cohort, how = Cohort(1, np.arange(6)), fed.training.paired()
        found = fed.train(fed.initial_bank(), cohort, corrected, own, shared=shared, training=how)
        assert set(found.params) == set(fed.initial)  # brought here before the actors end
        fed.executor.close()
        return found

    alone = trained()
    spread = trained("execution.executor=ray", f"execution.actors={{count: 2, {LIGHT}}}")
    for name, leaf in alone.params.items():
        assert torch.equal(leaf, spread.params[name]), name
    assert (alone.loss == spread.loss).all()


@pytest.mark.usefixtures("cluster")
def test_a_local_cluster_listens_on_loopback_only() -> None:
    """Whoever reaches a port of Ray can run code."""
    found = listening_addresses()
    assert len(found) >= 3  # GCS, raylet, this process
    assert all(ip_address(address).is_loopback for address in found), found


def listening_addresses() -> list[str]:
    """Of the TCP sockets of this process and of all processes of its cluster."""
    open_files = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if os.getpid() in ancestors(int(folder.name)):
                for file in (folder / "fd").iterdir():
                    with suppress(OSError):  # this file was closed; the others still count
                        open_files.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in open_files:  # LISTEN
                words = bytes.fromhex(address.split(":")[0])
                turned = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))
                found.append(str(_plain_address(turned)))
    return found


def _plain_address(packed: bytes) -> IPv4Address | IPv6Address:
    """An address; of IPv4 where it is written as one of IPv6."""
    address = ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address


def test_an_actor_hands_a_task_the_bank_as_it_came() -> None:
    """Tasks move the rows they use: a whole bank may not fit on a device."""
    actor = ClientActor.__new__(ClientActor)
    actor.host = SimpleNamespace(examples=SimpleNamespace(device=torch.device("meta")))
    bank = {"w": torch.zeros(3, 2)}
    assert actor.run(lambda _host, bank, _job: bank, bank, None)["w"] is bank["w"]


def number_of_rows(_host: object, bank: dict[str, torch.Tensor], job: int) -> int:
    return len(bank["w"]) + job


@dataclass(frozen=True)
class Carrying:
    """A task with something to carry."""

    values: np.ndarray

    def __call__(self, _host: object, _bank: object, _job: object) -> int:
        return len(self.values)


def test_small_tasks_travel_with_the_call_and_large_ones_are_put_once(monkeypatch) -> None:
    put: list[object] = []
    monkeypatch.setattr(ray_pool.ray, "put", put.append)
    actor = ClientActor.__new__(ClientActor)
    actor.host = SimpleNamespace()
    sent = ray_pool._sent_task(number_of_rows)
    assert isinstance(sent, bytes)
    assert actor.run(sent, {"w": torch.zeros(3, 2)}, 4) == 7
    assert actor.run(ray_pool._sent_task(Carrying(np.zeros(9))), {}, None) == 9
    assert put == []
    large = Carrying(np.zeros(ray_pool.LARGEST_INLINE_TASK))
    assert ray_pool._sent_task(large) is None
    assert put == [large]


def test_a_bank_is_put_once_unless_one_job_takes_a_small_one_along(monkeypatch) -> None:
    put: list[object] = []
    monkeypatch.setattr(ray_pool.ray, "put", lambda found: put.append(found) or "ref")
    pool = ray_pool.RayPool("payload", SimpleNamespace(), 1, Patience())
    small, large = {"w": torch.zeros(2)}, {"w": torch.zeros(ray_pool.LARGEST_INLINE_BANK)}
    assert pool._sent(small, 1) is small
    assert pool._sent(small, 2) == "ref"  # from now on it is there
    assert pool._sent(small, 1) == "ref"
    assert put == [small]
    assert pool._sent(large, 1) == "ref"
    assert put == [small, large]


FAULTY = '''
import os
import signal
from contextlib import suppress

from flray.models.mlp200 import Mlp200


class Faulty(Mlp200):
    """Cannot stand a batch with label 3."""

    def example_losses(self, batch):
        if bool((batch[1] == 3).any()):
            raise ArithmeticError("label 3 is not to be had")
        return super().example_losses(batch)


class Poisonous(Mlp200):
    """A batch with label 3 ends the process."""

    def example_losses(self, batch):
        if bool((batch[1] == 3).any()):
            os._exit(1)
        return super().example_losses(batch)


class Hungry(Mlp200):
    """The first process that trains is ended as by the kernel when memory runs out."""

    def example_losses(self, batch):
        with suppress(FileExistsError):
            open(MARK, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().example_losses(batch)
'''


@pytest.fixture
def own_code(tmp_path, monkeypatch) -> Path:
    text = f"{FAULTY}\nMARK = {str(tmp_path / 'killed')!r}\n"
    (tmp_path / "faulty_of_tests.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("num_killed", [1, 2])
@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_loses_nothing(tmp_path, num_killed) -> None:
    """Processes of client actors, one or all, are killed from outside while the run goes on."""
    times = 2
    seen: list[int] = []

    def kill_some(row) -> None:
        if row["round"] <= times:
            for pid in processes_below(CLIENT_ACTOR)[:num_killed]:
                os.kill(pid, signal.SIGKILL)
                seen.append(pid)

    pool = ["execution.executor=ray", f"execution.actors={{count: 2, {LIGHT}}}", "train.epochs=40"]
    plain = override(TINY, [*HARD, *pool])
    result = run_experiment(parse_experiment(plain), tmp_path / "run", on_round=kill_some)
    quiet = flray.run(plain, tmp_path / "quiet", ["execution.executor=inline"])
    assert len(set(seen)) >= times * num_killed - 1  # one may be about to start
    assert result.summary["params_sha256"] == quiet.summary["params_sha256"]


# Imported by the server actor, whose process waits for the blocks.
IMPATIENT = """
from functools import partial

from flray.algorithms.fedprox import FedProx
from flray.execution import ray_pool

ray_pool.Patience = partial(ray_pool.Patience, least_s=3.0)


class Impatient(FedProx):
    pass
"""


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_an_actor_that_hangs_is_replaced(tmp_path, monkeypatch) -> None:
    """A process that is stopped neither answers nor dies; its block is computed by another."""
    (tmp_path / "impatient_of_tests.py").write_text(IMPATIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ray_pool, "Patience", ray_pool.Patience)  # the module below replaces it
    stopped: list[int] = []

    def stop_one(row) -> None:
        if row["round"] == 1:
            stopped.append(processes_below(CLIENT_ACTOR)[0])
            os.kill(stopped[0], signal.SIGSTOP)

    pool = ["execution.executor=ray", f"execution.actors={{count: 2, {LIGHT}}}"]
    plain = override(TINY, [*HARD, *pool, "algorithm=impatient_of_tests:Impatient"])
    result = run_experiment(parse_experiment(plain), tmp_path / "run", on_round=stop_one)
    quiet = flray.run(plain, tmp_path / "quiet", ["execution.executor=inline"])
    assert result.summary["params_sha256"] == quiet.summary["params_sha256"]
    wait_for(lambda: not Path(f"/proc/{stopped[0]}").exists(), "the end of the actor that hung")


def test_an_actor_that_waits_for_a_machine_is_handed_no_job(monkeypatch) -> None:
    """Three jobs on two hosts, of which one starts only when the first job has ended."""
    handed: list[int] = []
    actors = [SimpleNamespace(run=SimpleNamespace(remote=partial(_run, n, handed))) for n in (0, 1)]
    plan = TestStarts.PLAN
    pool = ray_pool.RayPool(None, plan, 1, Patience(), actors=actors, starting={1: "ready"})

    def wait(refs, **_):
        done = [ref for ref in refs if ref != "ready" or handed]
        return done[:1], refs

    monkeypatch.setattr(ray_pool.ray, "wait", wait)
    monkeypatch.setattr(ray_pool.ray, "put", lambda value: value)
    monkeypatch.setattr(ray_pool.ray, "get", lambda ref, **_: ref)
    outputs = pool.map(lambda: None, {}, ["a", "b", "c"])
    assert outputs == [(0, "a"), (0, "b"), (1, "c")] or outputs == [(0, "a"), (1, "b"), (0, "c")]
    assert handed[0] == 0
    assert 1 in handed
    assert pool.starting == {}


def _run(host: int, handed: list[int], _task, _bank, job) -> tuple[int, str]:
    handed.append(host)
    return host, job


class TestStarts:
    """An actor that dies while it starts is replaced; Ray itself is replaced here."""

    PLAN = ActorPlan(2, Actors(), block=1, blocks_per_round=1, per_actor=Needs(0.1, 0.0, 1))

    @pytest.fixture
    def started_with(self, monkeypatch):
        """Start two actors whose attempts end as errors tell: 0.0 is the first of host 0."""
        killed: list[str] = []

        def start(errors: dict[str, Exception]) -> tuple[list[str], list[str]]:
            attempts: Counter[int] = Counter()

            def start_host(host: int, _actor: object = None) -> None:
                pool.actors[host] = pool.starting[host] = f"{host}.{attempts[host]}"
                attempts[host] += 1

            def get(ref, **_options) -> None:
                if ref in errors:
                    raise errors[ref]

            monkeypatch.setattr(ray_pool, "POLL_S", 0.0)
            monkeypatch.setattr(ray_pool.ray, "get", get)
            monkeypatch.setattr(ray_pool.ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
            monkeypatch.setattr(ray_pool.ray, "kill", killed.append)
            pool = ray_pool.RayPool(None, self.PLAN, 1, Patience())
            monkeypatch.setattr(pool, "_start_host", start_host)
            pool.start([])
            return pool.actors, killed

        return start

    def test_one_that_is_killed_is_replaced(self, started_with) -> None:
        died = {"1.0": RayActorError(), "1.1": RayActorError()}
        assert started_with(died) == (["0.0", "1.2"], ["1.0", "1.1"])

    def test_one_that_is_killed_again_and_again_ends_the_run_with_the_reason(
        self, started_with
    ) -> None:
        died = {f"1.{n}": RayActorError(error_msg="out of memory") for n in range(9)}
        message = r"a client actor died 3 times while it started \(.*out of memory\) \(2 client"
        with pytest.raises(ExperimentError, match=message):
            started_with(died)

    def test_another_error_is_raised_at_once(self, started_with) -> None:
        error = RayTaskError("start", "traceback", ExperimentError("no such encoder"))
        with pytest.raises(ExperimentError, match="no such encoder"):
            started_with({"1.0": error})


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_an_actor_that_is_killed_while_it_starts_is_replaced(tmp_path) -> None:
    killed: list[int] = []

    def kill_first() -> None:
        while not killed:
            killed.extend(processes_below(CLIENT_ACTOR)[:1])
        os.kill(killed[0], signal.SIGKILL)

    pool = ["execution.executor=ray", f"execution.actors={{count: 2, {LIGHT}}}"]
    with ThreadPoolExecutor(1) as beside:
        killing = beside.submit(kill_first)
        result = flray.run(TINY, tmp_path / "run", [*HARD, *pool])
        killing.result()
    quiet = flray.run(TINY, tmp_path / "quiet", HARD)
    assert result.summary["params_sha256"] == quiet.summary["params_sha256"]


def test_a_job_that_takes_far_longer_than_others_hangs() -> None:
    pool = ray_pool.RayPool(None, None, 1, Patience(first_s=1000.0))
    now = monotonic()
    running = {"a": ray_pool.Running(0, 0, now), "b": ray_pool.Running(1, 1, now - 1001.0)}
    assert pool._hanging(running, "Train") == ["b"]


@pytest.mark.usefixtures("cluster")
def test_what_does_not_fit_is_refused_with_the_arithmetic(tmp_path) -> None:
    with pytest.raises(
        ExperimentError, match=r"50 x 1 = 50 CPU, the cluster has .* free: \d+ such"
    ):
        flray.run(TINY, tmp_path / "a", ["execution={executor: ray, actors: {count: 50}}"])
    assert not (tmp_path / "a").exists()
    plan = ActorPlan(2, Actors(), block=1, blocks_per_round=1, per_actor=Needs(0.1, 0.5, 1))
    with pytest.raises(ExperimentError, match=r"2 x 0.5 = 1 GPU, the cluster has .* free: 0 such"):
        wait_for_resources(plan)
    large = "execution={executor: ray, actors: {count: 2, num_cpus: 0.1, memory_gb: 90000}}"
    with pytest.raises(
        ExperimentError,
        match=r"2 x 9e\+04 \+ 0\.7\d* for the server = .* GB of memory, the cluster has .*: 0 such "
        r"actors fit; lower execution.actors.count or block, or name .* actors.memory_gb",
    ):
        flray.run(TINY, tmp_path / "b", [large])
    assert not (tmp_path / "b").exists()


@pytest.mark.usefixtures("cluster")
def test_ray_is_asked_for_the_memory_of_the_plan() -> None:
    """So that it puts no more actors on a node than its memory takes."""
    each, server = Needs(0.1, 0.0, 123_000_000), Needs(0.0, 0.0, 456_000_000)
    started = start_processes(ActorPlan(2, Actors(), 1, 1, each, server), threads=1)
    try:
        ray.get(started.server.node.remote())
        accessor = ray._private.state.state._connect_and_get_accessor()
        asked = Counter()
        for entry in accessor.get_actor_table(None, None):
            actor = ActorTableData.FromString(entry)
            if actor.state != ActorTableData.DEAD:
                asked[actor.class_name, actor.required_resources["memory"]] += 1
    finally:
        started.end()
    assert asked["ClientActor", 123_000_000] == 2
    assert asked["ServerActor", 456_000_000] == 1


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_run_may_go_on_with_another_number_of_actors(reference, tmp_path) -> None:
    pool = ["execution.executor=ray", f"execution.actors={{count: 1, {LIGHT}}}"]
    experiment = tiny_experiment(*HARD, *pool)
    part = run_experiment(experiment, tmp_path / "run", should_stop=lambda: True)
    assert part.summary is None
    rest = flray.run(TINY, tmp_path / "run", HARD, resume=True)
    assert rest.summary["params_sha256"] == reference


@pytest.mark.parametrize("executor", ["inline", pytest.param("ray", marks=pytest.mark.long)])
@pytest.mark.usefixtures("cluster", "own_code")
def test_a_faulty_client_is_named_or_dropped(executor, tmp_path) -> None:
    """Clients that hold label 3 raise; the others of their block are not lost with them."""
    actors = f"actors: {{count: 1, {LIGHT}}}"
    overrides = [
        "model={name: 'faulty_of_tests:Faulty', hidden: 16}",
        "split={name: pathological, clients: 6}",
        f"execution={{executor: {executor}, engine: loop, block: 3, {actors}}}",
        "participation=1",
        "rounds=2",
    ]
    with ThreadPoolExecutor(2 if executor == "ray" else 1) as at_once:
        raising = at_once.submit(flray.run, TINY, tmp_path / "raise", overrides)
        drop = [*overrides, "on_client_failure=drop"]
        dropping = at_once.submit(flray.run, TINY, tmp_path / "drop", drop)
    message = r"client \d failed: ArithmeticError: label 3 .* \(faulty_of_tests\.py, line \d+\)"
    with pytest.raises(ClientFailure, match=message):
        raising.result()
    result = dropping.result()
    dataset = Synthetic(num_train=300, num_test=100, size=8).load()
    split = Pathological(clients=6).split(dataset, 0)
    holders = sum(bool((split.labels[ids] == 3).any()) for ids in split.train)
    assert 1 <= holders < 6
    assert result.summary["clients_dropped"] == 2 * holders
    assert result.rounds["train_loss"].notna().all()


@pytest.mark.long
@pytest.mark.usefixtures("cluster", "own_code")
def test_a_client_that_kills_its_actors_is_named_or_dropped(tmp_path) -> None:
    """The others of its block, and the actors, are not given up with it."""
    overrides = [
        "model={name: 'faulty_of_tests:Poisonous', hidden: 16}",
        "split={name: pathological, clients: 6}",
        f"execution={{executor: ray, engine: loop, block: 3, actors: {{count: 1, {LIGHT}}}}}",
        "participation=1",
        "rounds=1",
    ]
    dataset = Synthetic(num_train=300, num_test=100, size=8).load()
    split = Pathological(clients=6).split(dataset, 0)
    holders = [i for i, ids in enumerate(split.train) if (split.labels[ids] == 3).any()]
    with pytest.raises(ClientFailure, match=rf"client {holders[0]} failed: .*[Aa]ctor"):
        flray.run(TINY, tmp_path / "raise", overrides)
    dropping = flray.run(TINY, tmp_path / "drop", [*overrides, "on_client_failure=drop"])
    assert dropping.summary["clients_dropped"] == len(holders)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_an_actor_out_of_memory_loses_nothing(own_code, tmp_path) -> None:
    hungry = ["model={name: 'faulty_of_tests:Hungry', hidden: 16}", "execution.engine=loop"]
    pool = ["execution.executor=ray", f"execution.actors={{count: 1, {LIGHT}}}"]
    disturbed = flray.run(TINY, tmp_path / "run", [*hungry, *pool])
    assert (own_code / "killed").exists()
    quiet = flray.run(TINY, tmp_path / "quiet", ["execution.engine=loop"])
    assert disturbed.summary["params_sha256"] == quiet.summary["params_sha256"]


@pytest.mark.parametrize(
    ("error", "is_replaced"),
    [
        (ObjectLostError("0" * 56, None, "call site"), False),
        (OutOfMemoryError("the node ran out of memory"), True),
        (RayActorError(), True),
    ],
)
def test_what_ray_loses_is_a_failed_attempt(monkeypatch, error, is_replaced) -> None:
    """The block is computed again; a bank that may be lost is sent again."""
    pool = ray_pool.RayPool("payload", None, 1, Patience(), actors=["old"])
    pool.last_sent = {}, "bank"
    killed: list[str] = []

    def lose(_ref, **_options):
        raise error

    monkeypatch.setattr(ray_pool.ray, "get", lose)
    monkeypatch.setattr(ray_pool.ray, "kill", killed.append)
    monkeypatch.setattr(pool, "_start_host", lambda host: pool.actors.__setitem__(host, "new"))
    failed = pool._result("ref", 0, timeout=None)
    assert isinstance(failed, Failed)
    assert (pool.actors, killed) == ((["new"], ["old"]) if is_replaced else (["old"], []))
    assert (pool.last_sent is None) != is_replaced


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("task", ["numbers", pytest.param("text", marks=pytest.mark.long)])
def test_actors_change_no_bit_of_regression_and_sequences(task, tmp_path) -> None:
    """Ragged clients of the user's own: rows of a table, and roles of a play."""
    owner = np.repeat(list("cab"), [20, 9, 31])
    x = np.random.default_rng(0).random((60, 3))
    said = "".join(f"{name}:\nabc{k} cab{k % 7}\n\n" for k, name in enumerate(owner))
    (tmp_path / "play.txt").write_text(said)
    dataset = {"name": "text", "file": str(tmp_path / "play.txt"), "length": 8}
    if task == "numbers":
        dataset = flray.from_clients([(x[owner == k], x[owner == k].sum(1)) for k in "abc"])
    keys = {
        "split": "natural",
        "model": "mlp" if task == "numbers" else {"name": "char_gru", "hidden": 4},
        "algorithm": {"name": "ifca", "number": 2},
        "rounds": 2,
    }
    actors = {"executor": "ray", "actors": {"count": 2, "num_cpus": 0.1}}
    here, there = (
        flray.run(dataset=dataset, **keys, execution={"block": 1} | where) for where in ({}, actors)
    )
    assert here.summary["params_sha256"] == there.summary["params_sha256"]
    assert here.clients.equals(there.clients)
