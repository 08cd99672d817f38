"""command.json: what `flray run` was given, so that a resume needs the folder alone."""

from pathlib import Path
from typing import Any

from flray.files import read_json, reading

COMMAND = "command.json"


def read_command(root: Path) -> dict[str, Any]:  # Any: JSON
    """The overrides and runs of the command that filled a folder; {} if none is recorded."""
    file = root / COMMAND
    if not file.exists():
        return {}
    held = read_json(file)
    with reading(file):
        if not all(isinstance(item, str) for item in held["overrides"]):
            raise ValueError("overrides must be texts")
        for run in held["runs"]:
            if not isinstance(run["experiment"], dict) or not run["name"] + run["folder"]:
                raise ValueError("a run has a name, a folder and an experiment")
    return held
