"""Contents of pages of runs that templates cannot compute.

Templates reach these functions as `of_run.<name>`.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from flray.columns import CLIENT, GROUP, MODEL, NAME, ROUND, ROUNDS, SECONDS, SEED
from flray.config.deciding import leaves
from flray.data.dataset import Ids
from flray.records.clusterings import ClusteringRecord, read_clustering
from flray.records.recorded import CLIENT_NAMES, CONFIGURATIONS
from flray.reports.comparison import clustering_sheet, comparison_sheet
from flray.reports.measures import experiments_sheet
from flray.reports.runs import Experiments, RunRecord, finished
from flray.reports.settings import without
from flray.reports.sheets import Sheet
from flray.reports.style import matched_colours

MAX_DRAWN = 3  # most clusterings of a run; of more, the first, the middle and the last
MAX_DETAILED = 12  # most runs shown one by one
MAX_LINES = 20  # most experiments in one figure
# Phases inside another one, whose time includes theirs.
_INSIDE = {"probe": "signature"}
_NOT_COMPARED = (SEED, "execution", "tracking")  # keys that do not make an experiment another one


def drawn_clusterings(run: RunRecord) -> dict[int, ClusteringRecord]:
    """The clusterings to draw by round, the last one first; at most MAX_DRAWN.

    Of more, they are spread evenly over the run, with its first and its last clustering.
    """
    events = list(run.clusterings)
    number = min(MAX_DRAWN, len(events))
    chosen = [events[k] for k in np.linspace(0, len(events) - 1, number).astype(int)]
    return {t: read_clustering(run.clusterings[t]) for t in reversed(chosen)}


def clusters(clustering: ClusteringRecord, run: RunRecord) -> Iterator[tuple[int, pd.DataFrame]]:
    """The label of each cluster, and its members: client, name, score, planted group, colour."""
    scores = run.last_test().set_index(CLIENT)[run.score.name].reindex(clustering.clients)
    clients = scores.rename("score").rename_axis(CLIENT).reset_index()
    clients[NAME] = [run.client_names[i] if run.client_names else i for i in clients[CLIENT]]
    if clustering.groups is not None:
        _, of_group = matched_colours(clustering.labels, clustering.groups)
        colours = [to_hex(of_group[group]) for group in clustering.groups.tolist()]
        clients = clients.assign(group=clustering.groups, colour=colours)
    for label in np.unique(clustering.labels).tolist():
        yield label, clients[clustering.members(label)].sort_values(CLIENT)


def at_the_end(run: RunRecord) -> ClusteringRecord | None:
    """The models that clients used at the last evaluation as a clustering.

    None if all clients share one model, or each has its own.
    """
    last = run.last_test()
    if not 1 < last[MODEL].nunique() < len(last):
        return None
    arrays = {
        name: last[name].to_numpy(np.int64) for name in (CLIENT, MODEL, GROUP) if name in last
    }
    return ClusteringRecord(arrays[CLIENT], arrays[MODEL], groups=arrays.get(GROUP))


def ranges(clients: Ids) -> str:
    """Ascending client ids as text, consecutive ones as a range.

    >>> ranges(np.array([0, 1, 2, 7, 9, 10]))
    '0–2, 7, 9–10'
    """
    runs = np.split(clients, np.flatnonzero(np.diff(clients) != 1) + 1)
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs if len(r))


def environments(run: RunRecord) -> list[dict[str, object]]:
    """Versions, commit and hardware of the first start; for later starts, what differs from it.

    Keys are the last parts of those in environment.json. A run that was never resumed has one
    entry, a run without environment.json none.
    """
    starts = [run.environment, *run.environment.get("resumed", [])] if run.environment else []
    hidden = ("resumed", CLIENT_NAMES, CONFIGURATIONS)  # the settings have a section of their own
    flat = [leaves({k: v for k, v in start.items() if k not in hidden}) for start in starts]
    named = [{k.split(".", 1)[-1]: v for k, v in start.items() if v is not None} for start in flat]
    later = [{k: v for k, v in start.items() if named[0].get(k) != v} for start in named[1:]]
    return named[:1] + later


def by_kind(rounds: pd.DataFrame, total: str) -> pd.DataFrame:
    """The parts of bytes or seconds in each round, a column for each kind that occurs.

    Args:
        rounds: The table of rounds.parquet.
        total: The column of the total, such as `bytes_up`; columns `bytes_up_<kind>` are its parts.

    >>> rounds = pd.DataFrame({"round": [1, 2], "bytes_up": [5, 7], "bytes_up_model": [5.0, 7.0]})
    >>> by_kind(rounds.assign(bytes_up_signature=0.0), "bytes_up").to_dict()
    {'model': {1: 5.0, 2: 7.0}}
    """
    columns = [str(name) for name in rounds if str(name).startswith(f"{total}_")]
    names = {name: name.removeprefix(f"{total}_") for name in sorted(columns)}
    kinds = rounds[list(names)].fillna(0).rename(columns=names)
    return kinds.loc[:, kinds.any()].set_axis(rounds[ROUND])


def seconds_by_phase(rounds: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each round by phase; phases do not overlap, `other` is the rest of the round.

    The phase that takes longest in the whole run comes first. Where one phase contains another (the
    signature its probe), the inner one is subtracted, so that phases add up to the round.
    """
    phases = by_kind(rounds, SECONDS)
    for inner, outer in _INSIDE.items():
        if inner in phases and outer in phases:
            phases[outer] = (phases[outer] - phases[inner]).clip(lower=0)
    if SECONDS in rounds and len(phases.columns):
        total = rounds[SECONDS].fillna(0).to_numpy(np.float64)
        phases["other"] = np.maximum(total - phases.sum(axis=1), 0)
    return phases[phases.sum().sort_values(ascending=False, kind="stable").index]


