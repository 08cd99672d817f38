"""The keeper of a run on Ray: told to stop, and a copy at a URL. Its run is one of this process."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import fsspec
import pytest

from flray.cli.arguments import files_and_overrides
from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ClientFailure, ExperimentError
from flray.records import mirror
from flray.records.mirror import Mirror
from flray.records.run_directory import RunDirectory
from flray.runs import keeper, watching
from flray.runs.assemble import build_server, prepare_in
from flray.runs.conduct import STOP_FILE, ask_to_stop
from flray.server import actor

from scenarios import TINY

pytestmark = pytest.mark.slow

RAY = override(TINY, ["execution.executor=ray", "execution.block=2"])


@pytest.fixture
def keep(monkeypatch):
    """Keep a run that trains in this process; `on_round` is called after each round."""

    def keep(out, url=None, on_round=lambda _row: None) -> None:
        def run_here(run, processes) -> bool:
            assert processes == "processes"
            inline = parse_experiment(override(RAY, ["execution.executor=inline"]))
            directory = RunDirectory(out)

            def both(row) -> None:
                on_round(row)
                run.on_round(row)

            server = build_server(*prepare_in(directory, inline), directory)
            return replace(server, on_round=both, should_stop=run.should_stop).run()

        monkeypatch.setattr(actor, "run_on_actors", run_here)
        request = keeper.Request(out, out, plan=None, threads=1, build=b"", mirror=url)
        keeper.drive(request, "processes", draw=lambda _run: ())

    return keep


def test_sigterm_to_the_keeper_ends_the_round_and_resume_goes_on(keep, tmp_path, capsys) -> None:
    directory = RunDirectory(tmp_path / "cut")
    before = signal.getsignal(signal.SIGTERM)

    def notify(row) -> None:
        if row["round"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    keep(directory.path, on_round=notify)
    assert "SIGTERM: stopping after the round in progress" in capsys.readouterr().out
    assert directory.rounds()["round"].tolist() == [1, 2]
    assert directory.summary() is None
    assert signal.getsignal(signal.SIGTERM) is before
    keep(directory.path)
    keep(tmp_path / "whole")
    whole = RunDirectory(tmp_path / "whole").summary()
    assert directory.summary()["params_sha256"] == whole["params_sha256"]


def test_a_wish_to_stop_ends_the_round_and_is_gone_afterwards(keep, tmp_path) -> None:
    out = tmp_path / "run"
    keep(out, on_round=lambda _row: ask_to_stop(out))
    assert RunDirectory(out).rounds()["round"].tolist() == [1]
    assert not (out / STOP_FILE).exists()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_keeper_copies_records_to_a_url(keep, kind, tmp_path, monkeypatch) -> None:
    """After rounds, and everything in the end; from the copy another machine goes on."""
    url = "memory://kept/run" if kind == "memory" else (tmp_path / "store").as_uri()
    files, root = fsspec.core.url_to_fs(url)
    monkeypatch.setattr(mirror, "EVERY_S", 0.0)
    monkeypatch.setattr(mirror, "gettempdir", lambda: str(tmp_path / "first"))
    seen: list[bool] = []

    def look_and_stop(row) -> None:
        seen.append(files.exists(f"{root}/config.yaml"))
        if row["round"] == 3:
            ask_to_stop(Mirror(url).local)

    keep(Mirror(url).local, url, on_round=look_and_stop)
    assert seen == [False, True, True]  # each before the copy that follows its round
    assert not files.exists(f"{root}/summary.json")

    monkeypatch.setattr(mirror, "gettempdir", lambda: str(tmp_path / "second"))
    other = Mirror(url)
    other.fetch()
    assert RunDirectory(other.local).rounds()["round"].tolist() == [1, 2, 3]
    keep(other.local, url)
    keep(tmp_path / "whole")
    for name in ("summary.json", "rounds.parquet", "clients.parquet"):
        assert files.cat_file(f"{root}/{name}") == (other.local / name).read_bytes()
    whole = RunDirectory(tmp_path / "whole").summary()
    assert RunDirectory(other.local).summary()["params_sha256"] == whole["params_sha256"]
    files.rm(root, recursive=True)


def test_who_wants_a_keeper_gets_it_before_anything_is_imported(tmp_path, monkeypatch) -> None:
    file = tmp_path / "on_ray.yaml"
    file.write_text("execution:\n  executor: ray\n")
    inline = tmp_path / "inline.yaml"
    inline.write_text("rounds: 3  # an array\n")
    monkeypatch.setattr(keeper, "_start", lambda: "a keeper")
    monkeypatch.setattr(keeper, "_waiting", waiting := [])
    for arguments, wanted in (
        ([str(file)], 1),
        ([str(inline)], 0),
        ([str(inline), "execution.executor=ray"], 1),
        ([str(inline), "execution={executor: ray, threads: 1}"], 1),
        (["demo/fedavg"], 0),
    ):
        keeper.start_early(*files_and_overrides(arguments))
        assert len(waiting) == wanted, arguments
        waiting.clear()
    with pytest.raises(ExperimentError, match=r"no experiment file nowhere.yaml"):
        keeper.start_early([str(file), "nowhere.yaml"], [])
    assert not waiting


@pytest.mark.parametrize("has_log", [True, False])
@pytest.mark.parametrize(
    ("printed", "error", "message"),
    [
        ("error: Ray did not start (why)", ExperimentError, r"^Ray did not start \(why\)$"),
        ("failed: client 3 failed", ClientFailure, "^client 3 failed$"),
        (
            "Traceback\nRuntimeError: why",
            ClientFailure,
            r"code 3 \(RuntimeError: why\); see .*log$",
        ),
        ("", ClientFailure, r"code 3; see .*server.log$"),
    ],
)
def test_the_reason_of_a_keeper_that_failed_survives(
    printed, error, message, has_log, tmp_path, monkeypatch
) -> None:
    """A log that a message names is there; what was refused before it began leaves nothing."""
    program = f"import sys; sys.stderr.write({printed!r}); sys.exit(3)"
    monkeypatch.setattr(keeper, "COMMAND", [sys.executable, "-c", program])
    out = tmp_path / "run"
    out.mkdir()
    process = keeper.take_keeper()
    process.wait()
    if has_log:
        (out / keeper.LOG).write_text(printed)
    with pytest.raises(error, match=message):
        watching.raise_error_of(process, out)
    assert out.exists() == (error is not ExperimentError)
    if out.exists():
        assert (out / keeper.LOG).read_text() == printed


def test_a_keeper_that_nobody_needs_ends_and_leaves_nothing(tmp_path) -> None:
    """Nor does it say that there is no cluster, which nobody asked for."""
    ended = subprocess.run(
        [sys.executable, "-m", "flray", "keep"],
        input="",
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "RAY_ADDRESS": "127.0.0.1:1",
        },  # where nobody listens: no seconds for Ray
        check=False,
    )
    assert (ended.returncode, ended.stdout, list(tmp_path.iterdir())) == (0, "", [])
