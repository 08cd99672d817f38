"""Fixtures of the algorithms' tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flray.client.tasks import Train
from flray.execution.executor import Failed, Inline

from scenarios import Result


@pytest.fixture
def tiny_run(tiny_run) -> Callable[..., Result]:
    """The fixture of all tests, but a run without keywords writes its rounds once, when it ends.

    Tests here look at what a run has learnt; tests/server and tests/records at how it is written.
    """

    def run(*overrides: str, **keywords: Any) -> Result:
        return tiny_run(*overrides, once=not keywords, **keywords)

    return run


@pytest.fixture
def fails_in_training(monkeypatch) -> Callable[[int, int], None]:
    """Let a client fail whenever it trains in a round."""

    def break_client(client: int, t: int) -> None:
        run = Inline._run

        def run_or_fail(self, task, bank, job):
            if isinstance(task, Train) and task.t == t and np.isin(client, job.clients):
                return Failed(ArithmeticError("cannot train"))
            return run(self, task, bank, job)

        monkeypatch.setattr(Inline, "_run", run_or_fail)

    return break_client
