"""Experiments and spaces that come with the package, found by name from any folder.

Wherever a command takes a file it also takes the name of a shipped one. A file of the user's comes
first.
"""

import os
from pathlib import Path

from flray.config.reference import names as component_names
from flray.errors import ExperimentError
from flray.wording import closest

_PACKAGE = Path(__file__).parents[1]
EXPERIMENTS, SPACES = "experiments", "tune_spaces"  # folders of the package
KINDS = {EXPERIMENTS: "experiment", SPACES: "space"}
_SUFFIX = ".yaml"


def find_file(given: str | Path, kind: str = EXPERIMENTS) -> Path | None:
    """The file of a path or, where there is none, the shipped one of that name; None: neither.

    `flhc/mnist_label_swap`, with or without .yaml and `experiments/` in front, is the file
    experiments/flhc/mnist_label_swap.yaml of the package.

    >>> find_file("flhc/mnist_label_swap").name
    'mnist_label_swap.yaml'
    """
    path = Path(given)
    if not path.name:
        return None
    for candidate in (path, _PACKAGE / kind / path, _PACKAGE / path):
        for file in (candidate, candidate.with_name(candidate.name + _SUFFIX)):
            if os.path.isfile(file):  # False for names that no file can have
                return file
    return None


def require_file(given: str | Path, kind: str = EXPERIMENTS) -> Path:
    """As `find_file`; a missing file is an ExperimentError that suggests a name.

    Args:
        given: A path or the name of a shipped file.
        kind: EXPERIMENTS or SPACES, where shipped files are looked for.
    """
    file = find_file(given, kind)
    if file is not None:
        return file
    path = Path(given)
    if os.path.isdir(path):  # False for names that no folder can have
        raise ExperimentError(f"{given} is a folder; expected a YAML file, as in {path / 'x.yaml'}")
    suffix = _SUFFIX if path.suffix == _SUFFIX else ""
    nearby = [str(file.with_suffix("")) for file in sorted(path.parent.glob(f"*{_SUFFIX}"))]
    close = closest(str(path).removesuffix(suffix), [*nearby, *names(kind)])
    meant = f" (did you mean {close + suffix!r}?)" if close else ""
    method = f" {path}" if path.name in component_names("algorithm") else ""
    written = f", `flray init{method}` writes one" if kind == EXPERIMENTS else ""
    raise ExperimentError(
        f"no {KINDS[kind]} file {given}{meant}, looked for from {Path.cwd()}; `flray list "
        f"{KINDS[kind]}s` names those that come with flray{written}"
    )


def is_space(path: Path) -> bool:
    """True for the YAML file of a space, which names an experiment; False for an experiment.

    >>> is_space(require_file("flhc_table4", SPACES)), is_space(require_file("demo/flhc"))
    (True, False)
    """
    return path.suffix in (_SUFFIX, ".yml") and has_line(path, "experiment:")


def has_line(path: Path, *begins: str) -> bool:
    """True for a text file with a line that begins with one of these texts."""
    if not os.path.isfile(path):  # False for names that no file can have
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return any(line.startswith(begins) for line in lines)


def names(kind: str) -> list[str]:
    """The names of the shipped files of a kind, EXPERIMENTS or SPACES, sorted.

    >>> "demo/flhc" in names(EXPERIMENTS)
    True
    """
    folder = _PACKAGE / kind
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.glob(f"**/*{_SUFFIX}")
    )


def demo_files() -> list[Path]:
    """The experiments that `flray run` compares when it is given none, by name."""
    return sorted((_PACKAGE / EXPERIMENTS / "demo").glob(f"*{_SUFFIX}"))


def first_comment(path: Path) -> str:
    """What a file says of itself: its first comment line that is not its command."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if line.startswith("#") and text and not text.startswith("flray "):
            return text
    return ""
