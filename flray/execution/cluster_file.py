"""Checks of a file for `ray up`, against Ray's own schema and without an account."""

import contextlib
import copy
import io
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import ray
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli

from flray.errors import ExperimentError
from flray.wording import counted, suggestion

Plain = Mapping[str, Any]  # Any: YAML
Tool = Mapping[str, Sequence[str]]  # options of a command line, by command
COMMANDS = ("setup_commands", "head_setup_commands", "worker_setup_commands")
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
TOKEN = "~/.ray/auth_token"

_AND_THEN = re.compile(r"&&|\|\||;")
_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(\d+\.\d+\.\d+)")


def check_cluster_file(plain: Plain, folder: Path, tools: Mapping[str, Tool]) -> str:
    """Refuse what `ray up` would fail on later; returns a line that describes the cluster.

    Args:
        folder: Where `ray up` is called, from which local paths are looked for.
        tools: Command lines beside `ray` whose commands the file may run, by name.

    Raises:
        ExperimentError: The message names the key and, for a misspelt one, what was meant.
    """
    _check_schema(plain)
    _check_mounts(plain, folder)
    for where, command in _commands(plain):
        _check_command(where, command, {"ray": tool_of(ray_cli), **tools})
    _check_token(plain)
    _check_image(plain)
    return _description(plain)


def tool_of(group: Any) -> Tool:
    """The options of each command of a click group, by name of the command."""
    return {
        name: [option for parameter in command.params for option in parameter.opts]
        for name, command in group.commands.items()
    }


def _check_schema(plain: Plain) -> None:
    """Refuse what Ray's own check refuses, without what it prints."""
    noisy = logging.getLogger("ray.autoscaler")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            validate_config(prepare_config(copy.deepcopy(dict(plain))))
    except (ValueError, KeyError, RuntimeError, jsonschema.ValidationError) as error:
        raise ExperimentError(f"Ray refuses the cluster: {_message(error)}") from error
    finally:
        noisy.setLevel(level)


def _message(error: Exception) -> str:
    """One line for an error of Ray's check, with the key that was probably meant."""
    if isinstance(error, KeyError):
        return f"{error} is a required property"
    if not isinstance(error, jsonschema.ValidationError):
        return str(error)
    where = ".".join(map(str, error.absolute_path)) or "the cluster"
    keys = list(error.schema.get("properties", {}))
    if error.validator != "additionalProperties":
        return f"{where}: {error.message}"
    unknown = next(key for key in error.instance if key not in keys)
    meant = suggestion(str(unknown), keys)
    return f"{where}: unknown key {unknown!r}{meant}; known here: {', '.join(sorted(keys))}"


def _check_mounts(plain: Plain, folder: Path) -> None:
    """Refuse files and folders to copy that do not exist on this machine."""
    for remote, local in plain.get("file_mounts", {}).items():
        if (folder / Path(str(local)).expanduser()).exists():
            continue
        remedy = f"paths are looked for from {folder}; call it from the top folder of the project"
        if remote == TOKEN:
            remedy = "`ray get-auth-token --generate` makes one"
        raise ExperimentError(f"file_mounts: there is no {local} to copy to {remote}: {remedy}")


def _commands(plain: Plain) -> Iterator[tuple[str, list[str]]]:
    """Every single command, split into words without variables, and the key it stands under."""
    for key in (*COMMANDS, *START_COMMANDS):
        for line in plain.get(key, []):
            for part in _AND_THEN.split(line):
                try:
                    words = shlex.split(part)
                except ValueError as error:
                    raise ExperimentError(
                        f"{key}: {line!r} is no shell command: {error}"
                    ) from error
                without_variables = [w for w in words if not re.fullmatch(r"[A-Z_]+=\S*", w)]
                if without_variables:
                    yield key, without_variables


def _check_command(where: str, words: list[str], tools: Mapping[str, Tool]) -> None:
    """Refuse commands and options that `ray` and `flray` do not have; other programs pass."""
    tool = tools.get(Path(words[0]).name)
    if tool is None or len(words) == 1:
        return
    name, called = Path(words[0]).name, words[1]
    if called not in tool:
        meant = suggestion(called, tool)
        raise ExperimentError(f"{where}: `{name}` has no command {called!r}{meant}")
    options = tool[called]
    for word in words[2:]:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in options:
            meant = suggestion(option, options)
            raise ExperimentError(f"{where}: `{name} {called}` has no option {option!r}{meant}")


def _check_token(plain: Plain) -> None:
    """Refuse a cluster without a token: whoever reaches Ray's ports can run code."""
    starts = [line for key in START_COMMANDS for line in plain.get(key, []) if "ray start" in line]
    bare = [line for line in starts if "RAY_AUTH_MODE=token" not in line]
    if bare or not starts or TOKEN not in plain.get("file_mounts", {}):
        raise ExperimentError(
            f"the cluster would run code for whoever reaches its ports: mount {TOKEN} and start "
            f"Ray with RAY_AUTH_MODE=token, got {bare[0] if bare else 'no such mount or command'!r}"
        )


def _check_image(plain: Plain) -> None:
    """Refuse a docker image with another version of Ray than the one installed here."""
    image = str(plain.get("docker", {}).get("image", ""))
    version = _IMAGE.match(image)
    if version and version[1] != ray.__version__:
        raise ExperimentError(
            f"docker.image has Ray {version[1]}, this environment {ray.__version__}: a job cannot "
            "be sent to another version; change the tag"
        )


def _description(plain: Plain) -> str:
    """Name, provider and size of the cluster, in one line."""
    provider, name = plain["provider"], plain["cluster_name"]
    if provider["type"] == "local":
        workers = provider.get("worker_ips", [])
        return f"{name}, {counted(1 + len(workers), 'machine')} of your own"
    kinds = plain.get("available_node_types", {})
    workers = [kind for kind in kinds if kind != plain.get("head_node_type")]
    most = plain.get("max_workers", 0)
    return (
        f"{name} on {provider['type']}, up to {counted(most, 'worker')} "
        f"({', '.join(workers)}) and a head"
    )
