"""Whatever a file holds: an experiment, or one clear error."""

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flray.config.binding import Component
from flray.config.experiment import parse_experiment, read_yaml
from flray.config.reading import parse_yaml
from flray.errors import ExperimentError
from flray.sweeps.rows import known_and_examples
from flray.sweeps.space import parse_space

from mutations import mutated, values
from scenarios import TINY, tiny_experiment

ROOT = Path(__file__).parents[2]
FEW = settings(max_examples=60, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=4000)


@functools.cache
def experiments() -> list[Any]:
    files = sorted((ROOT / "experiments").rglob("*.yaml"))
    return [parse_yaml(path.read_text()) for path in files if path.parent.name != "encoders"]


@functools.cache
def spaces() -> list[Any]:
    """All but one of thousands of rows, which takes a minute for each change."""
    files = sorted((ROOT / "tune_spaces").glob("*.yaml"))
    return [parse_yaml(path.read_text()) for path in files if path.stem != "clustered_benchmark"]


def test_there_are_files_to_change() -> None:
    assert len(experiments()) > 40
    assert len(spaces()) > 30
    for plain in experiments():
        parse_experiment(plain)


def accept_or_refuse(plain: Any) -> None:
    """Any other error than our own fails the test."""
    with suppress(ExperimentError):
        parse_experiment(as_written(plain))


def accept_or_refuse_space(plain: Any) -> None:
    with suppress(ExperimentError):
        known_and_examples(parse_space(as_written(plain), ROOT / "tune_spaces"))


def as_written(plain: Any) -> Any:
    """What a file with this content would be read as."""
    try:
        return parse_yaml(yaml.safe_dump(plain, allow_unicode=True))
    except yaml.YAMLError as error:
        raise ExperimentError(str(error)) from error


# Files are read when a test needs them: every process collects all tests.
changed_experiments = st.deferred(lambda: st.sampled_from(experiments()).flatmap(mutated))
changed_spaces = st.deferred(lambda: st.sampled_from(spaces()).flatmap(mutated))
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


FEDPROX, DIRICHLET = "algorithm=fedprox", "split={name: dirichlet, clients: 3}"
ENCODER = (
    "algorithm={name: flt, clustering: {signature: {encoder: {dataset: digits, model: conv_ae}}}}"
)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    ("key", "base"),
    [
        *((f"train.{name}", "train.optimizer=sgd") for name in ("lr", "momentum", "weight_decay")),
        *(("participation", FEDPROX), ("algorithm.mu", FEDPROX), ("split.alpha", DIRICHLET)),
        *((f"execution.actors.{name}", FEDPROX) for name in ("num_cpus", "num_gpus", "memory_gb")),
        *(("execution.server.num_cpus", FEDPROX), ("evaluate.target", FEDPROX)),
        *(("algorithm.beta", "algorithm=flis_dc"), ("algorithm.delta", "algorithm=per_fedavg")),
        *(("aggregate.server_lr", FEDPROX), ("split.validation", DIRICHLET)),
        *(("dataset.noise", "dataset=synthetic"), ("algorithm.clustering.embed.min_dist", ENCODER)),
        ("algorithm.clustering.signature.encoder.lr", ENCODER),
    ],
)
def test_a_number_is_finite(key, base, value) -> None:
    with pytest.raises(ExperimentError, match=rf"{key} must be a finite number, got -?(nan|inf)$"):
        tiny_experiment(base, f"{key}={value}")


@pytest.mark.parametrize(
    ("key", "base"),
    [
        ("algorithm.clustering.partition.threshold", "algorithm=flhc"),
        ("algorithm.clustering.relate.gamma", ENCODER),
        ("algorithm.max_norm", "algorithm=cfl"),
    ],
)
def test_a_threshold_may_be_infinite_but_not_nan(key, base) -> None:
    tiny_experiment(base, f"{key}=.inf")
    with pytest.raises(ExperimentError, match=f"{key} must be a finite number, got nan"):
        tiny_experiment(base, f"{key}=.nan")


