"""One Ray cluster for all sweeps of these tests."""

import os

import pytest

from flray.execution.cluster import connected


@pytest.fixture(scope="session")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with connected():
        yield
