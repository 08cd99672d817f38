"""One Ray cluster for all sweeps of a test process: starting one takes seconds."""

import os

import pytest

from flray.execution.cluster import connected


@pytest.fixture(scope="session")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with connected():
        yield
