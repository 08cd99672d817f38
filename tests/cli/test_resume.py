"""A run goes on with its own checkpoints, settings and records, or says which of them are not."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

import flray
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory

from scenarios import TINY, run_experiment, typed

pytestmark = pytest.mark.slow

CLUSTERED = override(TINY, ["algorithm={name: flhc, rounds_before: 1}", "rounds=4"])


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[Path]:
    """Finished runs of two seeds, and the same runs stopped after round 2; no figures are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flray.cli.concluding.write_figures", lambda *_: [])
        patch.setattr("flray.reports.embed.figure_source", lambda *_: ("data:,", 1))
        patch.chdir(tmp_path_factory.mktemp("resume"))
        for seed in (0, 1):
            experiment = parse_experiment(override(CLUSTERED, [f"seed={seed}"]))
            run_experiment(experiment, Path(f"whole_{seed}"))
            rounds = iter(range(4))
            stop = {"should_stop": lambda rounds=rounds: next(rounds) == 1}
            run_experiment(experiment, Path(f"part_{seed}"), **stop)
        yield Path.cwd()


@pytest.fixture
def copy(tmp_path):
    def make(name: str) -> Path:
        return Path(shutil.copytree(name, tmp_path / name))

    return make


def resume(run: Path, *overrides: str) -> str:
    return typed("run", "--out", run, "--resume", *overrides)


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def numbers(run: Path | str) -> dict:
    summary = RunDirectory(run).summary()
    assert summary is not None
    return {key: value for key, value in summary.items() if key != "seconds"}


