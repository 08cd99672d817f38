"""Where results go and come from: a folder, or a URL with a local copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flray.errors import ExperimentError
from flray.imports import is_inside_run

if TYPE_CHECKING:
    from flray.records.mirror import Mirror

RUNS = Path("runs")  # below which results are kept unless --out is given
TIMED, LENGTH = "[0-9]*-[0-9]*-[0-9]*", 22  # names of folders by their time, and their length


class Place(click.Path):
    """The type of an argument: a folder, as a Path, or a URL, as text.

    Whether a URL exists is not checked here.
    """

    name = "folder or URL"

    def __init__(self, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # Any: of click
        """The text itself if it is a URL, else a Path; Any: types of click."""
        if isinstance(value, str) and "://" in value:
            return value
        return super().convert(value, param, ctx)


def default_folder(name: str, resume: bool) -> Path:
    """A new folder below runs/, or the newest one of this name to go on with.

    A new folder is named by the time, so that sorting by name sorts by age; it is not made here. It
    is runs/NAME/TIME, or runs/NAME-TIME if runs/NAME is results itself (`--out runs/NAME`).

    Args:
        name: Name of the experiment or space, a folder below runs/.
        resume: True: take the newest folder if there is one; files, such as pages, do not count.
    """
    here = RUNS / name
    timed = [*here.glob(TIMED), *RUNS.glob(f"{escape(name)}-{TIMED}")]
    before = sorted((path for path in timed if path.is_dir()), key=lambda path: path.name[-LENGTH:])
    is_taken = is_inside_run(here)
    if resume and (before or is_taken):
        return before[-1] if before else here
    time = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return RUNS / f"{name}-{time}" if is_taken else here / time


@contextmanager
def mirrored(out: Path | str | None) -> "Iterator[tuple[Path | None, Mirror | None]]":
    """Yield the local folder to run in, and the mirror that copies it if `out` is a URL.

    The folder begins as a copy of what is at the URL, and is copied there in the end, whatever
    happens. Errors name the URL, so that the commands they suggest work there.

    Args:
        out: A folder or None, which are yielded as they are, or a URL.

    Raises:
        ExperimentError: The folder could not be copied to the URL; the local copy stays.
    """
    if not isinstance(out, str):
        yield out, None
        return
    from flray.records.mirror import Mirror

    mirror = Mirror(out)
    mirror.fetch()
    try:
        yield mirror.local, mirror
    except ExperimentError as error:
        here = str(mirror.local)
        if type(error) is not ExperimentError or here not in str(error):
            raise
        raise ExperimentError(str(error).replace(here, mirror.url)) from error
    finally:
        try:
            mirror.push()
        except OSError as error:
            raise ExperimentError(
                f"{mirror.local} could not be copied to {mirror.url}: {error}"
            ) from error


def fetched(folder: Path | str) -> Path:
    """The folder itself, or a local copy of what lies at a URL.

    The copy is kept and brought up to date by the next call; nothing is written to the URL.
    """
    if not isinstance(folder, str):
        return folder
    from flray.records.mirror import Mirror

    mirror = Mirror(folder, "read")
    mirror.fetch()
    return mirror.local
