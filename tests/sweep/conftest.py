"""A Ray cluster for the sweeps of a file, gone at its end."""

import os

import pytest

from flray.execution.cluster import connected


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with connected():
        yield
