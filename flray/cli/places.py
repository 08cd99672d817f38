"""Where results go and come from: a folder, or a URL with a local copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flray.errors import ExperimentError
from flray.records.mirror import Mirror


@contextmanager
def mirrored(out: Path | str | None) -> Iterator[tuple[Path | None, Mirror | None]]:
    """The local folder to run in, as it lies at the URL; copied there in the end, come what may.

    Errors name the URL, so that what they say to type goes on there.
    """
    if not isinstance(out, str):
        yield out, None
        return
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


def fetched(place: Path | str) -> Path:
    """The folder itself, or a local copy of what lies at a URL."""
    if not isinstance(place, str):
        return place
    mirror = Mirror(place, "read")
    mirror.fetch()
    return mirror.local
