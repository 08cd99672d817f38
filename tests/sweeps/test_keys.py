"""Versions of code: what a user's own classes compute is shared by none of their versions."""

from flray.config.experiment import parse_experiment
from flray.sweeps.keys import code_version, prefix_key, version_of

from scenarios import TINY

MINE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Distance:
    def __call__(self, points):
        return {0} * points
"""


def test_a_class_of_ones_own_that_has_changed_shares_nothing_with_what_it_was(
    tmp_path, monkeypatch
) -> None:
    file = tmp_path / "own_keys.py"
    file.write_text(MINE.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    clustering = {"distance": "own_keys:Distance"}
    plain = {**TINY, "algorithm": {"name": "flhc", "clustering": clustering}}
    experiment = parse_experiment(plain)
    before = version_of([parse_experiment(TINY), experiment])
    assert before == version_of([experiment])
    file.write_text(MINE.format(2))
    after = version_of([experiment])
    assert {name for name in after if after[name] != before[name]} == {"own_keys"}
    assert prefix_key(experiment, after, False) != prefix_key(experiment, before, False)
    assert version_of([parse_experiment(TINY)]) == code_version()
