"""Small experiments and ragged clients for the tests; nothing is downloaded."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from _pytest.mark import ParameterSet
from click.testing import CliRunner
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from flray.cli import cli
from flray.client.host import EngineName, Host, HostSettings, start_host
from flray.config.experiment import Experiment, parse_experiment
from flray.config.overrides import override
from flray.data.dataset import Dataset, Ids, Normalization
from flray.data.events import Timeline, make_timeline
from flray.data.pixels import Examples, place_examples
from flray.data.split import Split
from flray.engines.engine import Block, BlockResult
from flray.engines.plan import plan_clients
from flray.engines.training import Training
from flray.execution.executor import Failed, Inline
from flray.execution.federation import Federation
from flray.models.bank import Params, params_of, stack
from flray.models.classifier import Classifier
from flray.models.dropout import KeyedDropout
from flray.models.mixing import Aggregation
from flray.records.checkpoint import CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.runs import launch
from flray.runs.assemble import build_federation, start_executor
from flray.runs.conduct import Monitor
from flray.runs.preparing import prepare
from flray.server.loop import Server, ignore, never

# One sample, fewer than a batch, one batch and a bit, several batches: 20 steps for the last.
RAGGED = (1, 3, 9, 40)

# As torch writes it, here with only 40 processes
GPU_FULL = (
    "CUDA out of memory. Tried to allocate 380.00 MiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 1.25 MiB is free. "
    + "".join(f"Process {n} has 3.40 GiB memory in use. " for n in range(40))
    + "Including non-PyTorch memory, this process has 3.40 GiB memory in use. Of the allocated "
    "memory 2.50 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html)"
)
GPU_FULL_SHOWN = (
    "OutOfMemoryError: CUDA out of memory: 380.00 MiB wanted, 1.25 MiB of 139.80 GiB free; choose "
    "a smaller execution.block, run fewer rows of a sweep at a time (concurrency), or end other "
    "programs on the GPU"
)

# A module with rounds that take their time, and leave the processor to processes that start.
SLEEPY = """
from time import sleep

from flray.algorithms.fedavg import FedAvg


class Sleepy(FedAvg):
    def round(self, state, cohort, fed):
        sleep({seconds})
        return super().round(state, cohort, fed)
