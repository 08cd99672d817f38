"""Fixtures of all tests. They import flray when they are used: the process that only hands tests
out to others reads this file too, and torch would take it seconds."""

import functools
import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from scenarios import Result

# Processes of tests share the cores: a test that is about threads names their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Importing and collecting make a million objects that stay; looking for garbage among them takes
# seconds.
gc.disable()

RUNS = {"tiny_run", "known_run"}  # fixtures that run experiments
# Files of few tests that take long: UMAP is compiled, a minute in a new environment; commands of
# guides; sweeps on Ray.
FIRST = {"test_embeds.py", "test_guides.py", "test_sweep.py"}

# Files whose tests share the cluster of the fixture below, or the server that forks its workers.
ON_A_CLUSTER = {
    "tests/sweeps/test_sweep.py",
    "tests/sweeps/test_api.py",
    "tests/server/test_any_scores.py",
    "tests/tracking/test_tracking.py",
    "tests/execution/test_ray.py",
    "tests/execution/test_forking.py",
}

# The same examples every time: a test fails because of a change. HYPOTHESIS_PROFILE=explore draws
# new ones. An example may take its time: other work on a machine is no failure.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a whole run are slow: there are hundreds, which together take minutes.

    Files that take long and files with most slow tests come first: one that starts last keeps one
    process busy while the others have no work.
    """
    no_data = pytest.mark.skip(reason="needs the real data sets below FLRAY_DATA")
    for item in items:
        if not RUNS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        if "FLRAY_DATA" not in os.environ and item.get_closest_marker("data"):
            item.add_marker(no_data)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.name not in FIRST, -slow[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # Any: xdist's own
    """A file is for one process, and files on a cluster are for the same one, which starts it."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "a cluster" if file in ON_A_CLUSTER else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Look for garbage among later objects only, and not after every few hundred."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory) -> Iterator[None]:
    """Runs without a folder of their own leave theirs where pytest removes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("runs")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_power_cuts() -> Iterator[None]:
    """Files of tests need not reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _handle: None)
        yield


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup() -> None:
    """One thread for each test; a fixture that does the same takes thousands of tests seconds."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _kept_cluster() -> Iterator[ExitStack]:
    with ExitStack() as kept:
        yield kept


@pytest.fixture(scope="module")
def cluster(_kept_cluster: ExitStack) -> None:
    """One Ray cluster for all sweeps of a test process: starting one takes seconds."""
    import ray

    from flray.execution.cluster import connected

    if not ray.is_initialized():
        _kept_cluster.enter_context(connected())


@pytest.fixture
def without_cluster(_kept_cluster: ExitStack) -> None:
    """Ends that cluster, for a test that connects to one of its own."""
    _kept_cluster.close()


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, which take seconds for each run; tests/reports draws them."""
    from flray.reports import embed

    monkeypatch.setattr(embed, "figure_source", lambda *_: None)


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., "Result"]:
    """Run the tiny experiment (ragged clients) with overrides, each in a folder of its own."""
    count = iter(range(1000))

    def run(*overrides: str, **keywords: Any) -> "Result":
        out = keywords.pop("out", tmp_path / f"run_{next(count)}")
        return _run_tiny(overrides, out, **keywords)

    return run


@pytest.fixture(scope="session")
def known_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "Result"]:
    """The same with each overrides once for all tests of a process: what others are compared with.

    Their rounds are written together, with one checkpoint.
    Not for a test that patches flray before, or that changes what is on disk.
    """

    @functools.cache
    def run(*overrides: str) -> "Result":
        return _run_tiny(overrides, tmp_path_factory.mktemp("known") / "run", once=True)

    return run


def _run_tiny(
    overrides: tuple[str, ...], out: Path, once: bool = False, **keywords: Any
) -> "Result":
    from scenarios import run_experiment, run_written_once, tiny_experiment

    run = run_written_once if once else run_experiment
    return run(tiny_experiment(*overrides), out, **keywords)
