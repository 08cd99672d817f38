"""flray beside a plain PyTorch loop, Flower and pfl: identical work, one table.

    python benchmarks/peers/compare.py [A B C B600] [--peers flower pfl] [--device cuda]
        [--actors 1x1 10x0.1]

Run it with flray's own Python. Flower and pfl get environments of their own below --environments
when they are first asked for (some minutes). Seconds a round are medians without the first round.
`gap` is the largest difference of a final weight from that of the plain loop in float64. It fails
beyond 1e-4, or twice the gap of the plain loop itself where rounding carries that further.
`--actors 10x0.1` is flray once more on ten client actors with a tenth of a GPU each; Flower has the
same share per client.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TOLERANCE = 1e-4
EXACT = "plain in float64"
COLUMNS = ("s/round", "least", "steps/s", "x plain", "gap")
PACKAGES = {
    "flower": ("torch==2.10.0", "flwr[simulation]==1.41.0"),
    "pfl": ("torch==2.10.0", "pfl[pytorch]==0.6.0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["A", "B", "C"])
    parser.add_argument("--peers", nargs="*", default=[], choices=sorted(PACKAGES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--actors", nargs="*", default=[], metavar="NxG")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    default = Path.home() / ".cache" / "flray_peers"
    parser.add_argument("--environments", type=Path, default=default)
    arguments = parser.parse_args()
    rows = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(case, folder, arguments)
    print(f"{'case':6} {'system':16}", *(f"{name:>9}" for name in COLUMNS))
    for row in rows:
        print(
            f"{row['case']:6} {row['system']:16} {row['seconds_per_round']:9.4f} "
            f"{row['least']:9.4f} {row['steps_per_second']:9d} {row['ratio']:9.2f} "
            f"{row['gap']:9.1e}"
        )
    far = [f"{row['case']} {row['system']}" for row in rows if row["gap"] > row["allowed"]]
    if far:
        sys.exit(f"too far from the weights of the plain loop: {', '.join(far)}")


def compare(case: str, folder: str, arguments: argparse.Namespace) -> list[dict]:
    """All systems on one case, the plain loop first."""
    number = str(arguments.processes)
    python = sys.executable
    run([python, HERE / "export.py", case, folder], arguments.device)
    plain = "plain" if arguments.device != "cpu" else f"plain x{number}"
    asked = "1" if arguments.device != "cpu" else number
    script = [python, HERE / "run_plain.py", folder]
    run([*script, plain, asked], arguments.device, threads=1)
    run([*script, EXACT, asked], arguments.device, threads=1, BENCH_EXACT="1")
    systems = [plain, "flray"]
    device = f"execution.device={arguments.device}"
    run([python, HERE / "run_flray.py", case, folder, "flray", device], arguments.device)
    for actors in arguments.actors:
        systems.append(f"flray {actors}")
        count, gpus = actors.split("x")
        pool = f"execution.actors={{count: {count}, num_gpus: {gpus}}}"
        command = [python, HERE / "run_flray.py", case, folder, systems[-1], device]
        run([*command, "execution.executor=ray", pool], arguments.device)
    if "flower" in arguments.peers:
        systems.append("flower")
        share = ("1", "0") if arguments.device == "cpu" else ("1", "0.1")
        script = [HERE / "run_flower.py", folder, "flower", *share]
        run([environment("flower", arguments) / "python", *script], arguments.device, threads=1)
    if "pfl" in arguments.peers:
        systems.append("pfl")
        start = [environment("pfl", arguments) / "torchrun", "--standalone", "--nproc-per-node"]
        script = [*start, asked, HERE / "run_pfl.py", folder, "pfl"]
        run(script, arguments.device, threads=1)
    rows = [json.loads((Path(folder) / f"{system}.json").read_text()) for system in systems]
    for row in rows:
        row["gap"] = gap_of_weights(Path(folder), row["system"])
        row["allowed"] = max(TOLERANCE, 2 * rows[0]["gap"])
        row["ratio"] = rows[0]["seconds_per_round"] / row["seconds_per_round"]
    return rows


def run(command: list, device: str, threads: int | None = None, **variables: str) -> None:
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    subprocess.run(
        [str(each) for each in command],
        check=True,
        env={**os.environ, "BENCH_DEVICE": device, **variables},
    )


def environment(peer: str, arguments: argparse.Namespace) -> Path:
    """The bin folder of a peer's environment, which is made once."""
    folder = arguments.environments / peer
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *PACKAGES[peer]], check=True)
        (folder / "complete").touch()
    return folder / "bin"


def gap_of_weights(folder: Path, system: str) -> float:
    """The largest difference between a system's final weights and the exact ones."""
    exact, found = np.load(folder / f"{EXACT}.npz"), np.load(folder / f"{system}.npz")
    initial = np.load(folder / "initial.npz")
    moved = max(float(np.abs(exact[name] - initial[name]).max()) for name in initial)
    if moved < 10 * TOLERANCE:
        sys.exit(f"the plain loop's weights moved by {moved:.1e} only, too little to compare")
    return max(float(np.abs(exact[name] - found[name]).max()) for name in initial)


if __name__ == "__main__":
    main()
