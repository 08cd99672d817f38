"""flray through its own path: round loop, records, a checkpoint every round.

python benchmarks/peers/run_flray.py CASE FOLDER SYSTEM [key=value ...]
"""

import sys
import tempfile
from pathlib import Path

from work import Work, write_result

from flray.config.experiment import parse_experiment, read_yaml
from flray.config.overrides import override
from flray.records.checkpoint import CheckpointStore
from flray.records.run_directory import RunDirectory
from flray.runs.launch import run_experiment


def main() -> None:
    case, folder, system, *overrides = sys.argv[1:]
    file = Path(__file__).parent / "cases" / f"{case}.yaml"
    work = Work(folder)
    with tempfile.TemporaryDirectory() as out:
        experiment = parse_experiment(override(read_yaml(file), overrides))
        run_experiment(experiment, Path(out) / "run")
        rounds = RunDirectory(Path(out) / "run").rounds()
        found = CheckpointStore(Path(out) / "run" / "checkpoints").load_latest()
    assert found is not None
    columns = [c for c in rounds.columns if c.startswith("seconds_")]
    print(rounds[["round", "seconds", *columns]].to_string(), file=sys.stderr)
    # A row's seconds hold the checkpoint of the round before: all rounds but the first are whole.
    evaluated = rounds["seconds_evaluate"].fillna(0.0)  # of the last round
    seconds = (rounds["seconds"] - evaluated).to_numpy()
    write_result(work, system, seconds, found.state.bank.row(0))


if __name__ == "__main__":
    main()
