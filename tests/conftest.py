"""Fixtures of all tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from flray.config.build import Result, run_experiment
from flray.config.experiment import override, parse_experiment
from flray.execution.cluster import connected

from scenarios import TINY

# The same examples every time: a test fails because of a change. HYPOTHESIS_PROFILE=explore draws
# new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: one that starts last keeps one process busy while the other has no work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _skip_without_data(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("data") and "FLRAY_DATA" not in os.environ:
        pytest.skip("needs the real data sets below FLRAY_DATA")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray cluster for all sweeps of a test process: starting one takes seconds."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with connected():
        yield


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., Result]:
    """Run the tiny experiment (ragged clients) with overrides, each in a folder of its own."""
    count = iter(range(1000))

    def run(*overrides: str, **keywords: Any) -> Result:
        out = keywords.pop("out", tmp_path / f"run_{next(count)}")
        return run_experiment(parse_experiment(override(TINY, overrides)), out, **keywords)

    return run
