"""What Ray Tune tries next: rows that are known before, then those that Optuna suggests."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from ray import tune
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch as TuneOptuna
from ray.tune.search.sample import Categorical

from flray.clustering.merges import MergePoint
from flray.errors import ExperimentError
from flray.sweep.folder import RowState
from flray.sweep.rows import SweepRow, ends_of, is_excluded, suggested_row
from flray.sweep.space import THRESHOLD, BetweenMerges, Grid, Space, Values

MOST_REFUSED = 1000  # suggestions in a row that `except` leaves out

Value = Callable[[RowState], float | None]  # the metric of a row


class RowSearch(Searcher):
    """Hands out rows that are known, then asks for suggestions, if there are any."""

    def __init__(self, known: Sequence[SweepRow], suggestions: "Suggestions | None" = None) -> None:
        super().__init__()
        self._known = deque(known)
        self._suggestions = suggestions

    def suggest(self, trial_id: str) -> Any:  # Any: Tune's own; a mapping or FINISHED
        """The rows of a trial as its configuration."""
        if self._known:
            return {"rows": [self._known.popleft()]}
        rows = self._suggestions.ask(trial_id) if self._suggestions else []
        return {"rows": rows} if rows else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        if self._suggestions is not None:
            self._suggestions.tell(trial_id, result or {}, error)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: what was suggested is in the sweep's folder."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on by its folder."""


class Suggestions:
    """Optuna's suggestions as rows, one for each seed of the space; the value is their mean."""

    def __init__(
        self, space: Space, first_number: int, before: Sequence[RowState], value: Value
    ) -> None:
        search, options = space.options.search, space.options
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._seeds = seeds_of(space)
        self._next = max([first_number, *(state.number + 1 for state in before)])
        self._chosen = {key: v for key, v in space.varied.items() if _is_chosen(key, v)}
        self._optuna = TuneOptuna(
            TuneOptuna.convert_search_space({k: _domain(v) for k, v in self._chosen.items()}),
            metric=options.metric,
            mode=options.mode,
            seed=search.seed + len(before),  # or a resumed sweep would begin with the same ones
        )
        self._asked: dict[str, str] = {}  # names that Optuna knows trials by
        samples: dict[int, list[RowState]] = {}
        for state in before:
            samples.setdefault((state.number - first_number) // len(self._seeds), []).append(state)
        self._left: int = search.samples - len(samples)
        for rows in samples.values():
            self._know(rows, [value(state) for state in rows])

    @property
    def are_left(self) -> bool:
        return self._left > 0

    def _know(self, rows: Sequence[RowState], values: Sequence[float | None]) -> None:
        """Tell Optuna of a sample of an earlier start of the sweep, if all its rows are done."""
        known = [value for value in values if value is not None]
        if len(known) < len(self._seeds):
            return
        sets = _sets(self._space, rows[0])
        chosen = {key: _encoded(v, sets[key]) for key, v in self._chosen.items()}
        self._optuna.add_evaluated_point(chosen, sum(known) / len(known))

    def ask(self, trial_id: str) -> list[SweepRow]:
        """The rows of the next suggestion; none once all samples were taken."""
        if not self.are_left:
            return []
        for attempt in range(MOST_REFUSED):
            name = f"{trial_id} {attempt}"
            rows = self._rows(self._decoded(self._optuna.suggest(name) or {}))
            if rows:
                break
            self._optuna.on_trial_complete(name, error=True)
        else:
            raise ExperimentError("`except` leaves out everything that Optuna suggests")
        self._asked[trial_id] = name
        self._left -= 1
        self._next += len(rows)
        return rows

    def _rows(self, chosen: Mapping[str, Any]) -> list[SweepRow]:
        """A row for each seed; none for a combination that is left out or cannot be."""
        each = [chosen if s is None else {**chosen, "seed": s} for s in self._seeds]
        if any(is_excluded(self._space, sets) for sets in each):
            return []
        try:
            return [suggested_row(self._space, self._next + k, sets) for k, sets in enumerate(each)]
        except ExperimentError:
            return []

    def tell(self, trial_id: str, result: Mapping[str, Any], error: bool) -> None:
        name = self._asked.pop(trial_id, None)
        if name is not None:
            self._optuna.on_trial_complete(name, dict(result), error)

    def _decoded(self, suggested: Mapping[str, Any]) -> dict[str, Any]:
        fixed = {key: v for key, v in self._space.varied.items() if key != "seed"}
        return {
            key: _decoded(values, suggested[key]) if key in suggested else ends_of(values)[0]
            for key, values in fixed.items()
        }


def again(space: Space, state: RowState) -> SweepRow:
    """The row of an earlier suggestion."""
    return suggested_row(space, state.number, _sets(space, state))


def seeds_of(space: Space) -> Sequence[Any]:  # Any: YAML
    """The seeds that each sample has; None: the experiment's own."""
    grid = space.varied.get("seed")
    return grid.values if isinstance(grid, Grid) else [None]


def _sets(space: Space, state: RowState) -> dict[str, Any]:
    """What a row sets for the keys of the space, as it was suggested."""
    sets, values = dict(state.overrides), space.varied.get(THRESHOLD)
    if state.merge_place is not None and isinstance(values, BetweenMerges):
        sets[THRESHOLD] = MergePoint(state.merge_place, values.number)
    return {key: sets[key] for key in space.varied}


def _is_chosen(key: str, values: Values) -> bool:
    """True if Optuna decides it: seeds repeat, and a single value is no choice."""
    return key != "seed" and not (isinstance(values, Grid) and len(values.values) == 1)


def _domain(values: Values) -> Any:  # Any: Tune leaves its domains untyped
    """What Optuna draws from: a range, or places in a list; thresholds have an order."""
    if isinstance(values, BetweenMerges):
        return tune.randint(0, values.number)
    return tune.choice(list(range(len(ends_of(values))))) if _is_listed(values) else values


def _is_listed(values: Values) -> bool:
    return isinstance(values, Grid | BetweenMerges | Categorical)


def _decoded(values: Values, suggested: Any) -> Any:
    return ends_of(values)[suggested] if _is_listed(values) else suggested


def _encoded(values: Values, value: Any) -> Any:
    return list(ends_of(values)).index(value) if _is_listed(values) else value
