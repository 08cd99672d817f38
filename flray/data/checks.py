"""Checks of configured values; each message says what was expected and what came."""

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


def check_positive(field: str, value: float) -> None:
    if not value > 0:
        raise ExperimentError(f"{field} must be > 0, got {value}")
