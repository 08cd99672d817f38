"""A run's directory: the one place a result is written to and read from.

`recorded.py` has what a run records; this file decides which experiment may start, resume or change
its settings in a folder.
"""

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from flray.columns import SPLIT_SHA256
from flray.config.deciding import (
    FIXED,
    Config,
    deciding,
    differences,
    first_difference,
    is_below,
    text_or_absent,
    with_block_of,
)
from flray.errors import ExperimentError
from flray.files import TEMPORARY, replace_text, to_json
from flray.records import lock
from flray.records.command import COMMAND
from flray.records.inside import refuse_links_out
from flray.records.recorded import CLIENT_NAMES, CONFIGURATIONS, FILES, Json, RunRecords

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # tenfold faster where libyaml is there


class RunDirectory(RunRecords):
    """Everything a run records, and the rules by which an experiment may start or go on in it.

    A folder holds one experiment. A run starts in a folder that is empty or new, and resumes in one
    with the same deciding keys (`config/deciding.py`); more rounds and, on request, other settings
    may be given then. Who writes must hold the lock of the folder (`records/lock.py`).

    Args:
        path: the folder; `start` makes it.

    >>> from tempfile import mkdtemp
    >>> run = RunDirectory(mkdtemp())
    >>> run.start({"dataset": "digits", "rounds": 2}, environment={}, split_digest="abc")
    >>> run.append_rounds([{"round": 1, "accuracy_mean": 0.5}, {"round": 2, "accuracy_mean": 0.7}])
    >>> run.finish({"rounds": 2, "accuracy_mean": 0.7})
    >>> run.holds_run(), run.rounds()["accuracy_mean"].tolist(), run.summary()["rounds"]
    (True, [0.5, 0.7], 2)
    """

    def holds_run(self) -> bool:
        """True if a run has started here: config.yaml is written last by `start`.

        Without it, a folder with other files of a run is a start that was cut short.
        """
        return self._config.is_file()

    def check_start(self, config: Config) -> None:
        """Refuse a directory that already holds something.

        Raises:
            ExperimentError: The message says what is there and what to type instead.
        """
        self.check_resume(config)
        if self.holds_run():
            command = f"flray run --out {shlex.quote(str(self.path))} --resume"
            raise ExperimentError(
                f"{self.path} already holds this experiment: pass --resume to go on with it "
                f"({command}; in Python resume=True), or choose another --out"
            )

    def check_resume(self, config: Config) -> None:
        """Refuse a directory that holds anything but this experiment or nothing.

        A run may go on for more rounds than it was started for.
        """
        refuse_links_out(self.path)
        if self.holds_run():
            recorded, here = self.config(), with_block_of(self.config(), config)
            self._check_unedited(recorded)
            if here.get("rounds", 0) > recorded.get("rounds", 0):
                recorded = {**recorded, "rounds": here["rounds"]}
            difference = first_difference(deciding(recorded), deciding(here))
            if difference is not None:
                raise ExperimentError(
                    f"{self.path} holds another experiment ({difference}): choose another --out or "
                    f"remove it{self._how_to_change(recorded, here)}"
                )
        elif self.path.exists():
            self._check_empty()

    def _how_to_change(self, recorded: Config, config: Config) -> str:
        """The command that goes on with the first setting that differs; "" if it is fixed."""
        key, _, value = next(differences(deciding(recorded), deciding(config)))
        if is_below(key, (*FIXED, "rounds")):
            return ""
        command = self._resume_command(key, value)
        if self._summary.exists():
            more = f"{command} rounds={recorded.get('rounds', 0) + 1}"
            return f"; the run is finished: it takes the new value with more rounds, as in {more}"
        return f"; to go on with the new value type {command}"

    def _check_unedited(self, config: Config) -> None:
        """Refuse a config.yaml that is not what the run was computed with."""
        recorded = self.configurations()
        if not recorded:  # written by a version that kept none; `resume` refuses it
            return
        for key, old, new in differences(recorded[-1]["config"], _as_json(deciding(config))):
            raise ExperimentError(
                f"{self._config} was edited: {key} was {text_or_absent(old)} and is now "
                f"{text_or_absent(new)}. To go on as before type {self._resume_command(key, old)}; "
                f"with the new value from the next round on: {self._resume_command(key, new)}"
            )

    def _resume_command(self, key: str, value: object) -> str:
        setting = shlex.quote(f"{key}={json.dumps(value, default=str)}")
        return f"flray run --out {shlex.quote(str(self.path))} --resume {setting}"

    def change_settings(self, config: Config, keys: Collection[str]) -> None:
        """Let a run go on with other values of the given keys, and record the old and the new.

        The values hold from the round after the last checkpoint on. Does nothing if the
        configuration differs in other keys or in keys that a run keeps (FIXED), and nothing for a
        finished run: `check_resume` refuses these.

        Args:
            config: the resolved configuration with the new values.
            keys: dotted; a key includes those below it.
        """
        if not keys or not self.holds_run() or self.is_finished(config):
            return
        recorded = self.configurations()
        if not recorded:
            return
        lock.check_free(self.path)
        current, config = self.config(), with_block_of(self.config(), config)
        old, new = recorded[-1]["config"], _as_json(deciding(config))
        edited = differences(old, _as_json(deciding(current)))
        changed = {key for key, _, _ in (*differences(old, new), *edited)}
        may_change = all(is_below(key, keys) and not is_below(key, FIXED) for key in changed)
        if changed and may_change and new.get("rounds", 0) >= old.get("rounds", 0):
            self.store().check_newest()
            if self._summary.exists():  # of a run that another `stop` has ended
                self.reopen()
            self._record_configuration(config)

    def _record_configuration(self, config: Config) -> None:
        """Make this the configuration of all rounds after the last checkpoint."""
        environment = self.environment()
        new = _as_json(deciding(config))
        if new != environment[CONFIGURATIONS][-1]["config"]:
            entry = {"from_round": (self.store().newest_round() or 0) + 1, "config": new}
            environment[CONFIGURATIONS].append(entry)
            replace_text(self._environment, to_json(environment))
        replace_text(self._config, _to_yaml(config))

    def start(self, config: Config, environment: Mapping[str, Any], split_digest: str) -> None:
        """Make the directory of a new run.

        Args:
            config: the resolved configuration, `Experiment.plain`.
            environment: what the run is computed with (`records/environment.py`).
            split_digest: identifies the division of the data among clients.

        Raises:
            ExperimentError: if the folder holds a run or anything else.
        """
        self.check_start(config)
        self.path.mkdir(parents=True, exist_ok=True)
        first = {"from_round": 1, "config": deciding(config)}
        recorded = {**environment, SPLIT_SHA256: split_digest, CONFIGURATIONS: [first]}
        replace_text(self._environment, to_json(recorded))
        replace_text(self._config, _to_yaml(config))  # last: it is what makes this a run

    def resume(self, config: Config, environment: Mapping[str, Any], split_digest: str) -> None:
        """Go on with the run this directory holds, or start it; `truncate` comes next.

        The arguments are those of `start`. A finished run is opened again if the configuration has
        more rounds.
        """
        self.check_resume(config)
        if not self.holds_run():
            return self.start(config, environment, split_digest)
        digest = self.environment().get(SPLIT_SHA256)
        if digest != split_digest:
            raise ExperimentError(
                f"{self.path} holds another experiment (its split has the digest {digest}, the "
                f"split made now {split_digest}; has the dataset changed?): choose another --out "
                "or remove it"
            )
        for key, digest in environment.get(FILES, {}).items():
            if digest == self.environment().get(FILES, {}).get(key, digest) or digest is None:
                continue
            raise ExperimentError(
                f"{self.path} holds another experiment (the file of {key} has changed since): "
                "restore it, choose another --out or remove it"
            )
        if not self.configurations():
            raise ExperimentError(
                f"{self._environment} has no {CONFIGURATIONS!r}, which this version of flray "
                "compares checkpoints with: start the experiment again in another --out"
            )
        self.store().check_newest()
        is_longer = config.get("rounds", 0) > self.config().get("rounds", 0)
        if is_longer:
            self._record_configuration({**self.config(), "rounds": config["rounds"]})
        if self._summary.exists() and not self.is_finished(config):
            self.reopen()
        # A run that was finished elsewhere must not pass for one of the first machine only.
        recorded = self.environment()
        start = {key: value for key, value in environment.items() if key != CLIENT_NAMES}
        resumed = [*recorded.get("resumed", []), start]
        replace_text(self._environment, to_json({**recorded, "resumed": resumed}))

    def _check_empty(self) -> None:
        """Refuse a folder with files that no start of a run leaves."""
        if not self.path.is_dir():
            raise ExperimentError(f"{self.path} is a file: choose another --out or remove it")
        # environment.json alone is a start that was cut short.
        ours = {self._environment.name, lock.NAME, "server.log", COMMAND}
        names = {path.name for path in self.path.iterdir() if path.suffix != TEMPORARY}
        foreign = sorted(names - ours)
        if foreign:
            raise ExperimentError(
                f"{self.path} holds something that is not an experiment ({foreign[0]}): "
                "choose another --out or remove it"
            )


def _to_yaml(config: Config) -> str:
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _as_json(config: Config) -> Json:
    """What is read of a configuration that was written as JSON."""
    plain: Json = json.loads(to_json(config))
    return plain
