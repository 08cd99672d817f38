"""`flray init`, `flray keys`, `flray list` and shipped files: the first minutes of a new user."""

import functools
import json
from pathlib import Path

import pytest
import yaml

from flray.algorithms import ALGORITHMS
from flray.cli import main
from flray.cli.starting import experiment_text
from flray.config.experiment import parse_experiment, read_yaml
from flray.config.reference import ComponentEntry, components
from flray.config.shipped import EXPERIMENTS, SPACES, find_file, names
from flray.errors import ExperimentError
from flray.runs.rehearsal import describe
from flray.sweeps.space import read_space

from scenarios import typed


@functools.cache
def methods() -> dict[str, ComponentEntry]:
    """The keys of every method, by its name."""
    return {each.name: each for each in components("algorithm")}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_method_can_be_started_from_and_its_comments_are_its_defaults(name) -> None:
    assert f"flray run {name}.yaml" in typed("init", name)
    text = Path(f"{name}.yaml").read_text()
    experiment = parse_experiment(read_yaml(f"{name}.yaml"))
    assert experiment.algorithm.name == name
    shown = "".join(
        line.replace("  # ", "  ", 1) if line.startswith("  # ") else line
        for line in text.splitlines(keepends=True)
    )
    assert parse_experiment(yaml.safe_load(shown)).plain == experiment.plain


@pytest.mark.parametrize("name", ["flis_dc", "flt", "repa", "wd"])
def test_methods_with_needs_of_their_own_would_run(name, tmp_path) -> None:
    text = experiment_text(methods()[name], tmp_path / "mine.yaml")
    assert "rounds of" in describe(parse_experiment(yaml.safe_load(text)))


@pytest.mark.usefixtures("folder")
def test_a_blank_experiment_and_a_copy_of_a_papers() -> None:
    typed("init")
    assert parse_experiment(read_yaml("experiment.yaml")).algorithm.name == "fedavg"
    typed("init", "flhc/mnist_label_swap", "--out", "mine.yaml")
    assert read_yaml("mine.yaml") == read_yaml("flhc/mnist_label_swap")
    with pytest.raises(ExperimentError, match="exists"):
        typed("init")
    with pytest.raises(ExperimentError, match="flis/cifar10_dc"):
        typed("init", "flis")
    with pytest.raises(ExperimentError, match="methods: apfl, cfl, cfl_gp, clove"):
        typed("init", "fedsomething")


@pytest.mark.usefixtures("folder")
def test_every_shipped_file_is_found_by_name_from_any_folder() -> None:
    assert len(names(EXPERIMENTS)) > 40
    assert len(names(SPACES)) > 30
    for name in names(EXPERIMENTS):
        assert find_file(name) == find_file(f"experiments/{name}.yaml")
    space = read_space(Path("flhc_digits"))
    assert space.experiments["flhc"]["dataset"] == "digits"
    with pytest.raises(ExperimentError, match="did you mean 'flhc/mnist_label_swap'"):
        read_yaml("flhc/mnist_label_swp")


@pytest.mark.usefixtures("folder")
def test_a_shipped_experiment_runs_by_name_and_a_file_of_that_name_goes_before() -> None:
    assert "round 1/1" in typed("run", "demo/fedavg", "rounds=1", "train.epochs=1", "--out", "a")
    Path("demo").mkdir()
    Path("demo/fedavg.yaml").write_text("dataset: nothing\n")
    assert find_file("demo/fedavg") == Path("demo/fedavg.yaml")


@pytest.mark.usefixtures("folder")
def test_keys_are_listed_by_prefix_and_by_component() -> None:
    assert "train.lr" in typed("keys")
    under = typed("keys", "execution.actors")
    assert "per_client" in under
    assert "train.lr" not in under
    assert "rounds_before" in typed("keys", "flhc")
    assert "linkage" in typed("keys", "partition.hierarchical")
    assert "must be given" in typed("keys", "split.clients")
    with pytest.raises(ExperimentError, match="unknown key or component"):
        typed("keys", "trian")


MEANT = [
    ("run mine.yaml train.lr 0.1", "type train.lr=0.1"),
    ("run mine.yaml train.lr = 0.1", "type train.lr=0.1"),
    ("run mine.yaml train.lr= 0.1", "type train.lr=0.1"),
    ("run mine.yaml rounds --out x", "type rounds=VALUE"),
    ("run mine.yaml --train.lr=0.1", "type train.lr=0.1"),
    ("run mine.yaml --train.lr 0.1", "type train.lr=0.1"),
    ("check mine.yaml --linkage ward", "type algorithm.clustering.partition.linkage=ward"),
    ("sweep flhc_digits --seed 3", "type seed=3"),
    ("plan mine.yaml -lr 0.1", "type train.lr=0.1"),
    ("run mine.yaml learning_rate=0.1", "did you mean train.lr?"),
    ("run mine.yaml train.learning_rate=0.1", "did you mean train.lr?"),
    ("run mine.yaml num_clients=9", "did you mean split.clients?"),
    ("run mine.yaml num_rounds=9", "did you mean rounds?"),
    ("run mine.yaml fraction=0.1", "did you mean participation?"),
    ("run mine.yaml alpha=0.1", "did you mean split.alpha or algorithm.alpha?"),
    ("run min.yaml", "did you mean 'mine.yaml'?"),
    ("run min", "did you mean 'mine'?"),
    ("run mnist_label_swap", "did you mean 'flhc/mnist_label_swap'?"),
    ("run flhc", "`flray init flhc` writes one"),
    ("run .", ". is a folder; expected a YAML file"),
    ("run space.yaml", "type flray sweep space.yaml"),
    ("sweep mine.yaml", "type flray run mine.yaml"),
    ("run mine.yaml mine.yaml", "mine.yaml is given twice"),
    ("run mine.yaml --resume", "no run of mine below runs"),
    ("attach several", "holds 2 runs; name the folder of one: several/a/seed_0"),
    ("keys flch", "did you mean 'flhc'?"),
    ("keys lr", "did you mean 'train.lr'?"),
    ("init flch", "did you mean 'flhc'?"),
]


@pytest.mark.parametrize(("command", "expected"), MEANT, ids=[command for command, _ in MEANT])
def test_what_was_meant_is_named(folder, command, expected) -> None:
    (folder / "mine.yaml").write_text(experiment_text(methods()["flhc"], Path("mine.yaml")))
    (folder / "space.yaml").write_text("experiment: mine.yaml\n")
    (folder / "several").mkdir()
    runs = [{"name": name, "folder": f"{name}/seed_0", "experiment": {}} for name in ("a", "b")]
    (folder / "several" / "command.json").write_text(json.dumps({"overrides": [], "runs": runs}))
    with pytest.raises(ExperimentError) as caught:
        typed(*command.split())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [["run", "--oot"], ["rn"], ["report", "absent"], ["plan", "--gpus", "two"]]
)
def test_what_click_refuses_is_one_line_that_names_the_help(arguments, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["flray", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    message = capsys.readouterr().err
    assert (stop.value.code, message.count("\n")) == (2, 1)
    assert message.startswith("error: ")
    assert message.endswith("--help.\n")


def test_a_space_that_comes_with_flray_is_checked_by_name() -> None:
    assert "ok flhc_digits: " in typed("check", "flhc_digits")


def test_lists_name_shipped_files() -> None:
    assert "flhc/mnist_label_swap" in typed("list", "experiments")
    assert "flhc_table4" in typed("list", "spaces")