@pytest.mark.parametrize("value", [10**12, 10**18])
@pytest.mark.parametrize(
    ("key", "base"),
    [
        *((key, FEDPROX) for key in ("rounds", "split.clients", "model.hidden", "evaluate.every")),
        *((f"train.{name}", FEDPROX) for name in ("epochs", "batch_size")),
        *(("execution.block", FEDPROX), ("algorithm.number", "algorithm=ifca")),
        *(("model.latent", "model=repa_net"), ("dataset.num_train", "dataset=synthetic")),
        ("algorithm.clustering.signature.k", ENCODER),
        ("algorithm.clustering.partition.number", "algorithm=flhc"),
    ],
)
def test_a_count_is_one_that_a_machine_can_hold(key, base, value) -> None:
    with pytest.raises(ExperimentError, match=f"{key} must be at most 10000000000 in size, got 1"):
        tiny_experiment(base, f"{key}={value}")


def test_a_seed_counts_nothing() -> None:
    assert parse_experiment({**TINY, "seed": 2**62}).settings.seed == 2**62


@pytest.mark.parametrize("error", [MemoryError("17 GiB"), RuntimeError("17 GiB\ntrace")], ids=repr)
def test_what_does_not_fit_into_memory_is_one_line(error) -> None:
    component = Component("model", "mine", Mock(side_effect=error), {}, {})
    with pytest.raises(
        ExperimentError, match=r"^model mine cannot be built \(.*\): is a size .*\?$"
    ):
        component.build()


def test_a_model_that_indexes_its_shape_wrongly_is_refused_with_the_shape() -> None:
    def of_sequences(input_shape: tuple[int, ...]) -> int:
        return input_shape[1]

    component = Component("model", "mine", of_sequences, {}, {})
    assert component.build(input_shape=(8, 6)) == 6
    message = r"^model mine takes no inputs of the shape \(4,\) \(IndexError: .*\); choose another"
    with pytest.raises(ExperimentError, match=message):
        component.build(input_shape=(4,))
    without_shape = Component("model", "mine", lambda: ()[0], {}, {})
    with pytest.raises(ExperimentError, match=r"^model mine \(.*, line \d+\): IndexError"):
        without_shape.build()


LONG = "long" * 25_000


@pytest.mark.parametrize(
    "change",
    [
        *({key: LONG} for key in ("dataset", "rounds", "participation", "train", "events", LONG)),
        *({"train": {key: LONG}} for key in ("lr", "optimizer", LONG)),
        *({"dataset": {"name": name}} for name in (f"a:{LONG}", [LONG], list(range(9999)))),
        *({"execution": {"device": LONG}}, {"events": [LONG]}, {"model": f"{LONG}.yaml"}),
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_message_repeats_no_more_than_the_ends_of_a_long_value(change) -> None:
    with pytest.raises(ExperimentError) as error:
        parse_experiment({**TINY, **change})
    assert len(str(error.value)) < 2100
    assert "..." in str(error.value)


def test_a_name_that_no_file_can_have_is_no_file() -> None:
    with pytest.raises(ExperimentError, match="no experiment file longlong"):
        read_yaml(LONG[:300])


def test_a_misspelt_component_is_named() -> None:
    with pytest.raises(ExperimentError, match=r"unknown key 'algoritm' .did you mean 'algorithm'"):
        tiny_experiment("algoritm=ifca")


def test_a_value_that_the_shell_has_cut_is_told_to_be_quoted() -> None:
    with pytest.raises(ExperimentError, match=r"with spaces needs quotes, as in \"train\.lr="):
        tiny_experiment("evaluate.fine_tune={epochs:")


@FEW
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_override_is_accepted_or_refused(key, value) -> None:
    with suppress(ExperimentError):
        tiny_experiment(f"{key}={value}")


# Aliases of aliases: eleven lines for 10**10 values.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11)
)
TEXTS = {
    "code": ("seed: !!python/object/apply:os.system ['touch planted']", "python/object/apply"),
    "an object": ("model: !!python/object:flray.errors.ExperimentError {}", "python/object"),
    "a bomb of aliases": (BOMB, "more than 100000 values"),
    "a list that holds itself": ("a: &a [*a]", "more than 100000 values"),
    "nesting": ("[" * 1200, "inside each other"),
    "nesting that ends": ("a: " + "[" * 200 + "]" * 200, "inside each other"),
    "nesting in lines": ("- " * 3000 + "x", "inside each other"),
    "nesting by aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)),
        "inside each other",
    ),
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
