"""YAML words: the same in files and in overrides."""

import pytest
import yaml

from flray.clustering.hierarchical import Hierarchical
from flray.config.experiment import parse_experiment, read_yaml
from flray.config.overrides import override
from flray.config.reading import parse_yaml, read_mapping
from flray.errors import ExperimentError

from scenarios import TINY

PARTITION = "{name: hierarchical, on: relation, number: 2}"
WORDS = ("on", "off", "yes", "no", "y", "n", "On", "OFF", "Yes", "NO", "Y", "N")


def partition_of(plain) -> Hierarchical:
    return parse_experiment(plain).algorithm.build().clustering.partition


def test_a_key_on_needs_no_quotes_in_a_file(tmp_path) -> None:
    text = yaml.safe_dump({key: value for key, value in TINY.items() if key != "algorithm"})
    text += f"algorithm: {{name: flt, clustering: {{partition: {PARTITION}}}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert partition_of(read_yaml(tmp_path / "mine.yaml")).on == "relation"


def test_nor_on_the_command_line() -> None:
    whole = override(TINY, ["algorithm=flt", f"algorithm.clustering.partition={PARTITION}"])
    average = "algorithm.clustering.partition.linkage=average"
    dotted = override(whole, [average, "algorithm.clustering.partition.on=distance"])
    assert partition_of(whole).on == "relation"
    assert partition_of(dotted).on == "distance"


@pytest.mark.parametrize("word", WORDS)
def test_only_true_and_false_are_booleans(word) -> None:
    assert parse_yaml(f"{{{word}: {word}}}") == {word: word}
    assert override({}, [f"key={word}"]) == {"key": word}


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "false", "False", "FALSE"])
def test_true_and_false_are(text) -> None:
    assert parse_yaml(text) is (text.lower() == "true")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1e30", 1e30), ("-.5", -0.5), ("1.", 1.0), ("10", 10), ("null", None)],
)
def test_numbers_are_numbers(text, value) -> None:
    found = parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["2020-01-01", "e5", "1e", "12:30.5", "."])
def test_other_words_are_text(text) -> None:
    assert parse_yaml(text) == text


def test_what_is_dumped_is_read_back() -> None:
    plain = {"on": "on", "rate": 1e-05, "big": 1e30, "far": float("inf"), "none": None, "yes": True}
    assert parse_yaml(yaml.safe_dump(plain)) == plain


def test_a_key_that_is_given_twice_is_refused(tmp_path) -> None:
    (tmp_path / "twice.yaml").write_text("seed: 1\nrounds: 2\nseed: 3\n")
    with pytest.raises(
        ExperimentError, match=r"twice.yaml is not valid YAML: .*'seed' is given twi"
    ):
        read_yaml(tmp_path / "twice.yaml")


@pytest.mark.parametrize("lr", ["0.1", "${rate}"])
def test_what_is_repeated_by_an_alias_or_a_reference_is_a_value_of_its_own(lr, tmp_path) -> None:
    file = tmp_path / "two.yaml"
    text = f"rate: 0.1\nfirst: &train\n  lr: {lr}\nsecond: *train\n"
    file.write_text(text, encoding="utf-8")
    plain = read_mapping(file, "the experiment")
    assert plain == {"rate": 0.1, "first": {"lr": 0.1}, "second": {"lr": 0.1}}
    assert plain["first"] is not plain["second"]


def test_a_merged_mapping_may_be_overridden() -> None:
    text = "{a: &a {x: 1, y: 2}, b: &b {<<: *a, x: 3}, c: {<<: *b, y: 4}}"
    assert parse_yaml(text)["c"] == {"x": 3, "y": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dataset: digits\n\tsplit: iid\n", "line 2, column 1: .*indent with spaces, not tabs"),
        ("split: {name: iid clients: 2}\n", "line 1, column 26: expected ',' or '}'"),
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' is given twice"),
    ],
)
def test_what_is_no_yaml_is_said_on_one_line(text, expected) -> None:
    with pytest.raises(yaml.YAMLError, match=expected) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)
