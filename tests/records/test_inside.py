"""What is written stays below the folder it belongs to."""

import pytest

from flray.errors import ExperimentError
from flray.records.inside import path_below, refuse_links_out
from flray.records.run_directory import RunDirectory


@pytest.mark.parametrize("name", ["../victim", "/victim", "a/../../victim", "link", "link/a"])
def test_a_path_outside_is_refused(tmp_path, name) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(ExperimentError, match="which lies outside of it"):
        path_below(root, name)


def test_paths_below_and_a_root_that_is_a_link_are_taken(tmp_path) -> None:
    (tmp_path / "disk" / "a").mkdir(parents=True)
    root = tmp_path / "root"
    root.symlink_to(tmp_path / "disk")
    (root / "inner").symlink_to("a")
    refuse_links_out(root)
    for name in (".", "a", "a/b", "inner", "..a"):
        assert path_below(root, name) == root / name


@pytest.mark.parametrize("name", ["checkpoints", "rounds.parquet", "run.lock", "deep/er"])
def test_a_run_with_a_link_out_of_its_folder_is_not_gone_on_with(tmp_path, name) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start({"seed": 0}, {}, "digest")
    (directory.path / name).parent.mkdir(exist_ok=True)
    (directory.path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ExperimentError, match=f"holds a link out of it \\({name} to "):
        directory.check_resume({"seed": 0})
    assert not (tmp_path / "victim").exists()


def test_links_of_wandb_are_left_alone_unless_the_run_itself_is_called_so(tmp_path) -> None:
    for folder in ("run", "wandb"):
        link = tmp_path / folder / "deep" / "checkpoints"
        link.parent.mkdir(parents=True)
        log = tmp_path / folder / "wandb" / "offline-run" / "debug-core.log"
        log.parent.mkdir(parents=True)
        log.symlink_to(tmp_path / "log")
        refuse_links_out(tmp_path / folder)
        link.symlink_to(tmp_path / "victim")
        with pytest.raises(ExperimentError, match=r"holds a link out of it \(deep/checkpoints"):
            refuse_links_out(tmp_path / folder)
