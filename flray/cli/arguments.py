"""The arguments of commands that take files and `key=value`.

Mistakes such as `--train.lr 0.1` or `train.lr 0.1` are answered with what to type.
"""

from collections.abc import Sequence

import click

from flray.config.reference import keys_meant
from flray.config.shipped import EXPERIMENTS, find_file
from flray.errors import ExperimentError


class TakingKeys(click.Command):
    """A command with files and `key=value` as arguments; explains keys that came as options.

    Raises an ExperimentError for an unknown option that is a key of experiments, with what to type,
    and click's own error for any other.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does; a key that came as an option becomes advice."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            option = next((a for a in given if a.startswith(error.option_name)), "")
            key, separator, value = option.lstrip("-").partition("=")
            if not keys_meant(key):
                raise
            rest = given[given.index(option) + 1 :]
            typed = _typed(key, [value] if separator else rest)
            raise ExperimentError(f"there is no option {option}; type {typed}") from error


def files_and_overrides(
    arguments: Sequence[str], kind: str = EXPERIMENTS
) -> tuple[list[str], list[str]]:
    """Divide arguments into those without and those with `=`.

    Args:
        arguments: What was typed, without options.
        kind: Kind of the files, experiments or spaces; names of shipped ones are files too.

    Raises:
        ExperimentError: A key and its value have a space between them; the message has what to
            type.

    >>> files_and_overrides(["mine.yaml", "train.lr=0.1", "rounds=5"])
    (['mine.yaml'], ['train.lr=0.1', 'rounds=5'])
    """
    for position, argument in enumerate(arguments):
        key, rest = argument.removesuffix("="), arguments[position + 1 :]
        is_apart = "=" not in argument or (rest and _is_value(rest[0], kind))
        if "=" not in key and is_apart and find_file(key, kind) is None and keys_meant(key):
            raise ExperimentError(
                f"expected key=value without spaces, got {key!r}; type {_typed(key, rest, kind)}"
            )
    return [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]


def _typed(key: str, rest: Sequence[str], kind: str = EXPERIMENTS) -> str:
    """What to type to set a key to the first of the rest, where that is a value."""
    values = [argument.removeprefix("=") for argument in rest if argument != "="]
    value = values[0] if values and _is_value(values[0], kind) else "VALUE"
    return " or ".join(f"{meant}={value}" for meant in keys_meant(key))


def _is_value(argument: str, kind: str) -> bool:
    """True if an argument after a key may be its value: no option, no `key=value`, no file."""
    is_option = argument.startswith("--")
    return not is_option and "=" not in argument and find_file(argument, kind) is None