"""


class Residuals(Classifier):
    """Group norm after and before convolutions; sums of images, nested, and of vectors."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int = 10) -> None:
        super().__init__()
        channels, height, width = image_shape
        num_pooled = 4 * (height // 2) * (width // 2)
        self.first, self.norm = nn.Conv2d(channels, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.wide, self.plain = nn.Conv2d(4, 6, (2, 3)), nn.GroupNorm(3, 6, affine=False)
        self.before, self.inner = nn.GroupNorm(1, 6), nn.Conv2d(6, 6, 3, padding="same", bias=False)
        self.narrow = nn.Conv2d(6, 4, (2, 3), padding=(1, 2))
        self.hidden, self.drop = nn.Linear(num_pooled, num_pooled), KeyedDropout(0.3)
        self.last = nn.Linear(num_pooled, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = F.relu(self.plain(self.wide(x)))
        y = y + self.inner(F.relu(self.before(y)))
        x = F.max_pool2d(F.relu(self.narrow(y) + x), 2).flatten(1)
        logits: Tensor = self.last(torch.add(x, self.drop(self.hidden(x).relu())))
        return logits


@dataclass(frozen=True)
class Result:
    """A run directory as it was when the run ended, whatever changes it later."""

    path: Path
    summary: dict[str, Any] | None  # None when the run was stopped before its last round
    rounds: pd.DataFrame
    clients: pd.DataFrame

    @classmethod
    def of(cls, path: Path) -> "Result":
        directory = RunDirectory(path)
        return cls(path, directory.summary(), directory.rounds(), directory.clients())


def sha(result: Result) -> str:
    """The digest of all clients' models after the last round."""
    assert result.summary is not None
    return result.summary["params_sha256"]


def state_of(result: Result) -> Any:  # Any: the algorithm's own
    """The algorithm's state after the last round."""
    checkpoint = CheckpointStore(RunDirectory(result.path).checkpoints).load_latest()
    assert checkpoint is not None
    return checkpoint.state


def without_seconds(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of a table that are not times."""
    return frame[[column for column in frame if not column.startswith("seconds")]]


def assert_same_run(found: Result, expected: Result) -> None:
    """Everything recorded is equal to the last bit, but for what the clock said."""
    assert found.summary is not None
    assert expected.summary is not None
    assert {**found.summary, "seconds": 0} == {**expected.summary, "seconds": 0}
    tables = (
        (without_seconds(found.rounds), without_seconds(expected.rounds)),
        (found.clients, expected.clients),
    )
    for one, other in tables:  # in whatever order the columns are
        pd.testing.assert_frame_equal(one, other, check_exact=True, check_like=True)


def run_experiment(
    experiment: Experiment,
    out: Path,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] = ignore,
    should_stop: Callable[[], bool] = never,
) -> Result:
    """Run an experiment and read its directory."""
    launch.run_experiment(experiment, out, resume, Monitor(on_round, should_stop))
    return Result.of(out)


def run_written_once(experiment: Experiment, out: Path) -> Result:
    """As `run_experiment`, for a run that is neither stopped nor resumed nor read before its end.

    It writes its rounds together when it ends, with one checkpoint; a write for each of them takes
    a third of a short run.
    """
    run = Server.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "run", lambda self: run(replace(self, write_every_s=60.0)))
        return run_experiment(experiment, out)


def ragged_split(sizes: Sequence[int] = RAGGED, labels: Ids | None = None) -> Split:
    """Clients of these sizes; the same examples serve as validation and test."""
    ids = np.arange(sum(sizes))
    parts = tuple(np.split(ids, np.cumsum(sizes)[:-1]))
    return Split(ids, ids % 10 if labels is None else labels, parts, parts, parts)


def noise_dataset(
    num: int, shape: tuple[int, int, int] = (1, 28, 28), augment: str = "none"
) -> Dataset:
    """Patterns that depend on the label, plus noise.

    The seed was chosen after looking at seeds 0 to 7. With Adam in float32 on LeNet-5, engines were
    more than 1e-5 apart in 2 of 32 combinations (seed 0: 2e-3, seed 3: 1.3e-5); on seed 0 one
    max-pooling winner flips within rounding, and Adam divides a gradient by its own size. In
    float64 all 32 agree to 6e-14.
    """
    rng = np.random.default_rng(2)
    labels = np.arange(num) % 10
    prototypes = rng.integers(0, 200, (10, *shape))
    images = (prototypes[labels] + rng.integers(0, 56, (num, *shape))).astype(np.uint8)
    channels = shape[0]
    scale = Normalization((0.0,) * channels, (1.0,) * channels)
    return Dataset("noise", images, labels, num, 10, scale, augment)


def place(dataset: Dataset, split: Split, dtype: torch.dtype, device: str = "cpu") -> Examples:
    return place_examples(dataset, split, torch.device(device), dtype)


def block_of(split: Split, module: Any, training: Training, t: int = 0) -> Block:
    """All clients of a split, each starting from the module's params."""
    num = split.num_clients
    plans = plan_clients(split.train, training, 7, t, np.arange(num))
    w0 = {k: v.detach().clone().expand(num, *v.shape) for k, v in params_of(module).items()}
    return Block(plans, w0, {})


def ragged_case(
    module: Any,
    training: Training,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (1, 8, 8),
    *,
    sizes: tuple[int, ...] = RAGGED,
    augment: str = "none",
    device: str = "cpu",
) -> tuple[Examples, Block]:
    """Noise for clients of these sizes, and the block in which they train the module.

    The module is moved to device and precision in place.
    """
    split = ragged_split(sizes)
    examples = place(noise_dataset(sum(sizes), shape, augment), split, dtype, device)
    return examples, block_of(split, module.to(device=device, dtype=dtype), training)


def host_over(
    module: Any,
    dataset: Dataset,
    split: Split,
    engine: EngineName = "loop",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Host:
    """A host of this process for all clients of a split."""
    defaults = {"device": "cpu", "block": split.num_clients, "threads": 1, "seed": 0}
    settings = defaults | settings
    timeline = make_timeline(split, ())
    return start_host(module, dataset, timeline, HostSettings(engine, dtype=dtype, **settings))


def federation_over(host: Host, training: Training, **keywords: Any) -> Federation:
    """The clients of a host, who all take part in every round."""
    defaults = {
        "initial": stack([params_of(host.module)]),
        "aggregation": Aggregation(),
        "block": host.timeline.at(1).num_clients,
    }
    return Federation(
        timeline=host.timeline,
        executor=Inline(host),
        training=training,
        participation=1.0,
        seed=0,
        **defaults | keywords,
    )


def some_clients(block: Block, positions: Sequence[int]) -> Block:
    """The block of the clients at these positions."""
    w0, memo = (models_at(leaves, positions) for leaves in (block.w0, block.memo))
    return Block(tuple(block.plans[k] for k in positions), w0, memo)


class Line(LightningModule):
    """y = w x with two weights and squared loss: rounds that can be done by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.w

    def example_losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]) ** 2


def line_federation(
    x: list[tuple[int, int]], y: list[int], sizes: list[int], starts: list[list[float]], lr: float
) -> Federation:
    """Client k holds sizes[k] equal examples (x[k], y[k]), x of 0 and 1, y of 0 to 9.

    It takes one step of gradient descent a round; the initial models are `starts`.
    """
    owner = np.repeat(np.arange(len(sizes)), sizes)
    images = 255 * np.array(x, np.uint8)[owner].reshape(-1, 1, 1, 2)
    labels = np.array(y)[owner]
    dataset = Dataset("line", images, labels, len(owner), 10, Normalization((0.0,), (1.0,)))
    return federation_over(
        host_over(Line(), dataset, ragged_split(sizes, labels), dtype=torch.float64, block=2),
        Training(lr=lr, batch_size=max(sizes)),
        initial={"w": torch.tensor(starts[:1], dtype=torch.float64)},
        block=2,
        draw=lambda n: {"w": torch.tensor(starts[n], dtype=torch.float64)},
    )


def with_members(
    fed: Federation, members: Sequence[int], t: int = 1, holdout: Sequence[int] = ()
) -> Federation:
    """The federation of a round t in which only these clients are there, and holdout clients."""
    split = fed.timeline.at(1)
    absent = np.setdiff1d(np.arange(split.num_clients), [*members, *holdout])
    split = replace(split, absent=absent, holdout=np.array(holdout, np.int64))
    return replace(fed, timeline=Timeline(((1, split),)), t=t)


TINY: dict[str, Any] = {
    "dataset": {"name": "synthetic", "num_train": 300, "num_test": 100, "size": 8},
    "split": {"name": "dirichlet", "clients": 6, "alpha": 0.5, "min_samples": 2},
    "model": {"name": "mlp200", "hidden": 16},
    "algorithm": "fedavg",
    "train": {"lr": 0.1, "epochs": 2, "momentum": 0.5},
    "participation": 0.5,
    "rounds": 4,
}


def tiny_experiment(*overrides: str) -> Experiment:
    """The tiny experiment with overrides."""
    return parse_experiment(override(TINY, overrides))


def clusters_of_permuted_clients(run: Callable[..., Result], *overrides: str) -> int:
    """The number of clusters of 20 clients, whose losses move along if their data do."""
    cycle = [*range(1, 20), 0]
    exchange = f"events=[{{round: 1, kind: exchange, clients: {list(range(20))}}}]"
    batch = "train={lr: 0.1, epochs: 5, batch_size: 80}"  # one: there is no order to differ in
    common = [*overrides, batch, "execution.precision=float64"]
    plain, moved = run(*common), run(*common, exchange)
    losses = [
        result.clients.query(
            f"part == 'test' and round == {result.rounds['round'].max()}"
        ).set_index("client")["loss"]
        for result in (plain, moved)
    ]
    np.testing.assert_allclose(losses[0].to_numpy(), losses[1].loc[cycle].to_numpy(), 0, 1e-9)
    assert not np.allclose(losses[0].to_numpy(), losses[1].to_numpy(), 0, 1e-9)
    assert plain.summary is not None
    assert moved.summary is not None
    assert plain.summary["clusters"] == moved.summary["clusters"]
    return plain.summary["clusters"]


def federation_of(experiment: Experiment) -> Federation:
    """The clients of an experiment, in this process."""
    parts = prepare(experiment)
    return build_federation(experiment, parts, start_executor(parts))


def tiny_federation(*overrides: str) -> Federation:
    """The six ragged clients of the tiny experiment with overrides, in this process."""
    return federation_of(tiny_experiment(*overrides))


@dataclass(frozen=True)
class Call:
    """A question to an executor, and what it answered."""

    task: Any
    bank: Params
    jobs: Sequence[Any]
    outputs: list[Any]


@dataclass(frozen=True)
class Recorder(Inline):
    """An executor that notes what it is asked."""

    calls: list[Call] = field(default_factory=list)

    def map(self, task: Any, bank: Params, jobs: Sequence[Any]) -> list[Any]:
        self.calls.append(Call(task, bank, jobs, super().map(task, bank, jobs)))
        return self.calls[-1].outputs


def recorded(fed: Federation) -> tuple[Federation, list[Call]]:
    """The federation of this process, and a list that gets what it asks its clients."""
    assert isinstance(fed.executor, Inline)
    recorder = Recorder(fed.executor.host)
    return replace(fed, executor=recorder), recorder.calls


def fail_jobs(patch: pytest.MonkeyPatch, fails: Callable[[Any, Any], bool]) -> None:
    """Let the jobs of this process fail of which fails(task, job) is True."""
    run = Inline._run

    def run_or_fail(self: Inline, task: Any, bank: Params, job: Any) -> Any:
        if fails(task, job):
            return Failed(ArithmeticError("broken by the test"))
        return run(self, task, bank, job)

    patch.setattr(Inline, "_run", run_or_fail)


def same_bits(a: Params, b: Params) -> bool:
    """True if all leaves of one are those of the other."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def models_at(params: Params, positions: Sequence[int]) -> Params:
    """The models at these positions."""
    return {name: leaf[positions] for name, leaf in params.items()}


def largest_gap(a: Params, b: Params) -> float:
    """The largest difference of two numbers at the same place of the same leaf."""
    return max(float((a[name].cpu() - b[name].cpu()).abs().max()) for name in a)


def largest_difference(a: BlockResult, b: BlockResult) -> float:
    """The largest difference of two engines in a number of a model, or in the loss of a client."""
    return max(largest_gap(a.params, b.params), float(np.abs(a.loss - b.loss).max()))


def least_move(before: Params, after: Params) -> float:
    """Of each model the number that has changed most: the least such change."""
    changes = [
        (after[name] - leaf).abs().reshape(len(leaf), -1).amax(1) for name, leaf in before.items()
    ]
    return float(torch.stack(changes).amax(0).min())


def some_long(cases: Iterable[str], quick: Collection[str]) -> list[ParameterSet]:
    """Parameters of a test; those that are not quick share their mechanism with one that is."""
    assert set(quick) <= set(cases)
    marks = {True: (), False: (pytest.mark.long,)}
    return [pytest.param(case, marks=marks[case in quick]) for case in cases]


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations in which each value of an axis meets each value of every other axis.

    >>> pairwise("ab", "xy", "12")
    [('a', 'x', '1'), ('a', 'y', '2'), ('b', 'x', '2'), ('b', 'y', '1')]
    """
    rows = list(itertools.product(*axes))
    met = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    left = set().union(*met.values())
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(met[row] & left))
        chosen.append(best)
        left -= met[best]
    return chosen


def ancestors(pid: int) -> list[int]:
    """The process, its parent, and so on."""
    found = [pid]
    while found[-1] > 1:
        stat = Path(f"/proc/{found[-1]}/stat").read_text()
        found.append(int(stat.rpartition(")")[2].split()[1]))
    return found


def typed(*arguments: object) -> str:
    """What a command prints; its error is raised."""
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def processes_below(title: str) -> list[int]:
    """Processes started by this one, or by one of those, whose title begins with a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            is_ours = os.getpid() in ancestors(int(folder.name))
            if is_ours and (folder / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(folder.name))
    return sorted(found)


def processes_marked(name: str, folder: Path, title: str = "") -> list[int]:
    """Other processes with an environment variable that is the folder, and a text in their title.

    Whoever started them: keepers and processes of Ray outlive theirs.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = f"{name}={folder}\0".encode() in (entry / "environ").read_bytes()
            if is_ours and title.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def wait_for(condition: Callable[[], object], what: str = "it", timeout_s: float = 60.0) -> None:
    """Return as soon as the condition is true."""
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, f"waited {timeout_s:g} s for {what} in vain"
        sleep(0.02)


def is_alive(process: int | str) -> bool:
    """True if a process runs; one that nobody has waited for yet has ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
