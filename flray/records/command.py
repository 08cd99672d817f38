"""command.json: what `flray run` was given, so that a resume needs the folder alone."""

from pathlib import Path
from typing import Any

from flray.files import read_json, reading

COMMAND = "command.json"


def read_command(root: Path) -> dict[str, Any]:  # Any: JSON
    """What the command that filled a folder was given; {} if none is recorded.

    `overrides` are texts like `train.lr=0.1`; each of `runs` has a `name`, a `folder` below the
    root and its `experiment`, the keys before defaults are filled in.
    """
    file = root / COMMAND
    if not file.exists():
        return {}
    command = read_json(file)
    with reading(file):
        if not all(isinstance(item, str) for item in command["overrides"]):
            raise ValueError("overrides must be texts")
        for run in command["runs"]:
            if not isinstance(run["experiment"], dict) or not run["name"] + run["folder"]:
                raise ValueError("a run has a name, a folder and an experiment")
    return command
