"""What Ray Tune tries next: rows that are known before, then those that Optuna suggests.

The best configuration depends on the order in which trials end, as always with Optuna; rows of a
sweep that is resumed are told to a new study.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch as TuneOptuna
from ray.tune.search.sample import Categorical

from flray.errors import ExperimentError
from flray.sweeps.forms import BetweenMerges, Grid, Values
from flray.sweeps.rows import SweepRow, ends_of, is_excluded, is_suggested, suggested_row
from flray.sweeps.space import Space

MOST_REFUSED = 1000  # suggestions in a row that `except` leaves out


class RowSearch(Searcher):
    """The search algorithm that Tune asks: known rows first, then suggestions, if Optuna is used.

    A trial has one known row, or the rows of all seeds of one suggestion.

    Args:
        pending: The rows that are known, in the order in which they are to run.
        suggestions: Optuna's; None: another search.
        is_over: True once no further trial is to begin.
    """

    def __init__(
        self,
        pending: Sequence[SweepRow],
        suggestions: "Suggestions | None",
        is_over: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.pending = deque(pending)
        self._suggestions, self._is_over = suggestions, is_over

    def suggest(self, trial_id: str) -> Any:  # Any: Tune's own; a mapping or FINISHED
        """The rows of the next trial as its configuration; FINISHED once there are no more.

        Tune calls it in the driver's process, one call at a time.
        """
        if self._is_over():
            return Searcher.FINISHED
        if self.pending:
            return {"rows": [self.pending.popleft()]}
        rows = self._suggestions.ask(trial_id) if self._suggestions else []
        return {"rows": rows} if rows else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Pass the result of a trial on to Optuna, if it is used."""
        if self._suggestions is not None:
            self._suggestions.tell(trial_id, result or {}, error)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a sweep is resumed from its folder."""


class Suggestions:
    """Optuna's suggestions as rows.

    A suggestion is a row for each seed of the space, and its value is the mean of their metric.
    Suggestion k has the row numbers from `first` + k times the number of seeds. Combinations that
    `except` leaves out or that are not valid are refused, and Optuna is asked again.
    """

    def __init__(
        self, space: Space, rounds: Collection[int], first: int, before: Iterable[SweepRow]
    ) -> None:
        """Continue after earlier starts of the sweep.

        Args:
            rounds: after which rows may cluster.
            first: the number of the first row that is suggested.
            before: rows suggested earlier; a kill may have left only some of a suggestion.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, self._rounds, self._first = space, rounds, first
        self._seeds = seeds_of(space)
        chosen = {(row.number - first) // len(self._seeds): row.chosen for row in before}
        self._suggested = {number: self._rows(number, keys) for number, keys in chosen.items()}
        self._free = {key: v for key, v in space.varied.items() if is_suggested(space, key)}
        self._distributions = {key: _distribution(v) for key, v in self._free.items()}
        # Another seed after each start, or it would suggest the same values again.
        seed = space.options.search.seed + len(self._suggested)
        self._study = optuna.create_study(
            direction="maximize" if space.options.mode == "max" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed),
        )
        self._trials: dict[str, optuna.Trial] = {}  # running trials, by Tune's id

    @property
    def rows(self) -> list[SweepRow]:
        """The rows of all suggestions so far, as if none had run, in the order of suggestions."""
        return [row for rows in self._suggested.values() for row in rows]

    @property
    def num_left(self) -> int:
        """Rows that are still to be suggested, all seeds counted."""
        samples: int = self._space.options.search.samples
        return (samples - len(self._suggested)) * len(self._seeds)

    def learn(self, values: Mapping[int, float]) -> None:
        """Tell Optuna of the suggestions so far whose rows all have a value.

        Called once, before the first trial: after a resume the new study knows what earlier starts
        measured.

        Args:
            values: The metric of rows that are done, by row number.
        """
        for rows in self._suggested.values():
            measured = [values[row.number] for row in rows if row.number in values]
            if len(measured) == len(self._seeds):
                chosen = rows[0].chosen
                params = {key: _encoded(v, chosen[key]) for key, v in self._free.items()}
                mean = sum(measured) / len(measured)
                trial = create_trial(params=params, distributions=self._distributions, value=mean)
                self._study.add_trial(trial)

    def ask(self, trial_id: str) -> list[SweepRow]:
        """The rows of the next suggestion; none once all samples were taken.

        Args:
            trial_id: Tune's id of the trial, by which `tell` reports its result.

        Raises:
            ExperimentError: `MOST_REFUSED` suggestions in a row were left out or not valid.
        """
        if not self.num_left:
            return []
        number = next(k for k in count() if k not in self._suggested)
        for _ in range(MOST_REFUSED):
            self._trials[trial_id] = self._study.ask(self._distributions)
            params = self._trials[trial_id].params
            chosen = {
                key: _decoded(values, params[key]) if key in params else ends_of(values)[0]
                for key, values in self._space.varied.items()
                if key != "seed"
            }
            if rows := self._rows(number, chosen):
                self._suggested[number] = rows
                return rows
            self.tell(trial_id, {}, error=True)
        raise ExperimentError("`except` leaves out everything that Optuna suggests")

    def tell(self, trial_id: str, result: Mapping[str, Any], error: bool) -> None:
        """Tell Optuna what came of a trial, if it has suggested it.

        A trial without a value counts as a bad one; a trial with an error is ignored.
        """
        trial = self._trials.pop(trial_id, None)
        if trial is None:
            return
        value = result.get(self._space.options.metric)
        no_value = TrialState.FAIL if error else TrialState.PRUNED
        self._study.tell(trial, value, TrialState.COMPLETE if value is not None else no_value)

    def _rows(self, number: int, chosen: Mapping[str, Any]) -> list[SweepRow]:
        """A row for each seed; none for a combination that is left out or not valid."""
        first = self._first + number * len(self._seeds)
        settings = [chosen if s is None else {**chosen, "seed": s} for s in self._seeds]
        if any(is_excluded(self._space, keys) for keys in settings):
            return []
        try:
            return [
                suggested_row(self._space, first + k, keys, self._rounds)
                for k, keys in enumerate(settings)
            ]
        except ExperimentError:
            return []


def seeds_of(space: Space) -> Sequence[Any]:  # Any: YAML
    """The seeds that each sample has; [None]: the experiment's own."""
    grid = space.varied.get("seed")
    return grid.values if isinstance(grid, Grid) else [None]


def _distribution(values: Values) -> optuna.distributions.BaseDistribution:
    """What Optuna draws from: a range, or positions in a list; thresholds are ordered."""
    if isinstance(values, BetweenMerges):
        return IntDistribution(0, values.number - 1)
    if _is_listed(values):
        return CategoricalDistribution(list(range(len(ends_of(values)))))
    distribution: optuna.distributions.BaseDistribution
    (distribution,) = TuneOptuna.convert_search_space({"key": values}).values()
    return distribution


def _is_listed(values: Values) -> bool:
    return isinstance(values, Grid | BetweenMerges | Categorical)


def _decoded(values: Values, suggested: Any) -> Any:
    return ends_of(values)[suggested] if _is_listed(values) else suggested


def _encoded(values: Values, value: Any) -> Any:
    return list(ends_of(values)).index(value) if _is_listed(values) else value
