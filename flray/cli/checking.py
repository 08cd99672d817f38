"""`flray check`: would these files run? Every file is looked at, whatever is wrong with another."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from flray.cli.arguments import files_and_overrides
from flray.cli.campaign import read_campaign
from flray.cli.running import remarks_on
from flray.config.reading import read_mapping
from flray.config.shipped import SPACES, find_file, has_line, is_space
from flray.errors import ClientFailure, ExperimentError
from flray.runs.rehearsal import describe
from flray.sweeps.describing import describe_space, planned_rows
from flray.sweeps.space import read_space

NOTE = "   note: "


def check_files(arguments: Sequence[str], console: Console, tool: click.Group) -> int:
    """Print what each file would run or why it cannot; returns the number of files that cannot.

    Args:
        arguments: Files of experiments, spaces or clusters, and `key=value` for all of them.
        tool: The command line of flray, whose calls in a cluster file are checked.
    """
    files, overrides = files_and_overrides(arguments)
    wrong = 0
    for file in files:
        try:
            lines = _described(file, overrides, tool)
        except (ExperimentError, ClientFailure) as error:
            console.print(Text.assemble(("no", "red"), f" {file}: "), end="", soft_wrap=True)
            console.out(str(error))
            wrong += 1
        else:
            for line in lines:
                is_remark = line.startswith(NOTE)
                console.print("" if is_remark else Text("ok ", style="green"), end="")
                console.out(line)
    return wrong


def _described(file: str, overrides: Sequence[str], tool: click.Group) -> list[str]:
    """Lines about a space, a cluster or the runs of an experiment.

    Raises:
        ExperimentError: What is wrong with the file, as a run of it would report.
    """
    path = Path(file)
    if is_space(find_file(file) or find_file(file, SPACES) or path):
        space = read_space(path, overrides)
        return [f"{path.stem}: {describe_space(space, planned_rows(space))}"]
    if has_line(path, "cluster_name:", "provider:"):  # for `ray up`
        from flray.execution.cluster_file import check_cluster_file, tool_of  # imports Ray

        plain = read_mapping(path, "the cluster")
        return [f"{path.name}: {check_cluster_file(plain, Path.cwd(), {'flray': tool_of(tool)})}"]
    lines = []
    for run in read_campaign([file, *overrides], None, resume=False).runs:
        lines.append(f"{run.name}: {describe(run.experiment)}")
        lines += [f"{NOTE}{remark}" for remark in remarks_on(run)]
    return list(dict.fromkeys(lines))  # the seeds of an experiment have the same remarks
