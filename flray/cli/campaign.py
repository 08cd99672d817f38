"""The runs of a `flray run` command: from its arguments, or from the folder it goes on with.

A *campaign* is all runs of one command: each file with each listed component and seed.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flray.cli.arguments import files_and_overrides
from flray.cli.places import RUNS, default_folder
from flray.config.experiment import Experiment, evaluated_together, parse_experiment, read_yaml
from flray.config.overrides import override
from flray.config.several import named_experiments
from flray.config.shipped import demo_files, find_file, is_space
from flray.errors import ExperimentError
from flray.files import replace_text
from flray.imports import require_own_modules
from flray.records.command import COMMAND, read_command
from flray.records.inside import path_below, refuse_links_out
from flray.records.run_directory import RunDirectory
from flray.values import file_name


@dataclass(frozen=True)
class CampaignRun:
    """One of the runs that a command starts or goes on with: an experiment, a seed, a folder.

    Its seed is in the experiment.
    """

    name: str  # name of the experiment, shared by its seeds
    experiment: Experiment
    out: Path


@dataclass(frozen=True)
class Campaign:
    """The runs of a command, which command.json in its folder describes for --resume.

    A single run is recorded in `root` itself, several in folders below it:

        runs/NAME/command.json          the command, for --resume
        runs/NAME/fedavg/seed_0/        one run directory per experiment and seed
        runs/NAME/figures/              figures of all of them
    """

    root: Path
    overrides: tuple[str, ...]
    runs: tuple[CampaignRun, ...]
    resume: bool = False
    changed: tuple[str, ...] = ()  # keys that runs may go on with other values of

    def write(self) -> None:
        """Write command.json, from which `--resume` and the order of tables follow; atomic."""
        runs = [
            {
                "name": run.name,
                "folder": os.path.relpath(run.out, self.root),
                "experiment": run.experiment.plain,
            }
            for run in self.runs
        ]
        text = json.dumps({"overrides": self.overrides, "runs": runs}, indent=1)
        replace_text(self.root / COMMAND, text)


def resume_command(root: Path | str) -> str:
    """What to type to go on with the runs of a folder.

    >>> resume_command("runs/my run")
    "flray run --out 'runs/my run' --resume"
    """
    return f"flray run --out {shlex.quote(str(root))} --resume"


def read_campaign(arguments: Sequence[str], out: Path | None, resume: bool) -> Campaign:
    """Every file with every listed component and seed, each with a folder of its own.

    With resume, overrides of the earlier command hold too; without a file, the runs are those that
    the folder holds. Experiments that are compared are evaluated in the same rounds.

    Args:
        arguments: Files and `key=value`; no file: the embedded demo.
        out: The folder of the run, or of all of them; None: one below runs/.
        resume: Go on with an earlier command.

    Raises:
        ExperimentError: A file or key is wrong, or there is nothing to resume.
    """
    names, overrides = files_and_overrides(arguments)
    files = [Path(name) for name in names]
    if resume and not files and out is not None:
        return _recorded_campaign(out, overrides)
    for file in files:
        if is_space(find_file(file) or file):
            raise ExperimentError(f"{file} is a space, not an experiment; type flray sweep {file}")
    files = files or demo_files()
    names = _names(files)
    joined = "+".join(names)
    root = out or default_folder(joined if len(files) == 1 else file_name(joined), resume)
    changed = _keys(overrides)
    earlier = _overrides_in(root, out) if resume else []
    overrides = [*earlier, *overrides]
    plain = {
        name: override(read_yaml(path), overrides) for name, path in zip(names, files, strict=True)
    }
    try:
        named = named_experiments(plain)
    except ExperimentError as error:
        if not earlier:
            raise
        raise ExperimentError(
            f"{error}; this sets {' '.join(earlier)}, as the command that filled {root} did; "
            f"without a file, {resume_command(root)} goes on with what it holds"
        ) from error
    experiments = evaluated_together([entry.experiment for entry in named])
    runs = tuple(
        CampaignRun(entry.name, experiment, root / entry.folder if len(named) > 1 else root)
        for entry, experiment in zip(named, experiments, strict=True)
    )
    return Campaign(root, tuple(overrides), runs, resume, changed)


def _overrides_in(root: Path, out: Path | None) -> list[str]:
    """The overrides of the command that filled a folder, which must be there."""
    if not root.is_dir():
        where = (
            f"there is no folder {root}" if out else f"no run of {root.parent.name} below {RUNS}"
        )
        raise ExperimentError(
            f"nothing to resume: {where}; leave out --resume, or type the folder of the run, as in "
            f"{resume_command(RUNS / 'mine')}"
        )
    refuse_links_out(root)
    return list(read_command(root).get("overrides", []))


def _keys(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(item.partition("=")[0] for item in overrides)


def _recorded_campaign(root: Path, overrides: Sequence[str]) -> Campaign:
    """The runs that a folder was made for, with further overrides."""
    refuse_links_out(root)
    command = read_command(root)
    entries = command.get("runs", [])
    if not entries:
        if not RunDirectory(root).holds_run():
            raise ExperimentError(f"nothing to resume: {root} holds no run; leave out --resume")
        entries = [{"name": root.name, "folder": ".", "experiment": {}}]
    runs = []
    for entry in entries:
        folder = path_below(root, entry["folder"]) if command else root
        directory = RunDirectory(folder)
        # A run that never started has no configuration but the planned one.
        plain = dict(directory.config() if directory.holds_run() else entry["experiment"])
        require_own_modules(plain, root)
        experiment = parse_experiment(override(plain, overrides))
        runs.append(CampaignRun(entry["name"], experiment, folder))
    all_overrides = (*command.get("overrides", []), *overrides)
    return Campaign(root, all_overrides, tuple(runs), True, _keys(overrides))


def _names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its stem, with folders in front where stems repeat.

    >>> _names([Path("a/x.yaml"), Path("b/x.yaml"), Path("b/y.yaml")])
    ['a_x', 'b_x', 'y']
    """
    if repeated := [str(path) for path in files if files.count(path) > 1]:
        raise ExperimentError(f"{repeated[0]} is given twice; for several seeds type seeds=2")
    stems = [path.stem for path in files]
    names = [
        path.stem if stems.count(path.stem) == 1 else f"{path.resolve().parent.name}_{path.stem}"
        for path in files
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ExperimentError(f"two experiment files have the name {twice[0]!r}: rename one")
    return names


def campaign_of(out: Path) -> tuple[Path, str, int]:
    """The command that a run belongs to, by the run's folder.

    A run without a command.json, as Python code makes one, is a command of its own.

    Args:
        out: The run directory.

    Returns:
        The folder of the command, the name of the run, and how many runs are not finished.
    """
    for root in (out, *out.absolute().parents[:2]):
        entries = read_command(root).get("runs", [])
        for entry in entries:
            if (root / entry["folder"]).absolute() == out.absolute():
                folders = [path_below(root, other["folder"]) for other in entries]
                left = sum(RunDirectory(folder).summary() is None for folder in folders)
                here = Path(os.path.relpath(root))
                return here if here.parts[:1] != ("..",) else root, entry["name"], left
    return out, out.name, 0
