"""Small experiments and ragged clients for the tests; nothing is downloaded."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from _pytest.mark import ParameterSet
from click.testing import CliRunner
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from flray.cli import cli
from flray.client.host import HostSettings, start_host
from flray.config.experiment import Experiment, parse_experiment
from flray.config.overrides import override
from flray.data.dataset import Dataset, Normalization
from flray.data.events import Timeline, make_timeline
from flray.data.pixels import Examples, place_examples
from flray.data.split import Split
from flray.engines.engine import Block
from flray.engines.plan import plan_client
from flray.engines.training import Training
from flray.execution.executor import Failed, Inline
from flray.execution.federation import Federation
from flray.models.bank import Params, params_of
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

# A module with rounds that take their time, and leave the processor to processes that start.
SLEEPY = """
from time import sleep

from flray.algorithms.fedavg import FedAvg


class Sleepy(FedAvg):
    def round(self, state, cohort, fed):
        sleep({seconds})
        return super().round(state, cohort, fed)
"""


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


def ragged_split(sizes: tuple[int, ...] = RAGGED) -> Split:
    """Clients of these sizes; the same examples serve as validation and test."""
    ids = np.arange(sum(sizes))
    parts = tuple(np.split(ids, np.cumsum(sizes)[:-1]))
    return Split(ids, ids % 10, parts, parts, parts)


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
    plans = tuple(plan_client(split.train[i], training, 7, t, i) for i in range(split.num_clients))
    num = split.num_clients
    w0 = {k: v.detach().clone().expand(num, *v.shape) for k, v in params_of(module).items()}
    return Block(plans, w0, {})


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
    ids = np.arange(len(owner))
    parts = tuple(np.split(ids, np.cumsum(sizes)[:-1]))
    split = Split(ids, labels, parts, parts, parts)
    dataset = Dataset("line", images, labels, len(ids), 10, Normalization((0.0,), (1.0,)))
    settings = HostSettings("loop", "cpu", torch.float64, 2, 1, 0)
    timeline = make_timeline(split, ())
    host = start_host(Line().double(), dataset, timeline, settings)
    return Federation(
        timeline=timeline,
        initial={"w": torch.tensor(starts[:1], dtype=torch.float64)},
        executor=Inline(host),
        training=Training(lr=lr, batch_size=max(sizes)),
        aggregation=Aggregation(),
        participation=1.0,
        block=2,
        seed=0,
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


def fail_jobs(patch: pytest.MonkeyPatch, fails: Callable[[Any, Any], bool]) -> None:
    """Let the jobs of this process fail of which fails(task, job) is True."""
    run = Inline._run

    def run_or_fail(self: Inline, task: Any, bank: Params, job: Any) -> Any:
        if fails(task, job):
            return Failed(ArithmeticError("broken by the test"))
        return run(self, task, bank, job)

    patch.setattr(Inline, "_run", run_or_fail)


def largest_gap(a: Params, b: Params) -> float:
    """The largest difference of two numbers at the same place of the same leaf."""
    return max(float((a[name].cpu() - b[name].cpu()).abs().max()) for name in a)


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


def is_alive(process: int | str) -> bool:
    """True if a process runs; one that nobody has waited for yet has ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