def sheets(experiments: Experiments) -> list[Sheet]:
    """The tables of the finished runs: the comparison, and those of clusterings if any."""
    done = finished(experiments)
    tables = (comparison_sheet, clustering_sheet, experiments_sheet) if done else ()
    return [sheet for make in tables if (sheet := make(done)) is not None]


def common(experiments: Experiments) -> dict[str, str]:
    """The data, split, model, rounds, seeds and dates of compared experiments.

    Values are texts. What all experiments share is named once, different values are separated by
    `;`. `started` has the first and the last day (UTC) on which one of the runs began.
    """
    all_runs = [run for runs in experiments.values() for run in runs]
    shown = {
        key: "; ".join(dict.fromkeys(component_text(run.config.get(key)) for run in all_runs))
        for key in ("dataset", "split", "model", ROUNDS)
    }
    seeds = {name: ", ".join(str(r.seed) for r in runs) for name, runs in experiments.items()}
    by_name = [f"{name}: {numbers}" for name, numbers in seeds.items()]
    shown["seeds"] = "; ".join(set(seeds.values()) if len(set(seeds.values())) == 1 else by_name)
    stamps = [(run.path / "config.yaml").stat().st_mtime for run in all_runs]
    days = sorted({f"{datetime.fromtimestamp(stamp, UTC):%Y-%m-%d}" for stamp in stamps})
    return shown | {"started": " to ".join(dict.fromkeys((days[0], days[-1])))}


def component_text(value: object) -> str:
    """A component with its settings.

    >>> component_text({"name": "iid", "clients": 5})
    'iid (clients 5)'
    """
    if not isinstance(value, Mapping):
        return str(value)
    rest = {k: v for k, v in leaves(value).items() if k != "name" and v is not None}
    settings = ", ".join(f"{key} {setting}" for key, setting in rest.items())
    return f"{value.get('name', '')} ({settings})" if settings else str(value.get("name", ""))


def differing_settings(experiments: Experiments) -> pd.DataFrame:
    """A row for each setting that differs between experiments, a column for each experiment.

    Values are texts, "" for a setting that an experiment does not have. Seeds, execution and
    tracking are not compared.
    """
    configs = {name: without(runs[0].config, _NOT_COMPARED) for name, runs in experiments.items()}
    texts = {name: pd.Series(config, dtype=object).map(str) for name, config in configs.items()}
    frame = pd.DataFrame(texts).fillna("")
    return frame[frame.nunique(axis=1) > 1]