def put_checkpoints_of(other: str, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(Path(other) / "checkpoints", run / "checkpoints")


class TestCheckpointsOfAnotherRun:
    def test_a_run_does_not_go_on_from_them(self, copy) -> None:
        run = copy("part_0")
        put_checkpoints_of("part_1", run)
        with pytest.raises(ExperimentError, match=r"round_000002.json .* of another run"):
            resume(run)

    def test_no_model_is_exported_from_them(self, copy, tmp_path) -> None:
        run = copy("whole_0")
        put_checkpoints_of("whole_1", run)
        with pytest.raises(ExperimentError, match="of another run"):
            typed("export", run, "--client", 0, tmp_path / "client.ckpt")
        assert not (tmp_path / "client.ckpt").exists()

    def test_a_finished_run_that_is_extended_keeps_its_summary(self, copy) -> None:
        run = copy("whole_0")
        put_checkpoints_of("whole_1", run)
        with pytest.raises(ExperimentError, match="of another run"):
            resume(run, "rounds=6")
        assert numbers(run) == numbers("whole_0")

    def test_a_model_that_is_not_that_of_the_summary_is_not_exported(self, copy) -> None:
        """The newest checkpoint is gone; the one before belongs to the run but not to its end."""
        run = copy("whole_0")
        (run / "checkpoints/round_000004.json").unlink()
        with pytest.raises(ExperimentError, match=r"params_sha256.*summary\.json"):
            flray.load(run).model(0)


class TestSettings:
    def test_an_edited_configuration_is_refused_and_may_be_typed(self, copy) -> None:
        run = copy("part_0")
        edit(run / "config.yaml", "lr: 0.1", "lr: 0.5")
        message = (
            r"config.yaml was edited: train.lr was 0.1 and is now 0.5.*"
            r"--resume train.lr=0.1.*--resume train.lr=0.5"
        )
        with pytest.raises(ExperimentError, match=message):
            resume(run)
        resume(run, "train.lr=0.1")
        assert numbers(run) == numbers("whole_0")

    def test_a_command_may_change_a_value_and_both_are_recorded(self, copy) -> None:
        run = copy("part_0")
        resume(run, "train.lr=0.05")
        assert numbers(run)["params_sha256"] != numbers("whole_0")["params_sha256"]
        assert RunDirectory(run).config()["train"]["lr"] == 0.05
        environment = json.loads((run / "environment.json").read_text())
        held = [
            (c["from_round"], c["config"]["train"]["lr"]) for c in environment["configurations"]
        ]
        assert held == [(1, 0.1), (3, 0.05)]
        resume(run, "rounds=5")
        assert numbers(run)["rounds"] == 5
        configurations = RunDirectory(run).configurations()
        assert [c["from_round"] for c in configurations] == [1, 3, 5]
        assert [c["config"]["rounds"] for c in configurations] == [4, 4, 5]

    def test_a_change_from_python_is_recorded_too(self, copy) -> None:
        run = copy("part_0")
        flray.run(CLUSTERED, run, resume=True, overrides=["train.lr=0.05"])
        assert [c["from_round"] for c in RunDirectory(run).configurations()] == [1, 3]
        other = override(CLUSTERED, ["train.lr=0.05"])
        with pytest.raises(ExperimentError, match=r"train.lr is 0.1 there and 0.05 here"):
            flray.run(other, copy("part_1"), resume=True, seed=1)

    @pytest.mark.parametrize(
        "change",
        ["seed=3", "algorithm=fedavg", "model.hidden=20", "execution.precision=float64"],
    )
    def test_what_makes_clients_and_state_stays(self, copy, change) -> None:
        with pytest.raises(ExperimentError, match="holds another experiment"):
            resume(copy("part_0"), change)

    def test_a_finished_run_changes_with_more_rounds_only(self, copy) -> None:
        run = copy("whole_0")
        with pytest.raises(ExperimentError, match=r"more rounds, as in .*train.lr=0.05 rounds=5$"):
            resume(run, "train.lr=0.05")
        resume(run, "train.lr=0.05", "rounds=5")
        assert [c["from_round"] for c in RunDirectory(run).configurations()] == [1, 5]

    def test_what_decides_no_result_may_be_edited(self, copy) -> None:
        run = copy("part_0")
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["execution"]["actors"]["count"] = 3
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        resume(run)
        assert numbers(run) == numbers("whole_0")

    def test_a_folder_of_an_older_version_is_refused(self, copy) -> None:
        run = copy("part_0")
        environment = json.loads((run / "environment.json").read_text())
        environment.pop("configurations")
        (run / "environment.json").write_text(json.dumps(environment))
        with pytest.raises(ExperimentError, match=r"has no 'configurations'.*another --out"):
            resume(run)


MISSING = ("rounds.parquet", "checkpoints/clients", "clusterings")


class TestMissingRecords:
    @pytest.mark.parametrize("name", MISSING)
    def test_an_unfinished_run_does_not_go_on_without_them(self, copy, name) -> None:
        run = copy("part_0")
        remove(run / name)
        with pytest.raises(ExperimentError, match=r"records .* are missing"):
            resume(run)
        shutil.rmtree(run / "checkpoints")  # as the message says
        resume(run)
        assert numbers(run) == numbers("whole_0")

    @pytest.mark.parametrize("name", ["rounds.parquet", "clients.parquet", "clusterings"])
    def test_a_finished_run_is_not_extended_without_them(self, copy, name) -> None:
        run = copy("whole_0")
        remove(run / name)
        with pytest.raises(ExperimentError, match="missing"):
            resume(run, "rounds=6")
        assert (run / "summary.json").exists()

    @pytest.mark.parametrize("name", ["", *MISSING])
    def test_a_run_notices_that_they_are_removed_while_it_goes_on(self, tmp_path, name) -> None:
        def disturb(row: dict) -> None:
            if row["round"] == 3:
                remove(tmp_path / "run" / name)

        refusal = ""
        try:
            flray.run(CLUSTERED, tmp_path / "run", rounds=6, on_round=disturb)
        except ExperimentError as error:
            refusal = str(error)
        if name == "rounds.parquet" and not refusal:  # it was being written, and is there again
            assert RunDirectory(tmp_path / "run").rounds()["round"].tolist() == [1, 2, 3, 4, 5, 6]
        else:
            assert "missing" in refusal
            assert not (tmp_path / "run/summary.json").exists()


def remove(path: Path) -> None:
    """Remove a file or folder, into which a run may be writing."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def changed_accuracy(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"accuracy_mean": 0.99}))


def of_another_seed(run: Path) -> None:
    shutil.copy("whole_1/summary.json", run / "summary.json")


def without_rounds(run: Path) -> None:
    (run / "rounds.parquet").unlink()


def with_fewer_rounds(run: Path) -> None:
    rounds = pd.read_parquet(run / "rounds.parquet")
    rounds[:2].to_parquet(run / "rounds.parquet")


DAMAGES = (changed_accuracy, of_another_seed, without_rounds, with_fewer_rounds)
READERS = {
    "table": lambda run: typed("table", "flhc.4", "--runs", run.parent),
    "report": lambda run: typed("report", run),
    "resume": resume,
    "attach": lambda run: typed("attach", run),
    "load": lambda run: flray.load(run).summary,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_a_summary_that_does_not_fit_its_records_is_noticed(copy, damage, reader) -> None:
    run = copy("whole_0")
    damage(run)
    with pytest.raises(ExperimentError, match=r"summary\.json does not fit"):
        READERS[reader](run)
