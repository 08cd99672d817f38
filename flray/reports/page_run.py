"""What pages show of runs and templates cannot compute themselves."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from flray.columns import ACCURACY, CLIENT, GROUP, MODEL, ROUND, ROUNDS, SECONDS, SEED
from flray.config.deciding import leaves
from flray.data.dataset import Ids
from flray.records.clusterings import ClusteringRecord, read_clustering
from flray.reports.comparison import clustering_sheet, comparison_sheet
from flray.reports.measures import experiments_sheet
from flray.reports.runs import Experiments, RunRecord, finished, without
from flray.reports.sheets import Sheet
from flray.reports.style import matched_colours

MAX_DRAWN = 3  # clusterings of a run; of more, the first, the middle and the last
MAX_DETAILED = 12  # runs that are shown one by one
MAX_LINES = 20  # experiments in one figure
# A phase that runs inside another one; its time is taken out of the other's.
_INSIDE = {"probe": "signature"}
_NOT_TELLING = (SEED, "execution", "tracking")  # where and how a run computes, not what


def drawn_clusterings(run: RunRecord) -> dict[int, ClusteringRecord]:
    """The last one first, by round; of many, the first, the middle and the last."""
    events = list(run.clusterings)
    number = min(MAX_DRAWN, len(events))
    chosen = [events[k] for k in np.linspace(0, len(events) - 1, number).astype(int)]
    return {t: read_clustering(run.clusterings[t]) for t in reversed(chosen)}


def clusters(found: ClusteringRecord, run: RunRecord) -> Iterator[tuple[int, pd.DataFrame]]:
    """The label of each cluster, and its members with their `accuracy` at the end, their planted
    `group` and its `colour`."""
    accuracy = run.last_test().set_index(CLIENT)[ACCURACY].reindex(found.clients)
    everyone = accuracy.rename_axis(CLIENT).reset_index()
    if found.groups is not None:
        _, of_group = matched_colours(found.labels, found.groups)
        colours = [to_hex(of_group[group]) for group in found.groups.tolist()]
        everyone = everyone.assign(group=found.groups, colour=colours)
    for label in np.unique(found.labels).tolist():
        yield label, everyone[found.members(label)].sort_values(CLIENT)


def at_the_end(run: RunRecord) -> ClusteringRecord | None:
    """Which client uses which model at the last evaluation; None for one model, or one each."""
    last = run.last_test()
    if not 1 < last[MODEL].nunique() < len(last):
        return None
    arrays = {
        name: last[name].to_numpy(np.int64) for name in (CLIENT, MODEL, GROUP) if name in last
    }
    unknown = np.zeros((len(last), len(last)))
    return ClusteringRecord(arrays[CLIENT], arrays[MODEL], unknown, groups=arrays.get(GROUP))


def ranges(clients: Ids) -> str:
    """
    >>> ranges(np.array([0, 1, 2, 7, 9, 10]))
    '0–2, 7, 9–10'
    """
    runs = np.split(clients, np.flatnonzero(np.diff(clients) != 1) + 1)
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs if len(r))


def environments(run: RunRecord) -> list[dict[str, object]]:
    """Versions, commit and hardware of every start: of those after the first, what differs."""
    starts = [run.environment, *run.environment.get("resumed", [])] if run.environment else []
    flat = [leaves({k: v for k, v in start.items() if k != "resumed"}) for start in starts]
    told = [{k.split(".", 1)[-1]: v for k, v in each.items() if v is not None} for each in flat]
    later = [{k: v for k, v in each.items() if told[0].get(k) != v} for each in told[1:]]
    return told[:1] + later


def by_kind(rounds: pd.DataFrame, total: str) -> pd.DataFrame:
    """The parts of bytes or seconds in each round, a column for each kind that occurs."""
    columns = [str(name) for name in rounds if str(name).startswith(f"{total}_")]
    named = {name: name.removeprefix(f"{total}_") for name in sorted(columns)}
    kinds = rounds[list(named)].fillna(0).rename(columns=named)
    kept: pd.DataFrame = kinds.loc[:, kinds.any()].set_axis(rounds[ROUND])
    return kept


def seconds_by_phase(rounds: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each round by phase; phases do not overlap, `other` is what none of them took."""
    phases = by_kind(rounds, SECONDS)
    for inner, outer in _INSIDE.items():
        if inner in phases and outer in phases:
            phases[outer] = (phases[outer] - phases[inner]).clip(lower=0)
    if SECONDS in rounds and len(phases.columns):
        total = rounds[SECONDS].fillna(0).to_numpy(np.float64)
        phases["other"] = np.maximum(total - phases.sum(axis=1), 0)
    return phases[phases.sum().sort_values(ascending=False, kind="stable").index]


def sheets(experiments: Experiments) -> list[Sheet]:
    """The tables of the finished runs."""
    done = finished(experiments)
    made = (comparison_sheet, clustering_sheet, experiments_sheet) if done else ()
    return [sheet for make in made if (sheet := make(done)) is not None]


def common(experiments: Experiments) -> dict[str, str]:
    """What was compared: data, split, model, seeds and dates."""
    every = [run for runs in experiments.values() for run in runs]
    shown = {
        key: "; ".join(dict.fromkeys(component_text(run.config.get(key)) for run in every))
        for key in ("dataset", "split", "model", ROUNDS)
    }
    seeds = {name: ", ".join(str(r.seed) for r in runs) for name, runs in experiments.items()}
    each = [f"{name}: {held}" for name, held in seeds.items()]
    shown["seeds"] = "; ".join(set(seeds.values()) if len(set(seeds.values())) == 1 else each)
    stamps = [(run.path / "config.yaml").stat().st_mtime for run in every]
    days = sorted({f"{datetime.fromtimestamp(stamp, UTC):%Y-%m-%d}" for stamp in stamps})
    return shown | {"started": " to ".join(dict.fromkeys((days[0], days[-1])))}


def component_text(value: object) -> str:
    """
    >>> component_text({"name": "iid", "clients": 5})
    'iid (clients 5)'
    """
    if not isinstance(value, Mapping):
        return str(value)
    rest = {k: v for k, v in leaves(value).items() if k != "name" and v is not None}
    told = ", ".join(f"{key} {held}" for key, held in rest.items())
    return f"{value.get('name', '')} ({told})" if told else str(value.get("name", ""))


def differing_settings(experiments: Experiments) -> pd.DataFrame:
    """A row for each setting that experiments do not share, a column for each experiment."""
    configs = {name: without(runs[0].config, _NOT_TELLING) for name, runs in experiments.items()}
    texts = {name: pd.Series(config, dtype=object).map(str) for name, config in configs.items()}
    frame = pd.DataFrame(texts).fillna("")
    return frame[frame.nunique(axis=1) > 1]
