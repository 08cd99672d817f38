"""Whatever the command line is given: a result or one message, and nothing half-written."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flray.cli import cli
from flray.config.overrides import override
from flray.errors import ClientFailure, ExperimentError
from flray.records.run_directory import RunDirectory

from mutations import mutated
from scenarios import TINY

pytestmark = pytest.mark.slow

FEW = settings(max_examples=25, suppress_health_check=list(HealthCheck))
CLUSTERED = override(TINY, ["algorithm={name: flhc, rounds_before: 1}", "rounds=3"])
BASES = [
    TINY,
    CLUSTERED,
    override(TINY, ["algorithm=ifca", "evaluate={every: 2, target: 0.5}", "split=iid"]),
]
WORDS = ("x.yaml", "--out", "out", "--resume", "a=b", "--max-minutes", "nan", "-1", ".", "seeds=0")
COMMANDS = ("run", "check", "sweep", "report", "table", "attach", "list", "pretrain")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[Path]:
    """Where the command lines run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("bad"))
        patch.setenv("FLRAY_DATA", "nowhere")
        yield Path.cwd()


def invoke(*arguments: str) -> Result:
    """Run a command; the only errors are those that `main` turns into a message."""
    done = CliRunner().invoke(cli, arguments)
    if not isinstance(done.exception, SystemExit | ExperimentError | ClientFailure | None):
        raise done.exception
    return done


def check_or_run(plain: dict[str, Any]) -> None:
    """Refused by both commands or by none, and where it is refused nothing is left."""
    shutil.rmtree("out", ignore_errors=True)
    Path("x.yaml").write_text(yaml.safe_dump(plain, allow_unicode=True))
    done = invoke("run", "x.yaml", "--out", "out", "--max-minutes", "0")
    if isinstance(done.exception, ExperimentError):
        assert not Path("out").exists()
        assert invoke("check", "x.yaml").exit_code == 2
    else:
        assert RunDirectory("out").rounds()["round"].tolist() == [1] or done.exception


changed = st.sampled_from(BASES).flatmap(mutated)
# What a shell can pass: anything but a zero byte.
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
words = st.lists(st.one_of(text, st.sampled_from(WORDS)), min_size=1, max_size=4)


@FEW
@given(changed)
def test_a_changed_experiment_runs_or_leaves_nothing(plain) -> None:
    check_or_run(plain)


def take_or_refuse(command: str, arguments: list[str]) -> None:
    Path("x.yaml").write_text("dataset: digits")
    invoke(command, *arguments)


@FEW
@given(st.sampled_from(COMMANDS), words)
def test_any_arguments_are_taken_or_refused(command, arguments) -> None:
    take_or_refuse(command, arguments)


@FEW
@given(st.binary(max_size=60))
def test_a_file_of_any_bytes_is_refused(content) -> None:
    Path("x.yaml").write_bytes(content)
    assert invoke("check", "x.yaml").exit_code == 2


@pytest.mark.parametrize("name", ["[/x].yaml", "[red]x.yaml", "a[/b].yaml", "x" * 251 + ".yaml"])
@pytest.mark.parametrize("is_valid", [True, False])
def test_names_of_files_are_printed_as_they_are(name, is_valid) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    with suppress(OSError):  # of the longest, which no file system takes
        Path(name).write_text(yaml.safe_dump(TINY) if is_valid else "dataset: digits")
    done = invoke("check", name)
    is_valid = is_valid and Path(name).parent.is_dir() and len(name) < 255
    assert done.exit_code == (0 if is_valid else 2)
    assert done.output.startswith(f"ok {Path(name).stem}: " if is_valid else f"no {name}: ")


MORE = {
    "experiments": lambda more: more(given(changed)(check_or_run)),
    "arguments": lambda more: more(given(st.sampled_from(COMMANDS), words)(take_or_refuse)),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(MORE))
def test_many_more_of_them(name) -> None:
    """HYPOTHESIS_PROFILE=explore draws others each time."""
    MORE[name](settings(FEW, max_examples=300))()
