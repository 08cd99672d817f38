"""What a run ran on: versions, commit, hardware. No paths and no environment variables."""

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from flray.engines.convolutions import form_of

_PACKAGES = ("flray", "torch", "pytorch-lightning", "ray", "numpy")
_PACKAGE = Path(__file__).parents[1]


def environment() -> dict[str, object]:
    """Versions, the commit of the package and the hardware of this process, ready for JSON.

    >>> sorted(environment())
    ['commit', 'hardware', 'versions']
    """
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "commit": _own_commit(),
        "hardware": {
            "cpu_count": os.cpu_count(),
            "platform": platform.platform(),
            "cuda_device": cuda,
            "convolutions": form_of("cuda" if cuda else "cpu"),
        },
    }


@cache  # what is imported stays what it was, and git takes as long as a short run
def _own_commit() -> str | None:
    return commit(_PACKAGE)


def commit(package: Path) -> str | None:
    """The commit of the checkout a package lies at the top of, with "-dirty" if files changed.

    None if there is no git or no checkout, and for a package that is installed into an environment
    inside somebody else's checkout.
    """
    if _git(package, "rev-parse", "--show-prefix") != f"{package.name}/":
        return None
    return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, no commit yet
        return None
    return done.stdout.strip()


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # used from a checkout without being installed
        return None
