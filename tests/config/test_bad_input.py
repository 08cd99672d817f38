"""Whatever a file holds: an experiment, or one clear error."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flray.config.experiment import override, parse_experiment, read_yaml
from flray.config.reading import parse_yaml
from flray.errors import ExperimentError
from flray.sweep.rows import possible
from flray.sweep.space import parse_space

from mutations import mutated, values
from scenarios import TINY

ROOT = Path(__file__).parents[2]
EXPERIMENTS = [
    parse_yaml(path.read_text())
    for path in sorted((ROOT / "experiments").rglob("*.yaml"))
    if path.parent.name != "encoders"
]
SPACES = [parse_yaml(path.read_text()) for path in sorted((ROOT / "tune_spaces").glob("*.yaml"))]
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=4000)


def test_there_are_files_to_change() -> None:
    assert len(EXPERIMENTS) > 40
    assert len(SPACES) > 30
    for plain in EXPERIMENTS:
        parse_experiment(plain)


def accept_or_refuse(plain: Any) -> None:
    """Any other error than our own fails the test."""
    with suppress(ExperimentError):
        parse_experiment(as_written(plain))


def accept_or_refuse_space(plain: Any) -> None:
    with suppress(ExperimentError):
        possible(parse_space(as_written(plain), ROOT / "tune_spaces"))


def as_written(plain: Any) -> Any:
    """What a file with this content would be read as."""
    try:
        return parse_yaml(yaml.safe_dump(plain, allow_unicode=True))
    except yaml.YAMLError as error:
        raise ExperimentError(str(error)) from error


changed_experiments = st.sampled_from(EXPERIMENTS).flatmap(mutated)
changed_spaces = st.sampled_from(SPACES).flatmap(mutated)
trees = st.dictionaries(st.one_of(st.sampled_from(list(TINY)), st.text(max_size=5)), values)


@FEW
@given(changed_experiments)
def test_a_changed_experiment_is_accepted_or_refused(plain) -> None:
    accept_or_refuse(plain)


@FEW
@given(trees)
def test_any_tree_is_accepted_or_refused(plain) -> None:
    accept_or_refuse(plain)


@FEW
@given(changed_spaces)
def test_a_changed_space_is_accepted_or_refused(plain) -> None:
    accept_or_refuse_space(plain)


MORE = {
    "experiments": lambda: MANY(given(changed_experiments)(accept_or_refuse)),
    "trees": lambda: MANY(given(trees)(accept_or_refuse)),
    "spaces": lambda: settings(MANY, max_examples=2000)(
        given(changed_spaces)(accept_or_refuse_space)
    ),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(MORE))
def test_many_more_of_them(name) -> None:
    MORE[name]()()


def test_a_whole_number_that_no_float_can_hold_is_refused() -> None:
    with pytest.raises(
        ExperimentError, match=r"participation must be at most .* got 1000000+\.\.\.0+$"
    ):
        parse_experiment({**TINY, "participation": 10**400})


@FEW
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_override_is_accepted_or_refused(key, value) -> None:
    with suppress(ExperimentError):
        parse_experiment(override(TINY, [f"{key}={value}"]))


# Aliases of aliases: eleven lines for 10**10 values.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11)
)
TEXTS = {
    "code": ("seed: !!python/object/apply:os.system ['touch planted']", "python/object/apply"),
    "an object": ("model: !!python/object:flray.errors.ExperimentError {}", "python/object"),
    "a bomb of aliases": (BOMB, "more than 100000 values"),
    "a list that holds itself": ("a: &a [*a]", "more than 100000 values"),
    "nesting": ("[" * 3000, "inside each other"),
    "a number of 5000 digits": (f"seed: {'1' * 5000}", "digits"),
    "no number": ("seed: !!int many", "many"),
    "a date": ("seed: !!timestamp 2020-01-01", "text, a number, true, false or null"),
    "bytes": ("seed: !!binary YWI=", "text, a number, true, false or null"),
    "a set": ("dataset: !!set {a, b}", "text, a number, true, false or null"),
    "a key that is no text": ("1: 2", "keys are text, got 1"),
    "a zero byte": ("seed: \0", "special characters are not allowed"),
    "a reference to itself": ("seed: ${seed}", "seed"),
    "a reference to nothing": ("seed: ${nowhere}", "nowhere"),
    "the environment": ("seed: ${oc.env:HOME}", "refers to another key"),
    "the environment, hidden": ("a: env\nseed: ${oc.${a}:HOME}", "refers to another key"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_plain_yaml_is_refused(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = TEXTS[name]
    Path("x.yaml").write_text(text)
    with pytest.raises(ExperimentError) as error:
        read_yaml(Path("x.yaml"))
    assert "x.yaml is not valid YAML" in str(error.value)
    assert message in str(error.value)
    assert not Path("planted").exists()


def test_bytes_that_are_no_text_are_refused(tmp_path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ExperimentError, match=r"x.yaml is not valid YAML: 'utf-8' codec"):
        read_yaml(tmp_path / "x.yaml")
