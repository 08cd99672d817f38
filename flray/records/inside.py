"""What is written stays below the folder it belongs to, whatever the files in the folder say."""

import os
from pathlib import Path

from flray.errors import ExperimentError

WANDB = "wandb"  # folder in a run directory in which W&B keeps its copy


def path_below(root: Path, name: str) -> Path:
    """The path that a file of `root` names; refused unless it is `root` or lies below it.

    >>> path_below(Path("/runs/a"), "../b")
    Traceback (most recent call last):
    flray.errors.ExperimentError: /runs/a names '../b', which lies outside of it, at /runs/b...
    """
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ExperimentError(
            f"{root} names {name!r}, which lies outside of it, at {path.resolve()}: what a run "
            "writes stays below its folder; remove that entry, or choose another --out"
        )
    return path


def refuse_links_out(folder: Path) -> None:
    """Refuse a folder with a link that leads out of it: records would be written there.

    Links inside `wandb/` are made by W&B, which writes each run into a new folder.

    Raises:
        ExperimentError: with the link and where it leads.
    """
    root = folder.resolve()
    for parent, folders, files in os.walk(root):
        if Path(parent) != root and Path(parent).name == WANDB:
            folders.clear()
        for entry in (Path(parent, name) for name in (*folders, *files)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(root):
                raise ExperimentError(
                    f"{folder} holds a link out of it ({entry.relative_to(root)} to "
                    f"{os.readlink(entry)}): what a run writes stays below its folder; put the "
                    "file or folder itself there, or choose another --out"
                )
