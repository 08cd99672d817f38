"""The files for `ray up`: those that come with the project, and what is refused before."""

from pathlib import Path

import pytest

from flray.cli import cli
from flray.config.overrides import override
from flray.config.reading import read_mapping
from flray.errors import ExperimentError
from flray.execution.cluster_file import check_cluster_file, tool_of

ROOT = Path(__file__).parents[2]
FILES = ["cluster.yaml", "docs/clusters/gcp.yaml", "docs/clusters/own_machines.yaml"]


@pytest.fixture
def token(tmp_path, monkeypatch) -> Path:
    """A home with a token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("secret")
    return path


def check(file: str = "cluster.yaml", *changes: str) -> str:
    plain = override(read_mapping(ROOT / file, "the cluster"), changes)
    return check_cluster_file(plain, ROOT, {"flray": tool_of(cli)})


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("file", FILES)
def test_the_files_of_the_project_would_work(file) -> None:
    assert "flray" in check(file)


WRONG = [
    ("max_worker=3", "unknown key 'max_worker' (did you mean 'max_workers'?)"),
    ("max_workers=many", "max_workers: 'many' is not of type 'integer'"),
    ("available_node_types.gpu.node_confg={}", "did you mean 'node_config'"),
    ("head_node_type=master", "`head_node_type` must be one of"),
    ("available_node_types.gpu.min_workers=9", "smaller than the sum of `min_workers`"),
    ("provider={region: us-west-2}", "'type' is a required property"),
    ("setup_commands=[flray sweeep x.yaml]", "no command 'sweeep' (did you mean 'sweep'?)"),
    ("setup_commands=[flray run --resum]", "no option '--resum' (did you mean '--resume'?)"),
    ("setup_commands=['echo \"']", "is no shell command"),
    (
        "head_start_ray_commands=[RAY_AUTH_MODE=token ray start --heat]",
        "`ray start` has no option '--heat' (did you mean '--head'?)",
    ),
    ("worker_start_ray_commands=[ray start --head]", "RAY_AUTH_MODE=token"),
    ("file_mounts={}", "mount ~/.ray/auth_token"),
    ("docker.image=rayproject/ray:2.9.0-py39-gpu", "Ray 2.9.0, this environment"),
]


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_ray_up_would_fail_on_is_refused(change, message) -> None:
    with pytest.raises(ExperimentError) as error:
        check("cluster.yaml", change)
    assert message in str(error.value)


def test_a_missing_token_and_a_missing_folder_say_what_to_do(token) -> None:
    token.unlink()
    with pytest.raises(ExperimentError, match="ray get-auth-token --generate"):
        check()
    token.touch()
    with pytest.raises(ExperimentError, match="call it from the top folder"):
        check(
            "cluster.yaml", "file_mounts={~/flray: nowhere, ~/.ray/auth_token: ~/.ray/auth_token}"
        )


def test_the_image_has_the_version_that_is_installed() -> None:
    pinned = {line for line in (ROOT / "constraints.txt").read_text().split() if "ray==" in line}
    image = read_mapping(ROOT / "cluster.yaml", "the cluster")["docker"]["image"]
    assert f"ray=={image.split(':')[1].split('-')[0]}" in pinned
