"""The command line: what people type.

Commands import what they need when they run: torch and Lightning take seconds, --help must not.
"""

from flray.cli import run_commands, show_commands  # which add their commands to the group
from flray.cli.group import cli, main

__all__ = ["cli", "main", "run_commands", "show_commands"]
