"""Fixtures of all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flray.config.build import Result, run_experiment
from flray.config.experiment import override, parse_experiment

from scenarios import TINY


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., Result]:
    """Run the tiny experiment (ragged clients) with overrides, each in a folder of its own."""
    count = iter(range(1000))

    def run(*overrides: str, **keywords: Any) -> Result:
        out = keywords.pop("out", tmp_path / f"run_{next(count)}")
        return run_experiment(parse_experiment(override(TINY, overrides)), out, **keywords)

    return run
