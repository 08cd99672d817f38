"""Run the sweeps behind these pages again, side by side, and write their tables and archives.

    python docs/results/reproduce.py flhc_table1 flis_table4 --seeds 0 1 --lanes 2 --minutes 25

sweeps.yaml lists them; without names the list is printed. A sweep goes to OUT/NAME/seed_N, where
what an earlier call left is resumed. Rows that have ended are packed into OUT/NAME/seed_N.tar.xz,
which `flray table` reads unpacked; clusterings and scores of single clients are left out. Lanes run
at a time and share the GPU.
"""

import argparse
import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

FOLDER = Path(__file__).parent
SPACES = FOLDER.parents[1] / "tune_spaces"
TRIES = 2  # calls for a sweep: rows for which a shared GPU had no memory are left to a second one
LEFT_OUT = ("clusterings", "clients.parquet", "cache", "checkpoints")  # parts of paths


@dataclass(frozen=True)
class Sweep:
    """A sweep of sweeps.yaml with one seed; `seed` None: the space has its own."""

    name: str
    space: str
    typed: tuple[str, ...]  # key=value, as typed after the space
    seed: int | None
    out: Path

    @property
    def folder(self) -> Path:
        """Where its rows and report are."""
        return self.out / self.name / ("seeds" if self.seed is None else f"seed_{self.seed}")

    def run(self, deadline: float) -> bool:
        """Start or resume it, unless the time is over, and pack it; True if all rows have ended."""
        for _ in range(TRIES):
            minutes = (deadline - monotonic()) / 60
            if self.is_complete() or minutes <= 0:
                break
            seed = [] if self.seed is None else [f"seed={self.seed}"]
            ends = [] if minutes == float("inf") else ["--max-minutes", f"{minutes:.2f}"]
            resume = ["--resume"] if (self.folder / "sweep.json").exists() else []
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with self.folder.with_suffix(".log").open("a", encoding="utf-8") as log:
                command = ["sweep", self.space, *self.typed, *seed, *ends, *resume]
                flray([*command, "--out", str(self.folder)], log)
        self.pack()
        return self.is_complete()

    def is_complete(self) -> bool:
        """True if no row is unfinished; rows may have failed."""
        report = self.folder / "sweep.json"
        if not report.exists():
            return False
        return json.loads(report.read_text(encoding="utf-8")).get("unfinished") == 0

    def pack(self) -> None:
        """Write the archive of the rows that have ended, unless it is up to date."""
        archive, report = self.folder.with_suffix(".tar.xz"), self.folder / "sweep.json"
        if not report.exists() or _is_newer(archive, report):
            return
        with tarfile.open(archive, "w:xz", preset=9) as packed:
            for summary in sorted(self.folder.glob("runs/*/summary.json")):
                run = summary.parent
                packed.add(run, f"runs/{run.name}", filter=_without_large_parts)
            for part in ("space.yaml", "sweep.json", "rows.parquet"):
                packed.add(self.folder / part, part)


def _is_newer(file: Path, other: Path) -> bool:
    return file.exists() and file.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _without_large_parts(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if any(part in LEFT_OUT for part in Path(member.name).parts) else member


def flray(arguments: Sequence[str], output: object) -> None:
    """Run `flray`; what it prints goes to a file, errors too."""
    command = [sys.executable, "-m", "flray", *arguments]
    subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)


@cache
def listed_sweeps() -> dict[str, Any]:
    """The content of sweeps.yaml. Any: YAML."""
    return dict(yaml.safe_load((FOLDER / "sweeps.yaml").read_text(encoding="utf-8")))


def sweeps_of(names: Sequence[str], seeds: Sequence[int], out: Path) -> list[Sweep]:
    """The sweeps with these names, seed by seed."""
    listed = listed_sweeps()
    if unknown := [name for name in names if name not in listed]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(listed)}")
    found = []
    for name in names:
        plain = listed[name]
        space, typed = str(SPACES / f"{plain.get('space', name)}.yaml"), tuple(plain["set"])
        found += [Sweep(name, space, typed, seed, out) for seed in plain.get("seeds", seeds)]
    return found


def write_tables(names: Sequence[str], out: Path) -> None:
    """Fill the published tables of these sweeps with what has been run so far."""
    listed = listed_sweeps()
    for name in names:
        if "table" in listed[name] and (out / name).is_dir():
            runs = ["--runs", str(out / name), "--format", "md"]
            with (out / name / "table.md").open("w", encoding="utf-8") as table:
                flray(["table", listed[name]["table"], *runs], table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="sweeps, which begin in this order")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lanes", type=int, default=1, help="sweeps at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    given = parser.parse_args()
    if not given.names:
        return print((FOLDER / "sweeps.yaml").read_text(encoding="utf-8"))
    deadline = monotonic() + 60 * given.minutes
    sweeps = sweeps_of(given.names, given.seeds, given.out)
    with ThreadPoolExecutor(given.lanes) as lanes:
        ended = lanes.map(lambda sweep: sweep.run(deadline), sweeps)
        for sweep, is_complete in zip(sweeps, ended, strict=True):
            log = sweep.folder.with_suffix(".log")
            print(
                sweep.folder, "complete" if is_complete else f"not complete, see {log}", flush=True
            )
    write_tables(given.names, given.out)


if __name__ == "__main__":
    main()
