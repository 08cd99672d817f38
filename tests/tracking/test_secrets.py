"""What lies in the environment stays there: no key or token is in anything that is written."""

import os
from pathlib import Path

import pytest

from flray.config.build import run_experiment
from flray.config.experiment import override, parse_experiment
from flray.tracking.mirrors import tracked

from scenarios import TINY

pytestmark = pytest.mark.slow

NAMES = (
    *("WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("GOOGLE_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "RAY_AUTH_TOKEN", "DATABASE_PASSWORD"),
)
SECRET = "5ec2e7"  # and the number of the name: forty digits, as W&B's keys have


@pytest.fixture(autouse=True)
def _planted(monkeypatch, tmp_path) -> None:
    for place, name in enumerate(NAMES):
        monkeypatch.setenv(name, f"{SECRET}{place:034d}")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_of_the_user"))


def files_with_secrets(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_nothing_of_a_run_and_of_its_mirror_has_them(tmp_path) -> None:
    """W&B's own files are below the run's."""
    import wandb

    experiment = parse_experiment(
        override(TINY, ["tracking={name: wandb, mode: offline}", "rounds=2"])
    )
    out = tmp_path / "run"
    with tracked(experiment, out) as on_round:
        run_experiment(experiment, out, on_round=on_round)
    wandb.teardown()  # writes what it was given
    assert list(out.rglob("*.wandb"))
    assert files_with_secrets(out) == []
    (out / "leak.txt").write_text(os.environ["HF_TOKEN"])
    assert files_with_secrets(out) == [out / "leak.txt"]  # so that it can fail
