"""Whatever happened to the files of a run: every command gives the right result or one message."""

import errno
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

import flray
from flray.errors import ClientFailure, ExperimentError
from flray.records.run_directory import RunDirectory

from scenarios import TINY, typed

pytestmark = pytest.mark.slow

SAMPLE = 12
COMMON = {**TINY, "algorithm": {"name": "flhc", "rounds_before": 1}, "rounds": 3}
RUNS = ("whole", "part")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[Path]:
    """Where the commands run, with a finished run and one that was stopped after round 1.

    Figures are not drawn: they take most of the time and read what others have read before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flray.cli.concluding.write_figures", lambda *_: [])
        patch.setattr("flray.reports.embed.figure_source", lambda *_: ("data:,", 1))
        patch.chdir(tmp_path_factory.mktemp("damage"))
        Path("base.yaml").write_text(yaml.safe_dump(COMMON))
        typed("run", "base.yaml", "--out", "whole")
        typed("run", "base.yaml", "--out", "part", "--max-minutes", "0")
        shutil.copytree("whole", "longer")
        typed("run", "--out", "longer", "--resume", "rounds=4")
        export("whole", Path("whole.ckpt"))
        for run in RUNS:
            Path(run, "run.lock").touch()
        yield Path.cwd()


# How a file is damaged.


def truncated(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def scrambled(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(max(64, file.stat().st_size)))


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    content[random.Random(1).randrange(len(content))] ^= 4
    file.write_bytes(content)


def null(file: Path) -> None:
    file.write_text("null")


def listed(file: Path) -> None:
    file.write_text("[1, 2]")


def of_other_types(file: Path) -> None:
    """Valid, but numbers are texts, and texts, lists and mappings are numbers."""
    if file.suffix == ".parquet":
        table = pd.read_parquet(file)
        table.astype(dict.fromkeys(table.select_dtypes("number"), str)).to_parquet(file)
    else:
        held = yaml.safe_load(file.read_text(errors="replace")) if is_text(file) else {}
        changed = {key: "x" if isinstance(v, int | float) else 5 for key, v in (held or {}).items()}
        file.write_text(json.dumps(changed))


def with_other_keys(file: Path) -> None:
    if file.suffix == ".parquet":
        pd.DataFrame({"other": [1, 2]}).to_parquet(file)
    else:
        file.write_text('{"other": {"key": 1}}')


def replaced_by_a_folder(file: Path) -> None:
    removed(file)
    file.mkdir()


def removed(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def replaced_by_a_file(file: Path) -> None:
    removed(file)
    file.touch()


def is_text(file: Path) -> bool:
    return file.suffix in (".json", ".yaml")


OF_FILES = (
    *(truncated, emptied, scrambled, flipped, null, listed, of_other_types, with_other_keys),
    *(replaced_by_a_folder, removed),
)
OF_FOLDERS = (removed, replaced_by_a_file)


# What reads a run; each raises if what it was given back is not right.


def resume(run: str) -> None:
    typed("run", "--out", run, "--resume")
    assert sha256(run) == sha256("whole")


def resume_with_the_file(run: str) -> None:
    typed("run", "base.yaml", "--out", run, "--resume")
    assert sha256(run) == sha256("whole")


def extend(run: str) -> None:
    typed("run", "--out", run, "--resume", "rounds=4")
    assert sha256(run) == sha256("longer")
    assert len(RunDirectory(run).clients()) == len(RunDirectory("longer").clients())


def sha256(run: str) -> str:
    summary = RunDirectory(run).summary()
    assert summary is not None
    return summary["params_sha256"]


def report(run: str) -> None:
    typed("report", run)


def table(run: str) -> None:
    typed("table", "flhc.4", "--runs", run)


def attach(run: str) -> None:
    typed("attach", run)


def check(run: str) -> None:
    typed("check", f"{run}/config.yaml")


def export(run: str, file: Path = Path("client.ckpt")) -> None:
    file.unlink(missing_ok=True)
    typed("export", run, "--client", "0", str(file))
    if (Path(run) / "summary.json").is_file():
        found, expected = (torch.load(f, weights_only=True) for f in (file, Path("whole.ckpt")))
        for name, leaf in expected["state_dict"].items():
            assert torch.equal(found["state_dict"][name], leaf)


def export_tables(run: str) -> None:
    for name in ("rounds", "clients"):
        typed("export", run, "--table", name, f"{name}.csv")


def load(run: str) -> None:
    result = flray.load(run)
    _ = result.summary, result.rounds, result.clients, result.clusters, result.clusterings


READERS = (
    *(resume, resume_with_the_file, extend, report, table, attach, check, export, export_tables),
    load,
)
Case = tuple[str, str, Callable[[Path], None], Callable[[str], None]]


def cases() -> list[Case]:
    """Every run with every file or folder, way to damage it and reader."""
    found: list[Case] = []
    for run in RUNS:
        paths = sorted(Path(run).rglob("*"))
        names = [str(path.relative_to(run)) for path in paths if "figures" not in path.parts]
        for name in names:
            kinds = OF_FILES if (Path(run) / name).is_file() else OF_FOLDERS
            found += itertools.product([run], [name], kinds, READERS)
    return found


def read_or_refuse(case: Case) -> None:
    """The reader succeeds or raises what the command line shows as one line."""
    run, name, damage, read = case
    shutil.rmtree("damaged", ignore_errors=True)
    shutil.copytree(run, "damaged")
    damage(Path("damaged") / name)
    refusal = ""
    try:
        read("damaged")
    except (ExperimentError, ClientFailure, SystemExit) as error:
        refusal = str(error)
    except Exception as error:
        told = [run, name, damage.__name__, read.__name__]
        raise AssertionError(" · ".join(told)) from error
    assert "\n" not in refusal


def test_a_damaged_run_is_read_or_refused() -> None:
    for case in random.Random(0).sample(cases(), SAMPLE):
        read_or_refuse(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", READERS)
def test_every_damage_is_noticed_or_does_not_matter(reader) -> None:
    for case in cases():
        if case[-1] is reader:
            read_or_refuse(case)


TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "base.yaml", "--out", "base.yaml/below"),
        ("run", "base.yaml", "--out", "/proc/below"),
        ("run", "base.yaml", "--out", TOO_LONG),
        ("run", "--out", TOO_LONG, "--resume"),
        ("report", "whole", "--out", "/proc/page.html"),
        ("report", "whole", "--out", "base.yaml/page.html"),
        ("export", "whole", "--client", "0", "nowhere/client.ckpt"),
        ("export", "whole", "--table", "rounds", "nowhere/rounds.csv"),
        ("export", "whole", "--client", "0", f"{TOO_LONG}.ckpt"),
        ("init", "--out", "nowhere/mine.yaml"),
        ("table", "flhc.4", "--runs", TOO_LONG),
    ],
)
def test_a_place_that_cannot_be_written_is_one_message(arguments) -> None:
    with pytest.raises((ExperimentError, SystemExit)) as refused:
        typed(*arguments)
    assert "\n" not in str(refused.value)
    assert not Path("nowhere").exists()


def test_a_read_only_file_system_is_one_message(monkeypatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ExperimentError, match=r"read or write .*new': Read-only"):
        typed("run", "base.yaml", "--out", "new")
