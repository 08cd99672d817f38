"""Checks of configured values; each message says what was expected and what came."""

import os

from flray.errors import ExperimentError


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ExperimentError(f"unknown {field} {value!r}; known: {', '.join(choices)}")


def check_share(field: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ExperimentError(f"{field} is a share and must be in [0, 1), got {value}")


def check_at_least(field: str, value: float, least: float) -> None:
    if not value >= least:
        raise ExperimentError(f"{field} must be at least {least}, got {value}")


def check_memory(num_images: int, size: int, channels: int = 1) -> None:
    """Refuse images that could never lie in this machine's memory, before they are drawn."""
    needed = num_images * channels * size * size  # bytes of uint8
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ExperimentError(
            f"{num_images} images of {size}x{size} need {needed / 2**30:,.0f} GiB, this machine "
            f"has {there / 2**30:,.0f}; lower their number or size"
        )


def check_positive(field: str, value: float) -> None:
    if not value > 0:
        raise ExperimentError(f"{field} must be > 0, got {value}")
