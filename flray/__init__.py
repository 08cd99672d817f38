"""flray: an experiment platform for clustered federated learning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flray.config.build import Result

__version__ = "0.1.0"


def run(
    experiment: str | Path | Mapping[str, Any],  # Any: YAML
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> "Result":
    """Run an experiment, a YAML file or the same as a mapping, into the folder `out`.

    `overrides` are `key=value` as on the command line. The same as `flray run`.
    """
    # Imported here: torch and Lightning take seconds, and `flray --help` imports this file.
    from flray.config.build import run_experiment
    from flray.config.experiment import override, parse_experiment, read_yaml

    given = dict(experiment) if isinstance(experiment, Mapping) else read_yaml(Path(experiment))
    return run_experiment(parse_experiment(override(given, overrides)), Path(out), resume)
