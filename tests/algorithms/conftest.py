"""Fixtures of the algorithms' tests."""

from collections.abc import Callable
from typing import Any

import pytest

from flray.client.tasks import Train

from scenarios import Result, fail_jobs


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
        def fails(task, job) -> bool:
            return isinstance(task, Train) and task.t == t and client in job.clients

        fail_jobs(monkeypatch, fails)

    return break_client
