"""The command line: what people type.

`group` has the group of commands and `main`; `run_commands` and `show_commands` define the
commands, each in a few lines that call a module of this folder. Commands import what they need when
they run: torch and Lightning take seconds, --help must not.
"""

from flray.cli import run_commands, show_commands  # their import adds commands to the group
from flray.cli.group import cli, main

__all__ = ["cli", "main", "run_commands", "show_commands"]
