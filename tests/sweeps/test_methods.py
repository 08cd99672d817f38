"""Spaces that name methods: rows of each, what does not apply, and parts of such a space."""

import pytest
import yaml

from flray.errors import ExperimentError
from flray.sweeps.rows import expand
from flray.sweeps.space import parse_space, read_space

from scenarios import TINY

NAMED = {"swap": TINY, "slow": {**TINY, "rounds": 9}}
METHODS = {
    "fedavg": {"algorithm": "fedavg"},
    "fedprox": {"algorithm.name": "fedprox", "algorithm.mu": [0.1, 1.0], "told": "nothing"},
}


def space(**more):
    return {"experiment": NAMED, "methods": METHODS, "space": {"seed": [0, 1]}, **more}


def named(rows):
    return [(r.overrides["experiment"], r.overrides["method"], r.overrides["seed"]) for r in rows]


def test_a_method_has_a_row_for_each_experiment_value_of_its_own_and_seed() -> None:
    rows = expand(parse_space(space()))
    assert len(rows) == 2 * (1 + 2) * 2
    assert named(rows)[:6] == [("swap", "fedavg", 0), ("swap", "fedavg", 1)] + [
        ("swap", "fedprox", seed) for _ in (0.1, 1.0) for seed in (0, 1)
    ]
    assert [row.plain["algorithm"]["name"] for row in rows[:3]] == ["fedavg", "fedavg", "fedprox"]
    assert rows[4].plain["algorithm"]["mu"] == 1.0
    assert rows[-1].plain["rounds"] == 9
    assert "told" not in rows[-1].overrides


def test_what_does_not_apply_is_left_out_by_name() -> None:
    rows = expand(parse_space(space(**{"except": [{"method": "fedprox", "experiment": "slow"}]})))
    assert ("slow", "fedprox", 0) not in named(rows)
    assert len(rows) == 2 * 3 * 2 - 4


def test_a_space_written_down_is_the_same_space() -> None:
    parsed = parse_space(space(**{"except": [{"method": "fedprox", "experiment": "slow"}]}))
    again = parse_space(yaml.safe_load(yaml.safe_dump(parsed.plain, sort_keys=False)))
    assert [row.plain for row in expand(again)] == [row.plain for row in expand(parsed)]
    assert again.plain == parsed.plain


def test_a_part_keeps_what_is_named_and_a_file_joins(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("algorithm.name: ditto\nalgorithm.lam: [0.1, 1]\n")
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump({**TINY, "algorithm": "local"}))
    names = f"methods=[fedavg,{tmp_path / 'mine.yaml'},{tmp_path / 'whole.yaml'}]"
    given = space(**{"except": [{"method": ["fedprox", "fedavg"], "experiment": "swap"}]})
    rows = expand(read_space(given, [names, "seeds=1"]))
    assert {(r.overrides["experiment"], r.overrides["method"]) for r in rows} == {
        ("slow", "fedavg"),
        *((split, method) for split in NAMED for method in ("mine", "whole")),
    }
    assert {row.plain["algorithm"]["name"] for row in rows} == {"fedavg", "ditto", "local"}
    only = read_space(given, ["splits=s*w"])
    assert list(only.experiments) == ["slow"]
    assert only.plain["except"] == []


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({}, ["methods=fedavgg"], "unknown method 'fedavgg'.*fedavg"),
        ({}, ["splits=[rotation]"], "unknown split 'rotation'; known: swap, slow"),
        ({"methods": {"x": {"train.lr": 0.1}}}, [], "methods.x must name its algorithm"),
        (
            {"methods": {"x": {"algorithm": "fedavg", "train.lr": {"uniform": [0, 1]}}}},
            [],
            "listed",
        ),
        ({"methods": ["fedavg"]}, [], "methods must be a mapping"),
        ({"except": [{"method": "ifca"}]}, [], "method is never 'ifca'"),
        ({"search": {"name": "optuna", "samples": 3}}, [], "one experiment and method"),
    ],
)
def test_what_is_refused(changes, overrides, words) -> None:
    with pytest.raises(ExperimentError, match=words):
        expand(read_space(space(**changes), overrides))


def test_what_is_typed_holds_for_methods_and_baselines_with_their_own_values(caplog) -> None:
    caplog.set_level("INFO", logger="flray")
    methods = {**METHODS, "short": {"algorithm": "local", "rounds": [2, 3], "train.epochs": 1}}
    baseline = {"algorithm": "scaffold", "rounds": 7, "train": {"lr": 0.5, "momentum": 0.0}}
    given = space(methods=methods, baseline=baseline)
    typed = ["rounds=5", "train.lr=0.2"]
    rows = expand(read_space(given, typed))
    assert {row.plain["rounds"] for row in rows} == {5}
    assert {row.plain["train"]["lr"] for row in rows} == {0.2}
    assert len(rows) == (1 + 2 + 1 + 1) * 2  # both experiments are the same now
    epochs = {row.plain["algorithm"]["name"]: row.plain["train"]["epochs"] for row in rows}
    assert epochs == {"fedavg": 2, "fedprox": 2, "local": 1, "scaffold": 1}
    assert caplog.messages == [
        "rounds=5 also replaces what the space sets for short, baseline 1",
        "train.lr=0.2 also replaces what the space sets for baseline 1",
    ]
    assert {row.plain["rounds"] for row in expand(read_space(given))} == {2, 3, 4, 7, 9}


def test_which_method_a_row_has_is_not_replaced() -> None:
    rows = expand(read_space(space(baseline={"algorithm": "local"}), ["algorithm.mu=0.3"]))
    assert {row.plain["algorithm"]["name"] for row in rows} == {"fedavg", "fedprox", "local"}
    assert {row.plain["algorithm"].get("mu") for row in rows} == {None, 0.1, 1.0}
