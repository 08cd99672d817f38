"""Clusterings on the page: figures of each, and who is where."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from flray.data.dataset import Ids
from flray.records.clusterings import Clustering, read_clustering
from flray.report.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.report.colours import Colour, matched_colours
from flray.report.figures import Run
from flray.report.page_elements import Cell, Html, Number, element, fold, joined, note, table
from flray.report.page_embed import embed
from flray.report.page_numbers import fixed, known, percent
from flray.scores import partition_scores

MAX_DRAWN = 3  # clusterings of a run; of more, the first, the middle and the last
MAX_CHIPS = 200  # more clients than this are ranges


def clusterings(run: Run, name: str) -> Html:
    """The last clustering of a run, earlier ones folded, and a table where there are several.

    Args:
        name: of the figures, unique on the page.
    """
    events = list(run.clusterings)
    drawn = _drawn(events)
    parts = []
    for t in reversed(drawn):
        found = read_clustering(run.clusterings[t])
        content = _shown(found, run, f"{name}-{t}")
        is_last = t == events[-1]
        headline = _headline(found, t)
        parts.append(
            joined([element("p", headline), content]) if is_last else fold(headline, content)
        )
    if len(drawn) < len(events):
        shown = ", ".join(map(str, drawn))
        parts.append(note(f"Drawn are {len(drawn)} of {len(events)}: after rounds {shown}."))
    if len(events) > 1:
        parts.append(_events_table({t: read_clustering(run.clusterings[t]) for t in events}))
    return joined(parts)


def who_is_where(found: Clustering, run: Run) -> Html:
    """Clusters with their members, their planted groups and how well they do at the end."""
    last = run.last_test().set_index("client")["accuracy"]
    _, of_group = matched_colours(found.labels, found.groups)
    head = ["cluster", "size", "members", "planted groups", "mean test accuracy"]
    rows: list[list[Cell]] = []
    for label in np.unique(found.labels).tolist():
        mine = found.labels == label
        members = found.clients[mine]
        groups = None if found.groups is None else found.groups[mine]
        accuracy = last.reindex(members)
        rows.append(
            [
                str(label),
                Number(str(len(members)), len(members)),
                _members(members, groups, accuracy, of_group),
                "none" if groups is None else _mix(groups, of_group),
                Number(percent(accuracy.mean()), known(float(accuracy.mean()))),
            ]
        )
    if found.groups is None:
        head.pop(3)
        rows = [row[:3] + row[4:] for row in rows]
    return table(head, rows, "who is where; accuracy at the last evaluation", is_sortable=True)


def at_the_end(run: Run) -> Html | None:
    """Who uses which model at the last evaluation; None where it tells nothing."""
    last = run.last_test()
    num_models = last["model"].nunique() if len(last) else 0
    if not 1 < num_models < len(last):
        return None
    clients = last["client"].to_numpy(np.int64)
    groups = last["group"].to_numpy(np.int64) if "group" in last else None
    distances = np.zeros((len(clients), len(clients)))
    found = Clustering(clients, last["model"].to_numpy(np.int64), distances, groups=groups)
    return who_is_where(found, run)


def ranges(clients: Ids) -> str:
    """
    >>> ranges(np.array([0, 1, 2, 7, 9, 10]))
    '0–2, 7, 9–10'
    """
    runs = np.split(clients, np.flatnonzero(np.diff(clients) != 1) + 1)
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs if len(r))


def _drawn(events: Sequence[int]) -> list[int]:
    """
    >>> _drawn([1, 2, 3, 4, 5])
    [1, 3, 5]
    """
    if len(events) <= MAX_DRAWN:
        return list(events)
    places = np.linspace(0, len(events) - 1, MAX_DRAWN).astype(int)
    return [events[k] for k in places]


def _headline(found: Clustering, t: int) -> str:
    when = "before the first round" if t == 0 else f"after round {t}"
    text = f"Clustering {when}: {found.num_clients} clients in {found.num_clusters} clusters"
    if found.groups is None:
        return text
    return f"{text}, ARI {partition_scores(found.labels, found.groups)['ari']:.2f}"


def _events_table(found: Mapping[int, Clustering]) -> Html:
    names = ("ari", "nmi", "purity")
    rows = []
    for t, each in found.items():
        scores = {} if each.groups is None else partition_scores(each.labels, each.groups)
        sizes = np.sort(np.unique(each.labels, return_counts=True)[1])[::-1]
        row: list[Cell] = [f"after round {t}" if t else "before the first round"]
        row += [Number(str(n), n) for n in (each.num_clients, each.num_clusters, int(sizes[0]))]
        row += [Number(fixed(scores.get(name)), scores.get(name)) for name in names]
        rows.append(row)
    head = ["when", "clients", "clusters", "largest", "ARI", "NMI", "purity"]
    return table(head, rows, "all clusterings", is_sortable=True)


def _shown(found: Clustering, run: Run, name: str) -> Html:
    """Its figures, and beside the graph who is where."""
    distance = embed(
        distance_figure(found, threshold=run.threshold),
        f"{name}-distance",
        "Distances between clients: raw, reordered by the dendrogram, and by cluster",
    )
    embedding = embed(
        embedding_figure(found),
        f"{name}-embedding",
        "Clients in the plane, coloured by cluster and by planted group",
    )
    graph = embed(
        graph_figure(found), f"{name}-graph", "Who is related to whom, as matrix and as graph"
    )
    beside = element("div", embedding, who_is_where(found, run))
    return joined([distance, element("div", beside, graph, class_="figures")])


def _members(
    members: Ids, groups: Ids | None, accuracy: "pd.Series[float]", of_group: Mapping[int, Colour]
) -> str:
    """A chip a client in the colour of its planted group, or ranges where they are many."""
    if len(members) > MAX_CHIPS:
        return ranges(np.sort(members))
    chips = []
    for k in np.argsort(members):
        says = f"client {members[k]}, test accuracy {percent(accuracy.iloc[k])}"
        style = None
        if groups is not None:
            says += f", planted group {groups[k]}"
            style = f"--of:{to_hex(of_group[int(groups[k])])}"
        chips.append(element("span", str(members[k]), class_="chip", title=says, style=style))
    return element("div", *chips, class_="chips")


def _mix(groups: Ids, of_group: Mapping[int, Colour]) -> Html:
    """How many of each group, the largest first."""
    names, sizes = np.unique(groups, return_counts=True)
    chips = [
        element(
            "span",
            f"group {names[k]}: {sizes[k]}",
            class_="chip",
            style=f"--of:{to_hex(of_group[int(names[k])])}",
        )
        for k in np.argsort(-sizes, kind="stable")
    ]
    return element("div", *chips, class_="chips")
