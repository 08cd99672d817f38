"""Where the modules that experiments name are imported from: never from inside a run's folder.

An experiment may name a class as `package.module:Name`, and importing a module runs it. Folders of
runs travel between people, so modules inside them are data and never imported.
"""

import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flray.errors import ExperimentError
from flray.files import read_json
from flray.values import texts_in

# Files that folders of runs and sweeps have together; such a folder may be somebody else's.
_SIGNS = (
    ("config.yaml", "environment.json"),
    ("config.yaml", "rounds.parquet"),
    ("space.yaml", "sweep.json"),
)
_NAME = re.compile(r"[\w.]+:\w+")  # package.module:Name


def add_current_folder() -> None:
    """Let modules of the current folder be found, after all others, unless it belongs to a run.

    It comes last, so that no file in it takes the place of an installed module.
    """
    here = Path.cwd()
    if str(here) not in sys.path and not is_inside_run(here):
        sys.path.append(str(here))


def is_inside_run(folder: Path) -> bool:
    """True if a folder is, or lies inside, the folder of a run, of several runs or of a sweep."""
    resolved = folder.resolve()
    return any(
        _is_of_command(parent / "command.json")
        or any(all((parent / name).is_file() for name in names) for names in _SIGNS)
        for parent in (resolved, *resolved.parents)
    )


def _is_of_command(file: Path) -> bool:
    """True for a command.json that `flray run` wrote; other programs have files of this name."""
    try:
        return file.is_file() and {"overrides", "runs"} <= read_json(file).keys()
    except ExperimentError:  # no JSON, or no object
        return False


def location_of(module: str) -> Path | None:
    """The file or folder of a module, found without importing anything; None: there is none.

    >>> location_of("flray.imports").name, location_of("no_such_module")
    ('imports.py', None)
    """
    parts, path, spec = module.split("."), None, None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    origin = spec and (spec.origin if spec.has_location else next(iter(path or ()), None))
    return Path(origin).resolve() if origin else None


def is_program(module: str) -> bool:
    """True for modules of the standard library, whose classes run commands, and for `x.__main__`.

    Importing a module runs it, so a name that an experiment does not need is never imported.

    >>> is_program("subprocess"), is_program("flray.data")
    (True, False)
    """
    first, _, rest = module.partition(".")
    if first in sys.stdlib_module_names or rest.endswith("__main__"):
        return True
    folders = {name: Path(path).resolve() for name, path in sysconfig.get_paths().items()}
    location = location_of(module)
    return (
        location is not None
        and location.is_relative_to(folders["stdlib"])
        and not location.is_relative_to(folders["purelib"])
    )


def require_own_module(name: str, folder: Path | None = None) -> None:
    """Refuse `package.module:Name` if the module lies in a folder of runs, or in `folder`.

    Such a folder may be somebody else's: what it names must be the user's own, or installed.
    """
    add_current_folder()
    location = location_of(name.partition(":")[0])
    if location is None:
        return
    is_inside = folder is not None and location.is_relative_to(folder.resolve())
    if is_inside or is_inside_run(location.parent):
        raise ExperimentError(
            f"{name!r} is not imported: {location} lies in a folder of runs, whose files are data; "
            "if you trust it, copy it to a folder of your own and start flray there"
        )


def require_own_modules(plain: object, folder: Path) -> None:
    """Refuse such names anywhere in the configuration of a folder, as `require_own_module` does."""
    for text in texts_in(plain):
        if _NAME.fullmatch(text):
            require_own_module(text, folder)


def digests_of_own_modules(plain: object) -> dict[str, str]:
    """SHA-256 of the files of modules that a configuration names as `package.module:Name`.

    Modules of flray are left out, and those that these files import are not followed.

    >>> digests_of_own_modules({"model": "flray.models.conv_ae:ConvAe"})
    {}
    >>> list(digests_of_own_modules([{"name": "omegaconf.errors:Mine"}]))
    ['omegaconf.errors']
    """
    modules = {text.partition(":")[0] for text in texts_in(plain) if _NAME.fullmatch(text)}
    modules = {module for module in modules if module.partition(".")[0] != "flray"}
    files = {module: location_of(module) for module in sorted(modules)}
    return {
        module: hashlib.sha256(path.read_bytes()).hexdigest()
        for module, path in files.items()
        if path is not None and path.is_file()
    }


def class_of(component: object) -> Callable[..., Any]:  # Any: what it builds
    """The class of a component: of an instance, of a partial, or the class itself."""
    if isinstance(component, functools.partial):
        return component.func
    return component if isinstance(component, type) else type(component)


def path_of(target: Callable[..., Any]) -> str:
    """The name `package.module:Name` by which a class is imported.

    >>> path_of(class_of(functools.partial(ExperimentError)))
    'flray.errors:ExperimentError'
    """
    return f"{target.__module__}:{target.__qualname__}"
