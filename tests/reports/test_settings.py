"""Names of experiments for readers, and what tells experiments apart."""

from pathlib import Path

import pytest

from flray.reports.settings import differences, readable_names

FIRST, SECOND = "20260101-120000-000000", "20260102-120000-000000"
FEDAVG, LOCAL = ({"algorithm": {"name": name}, "rounds": 5} for name in ("fedavg", "local"))


@pytest.mark.parametrize(
    ("folders", "configs", "names"),
    [
        ([f"runs/a/{FIRST}"], [FEDAVG], ["a"]),
        ([f"runs/a/{FIRST}", f"runs/b/{FIRST}"], [FEDAVG, FEDAVG], ["a", "b"]),
        (
            [f"runs/a/{FIRST}", f"runs/a/{SECOND}"],
            [FEDAVG, LOCAL],
            ["a algorithm=fedavg", "a algorithm=local"],
        ),
        # Seeds are one experiment, and equal experiments are told apart by the time alone.
        (
            [f"runs/a/{FIRST}/seed_0", f"runs/a/{FIRST}/seed_1", f"runs/a/{SECOND}"],
            [{**FEDAVG, "seed": 0}, {**FEDAVG, "seed": 1}, {**FEDAVG, "seed": 0}],
            [FIRST, FIRST, SECOND],
        ),
        # A command with two files, and one that was given a folder.
        (
            [f"runs/a+b/{FIRST}/a", f"runs/a+b/{FIRST}/b", "runs/mine"],
            [FEDAVG, LOCAL, LOCAL],
            ["a+b/a", "a+b/b", "mine"],
        ),
    ],
)
def test_times_are_left_out_of_names(folders, configs, names) -> None:
    assert readable_names(list(map(Path, folders)), configs) == names


def test_only_keys_that_tell_more_experiments_apart_are_named() -> None:
    """Rates tell the first from the others, momenta these; execution is no setting."""
    values = [(0.1, 0.0), (0.2, 0.0), (0.2, 0.5)]
    configs = [
        {"train": {"lr": lr, "momentum": momentum, "epochs": 1}, "execution": {"block": k}}
        for k, (lr, momentum) in enumerate(values)
    ]
    typed = [f"train.lr={lr} train.momentum={momentum}" for lr, momentum in values]
    assert differences(configs) == typed
