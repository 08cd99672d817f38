"""Runs on the page: one by itself, or several side by side and then each."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.colors import to_hex

from flray.data.dataset import Ids
from flray.records.clusterings import Clustering, read_clustering
from flray.records.run_directory import leaves
from flray.report import figures as draw
from flray.report import page_blocks as page
from flray.report.clustering_figures import distance_figure, embedding_figure, graph_figure
from flray.report.colours import Colour, matched_colours
from flray.report.comparison import clustering_sheet, comparison_sheet
from flray.report.configuration import look_up
from flray.report.measure_figures import error_figure
from flray.report.measures import errors_by_round, experiments_sheet, run_sheet
from flray.report.page_blocks import Block, Cell, fixed, note, number_cell, percent, setting_text
from flray.report.runs import Experiments, Plain, RunRecord, without
from flray.report.sheets import GROUND_TRUTH, GROUND_TRUTH_NOTE, MISSING
from flray.scores import partition_scores

MAX_DRAWN = 3  # clusterings of a run; of more, the first, the middle and the last
MAX_CHIPS = 200  # more clients than this are ranges
MAX_DETAILED = 12  # runs that are shown one by one
MAX_LINES = 20  # experiments in one figure
SHORT_HASH = 12


def run_sections(run: RunRecord, name: str) -> list[Block]:
    """Everything there is to see of a run.

    Args:
        name: unique on the page; anchors and figures begin with it.
    """
    parts = [("Headline numbers", "numbers", [*_state(run), page.cards(headline(run))])]
    alone = {run.name: [run]}
    figures = []
    if len(run.evaluated()):
        alt = "Mean test accuracy over clients by round, with the rounds of clusterings"
        figures.append([page.figure(draw.accuracy_figure(alone), f"{name}-accuracy", alt)])
    if len(run.last_test()):
        alt = "Test accuracy of every client, sorted and by cluster: how fair it is"
        figures.append([page.figure(draw.clients_figure(alone), f"{name}-clients", alt)])
    if figures:
        parts.append(("Accuracy by round and by client", "accuracy", [page.side_by_side(figures)]))
    if run.clusterings:
        parts.append(("Clusterings", "clusterings", list(_clusterings(run, name))))
    elif (where := _at_the_end(run)) is not None:
        parts.append(("Who is where", "where", [where]))
    if len(run.rounds):
        parts.append(("Communication and time", "costs", [_costs(run, name)]))
    parts.append(("Settings", "settings", _settings(run.config)))
    parts.append(("How to run it again", "again", _rerun(run)))
    parts.append(("Environment", "environment", list(_environment(run))))
    return [page.section(heading, f"{name}-{anchor}", blocks) for heading, anchor, blocks in parts]


def headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """Name, number and remark of what matters most in a run."""
    n = run.numbers
    mark = f" {GROUND_TRUTH}" if run.uses_ground_truth else ""
    accuracy, error = (fixed(n.get(f"accuracy_{x}"), scale=100) for x in ("mean", "se_clients"))
    groups = run.last_test().get("group", pd.Series(dtype=float)).nunique()
    planned = "" if run.summary is not None else f" of {run.config.get('rounds', '?')}"
    tuned, target = (
        "after training on the client's own data",
        look_up(run.config, "evaluate.target"),
    )
    after = fixed(n.get("round_after_clustering"), 0)
    told = f"of {groups} planted groups" if groups else "distinct models in use"
    told = f"overlapping, {told}" if n.get("clusters_overlap") else told
    accuracies = {  # key of the summary: name, remark
        "global_accuracy_mean": ("global test accuracy", "on the whole test set"),
        "tuned_accuracy_mean": ("fine-tuned test accuracy", tuned),
        "tuned_global_accuracy_mean": ("fine-tuned global test accuracy", tuned),
        "validation_accuracy_mean": ("validation accuracy", ""),
        "accuracy_worst": ("worst client", ""),
        "holdout_accuracy_mean": ("newcomers", "clients that never trained"),
        "clients_reaching_target": ("clients at target", f"target {percent(target, 1)}"),
        "accuracy_mean_after_clustering": ("after the clustering", f"accuracy in round {after}"),
    }
    shown = [
        ("test accuracy", f"{accuracy} ± {error} %{mark}", "mean ± standard error over clients"),
        *((name, percent(n.get(key)), remark) for key, (name, remark) in accuracies.items()),
        ("variance over clients", fixed(n.get("accuracy_variance"), 2, 1e4, " %²"), ""),
        ("clusters", fixed(n.get("clusters"), 0), told),
        ("ARI", fixed(n.get("ari")), "partition against planted groups"),
        ("rounds", fixed(n.get("rounds"), 0) + planned, ""),
        ("client steps", fixed(n.get("client_steps"), 0), "batches of SGD"),
        ("sent up", fixed(n.get("bytes_up"), 1, 1e-6, " MB"), ""),
        ("sent down", fixed(n.get("bytes_down"), 1, 1e-6, " MB"), ""),
        ("clients dropped", fixed(n.get("clients_dropped") or None, 0), ""),
        ("time", page.duration(n.get("seconds")), ""),
        ("params_sha256", str(n.get("params_sha256", MISSING))[:SHORT_HASH], "of all models"),
    ]
    return [card for card in shown if not card[1].startswith(MISSING)]


def experiments_sections(experiments: Experiments, name: str) -> list[Block]:
    """Several runs: one paired table, joint figures, then each run folded."""
    parts = [("Side by side", "overview", list(_overview(experiments)))]
    joint = _joint_figures(dict(list(experiments.items())[:MAX_LINES]), name)
    if joint:
        parts.append(("Accuracy by round and by client", "accuracy", [page.side_by_side(joint)]))
    flat = {each: without(runs[0].config, _NOT_TELLING) for each, runs in experiments.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    rows = [[k, *(setting_text(s[k]) if k in s else "" for s in flat.values())] for k in keys]
    if differing := [row for row in rows if len(set(row[1:])) > 1]:
        shown = page.table(["setting", *flat], differing)
        parts.append(("Settings that differ", "settings", [shown]))
    parts.append(("Each run", "each", list(_each(experiments, name))))
    return [page.section(heading, f"{name}-{anchor}", blocks) for heading, anchor, blocks in parts]


_NOT_TELLING = ("seed", "execution", "tracking")  # where and how a run computes, not what


def _state(run: RunRecord) -> Iterator[Block]:
    """What a reader must know before the numbers."""
    if run.summary is None:
        done, planned = run.numbers["rounds"], run.config.get("rounds", "?")
        yield page.text(
            f"This run is not finished: {done} of {planned} rounds are recorded, and what follows "
            "is how it stood then.",
            "warn",
        )
    if run.uses_ground_truth:
        told = GROUND_TRUTH_NOTE.removeprefix(f"{GROUND_TRUTH} ")
        yield page.text(f"{GROUND_TRUTH} This run {told}", "warn")


def _overview(experiments: Experiments) -> Iterator[Block]:
    yield page.pairs({"": _common(experiments)})
    finished = {
        name: kept
        for name, runs in experiments.items()
        if (kept := [run for run in runs if run.summary is not None])
    }
    if finished:
        yield from page.sheet_blocks(comparison_sheet(finished))
        clustered = clustering_sheet(finished)
        yield from page.sheet_blocks(clustered) if clustered is not None else []
        measured = experiments_sheet(finished)
        yield from page.sheet_blocks(measured) if measured is not None else []
    unfinished = [r for runs in experiments.values() for r in runs if r.summary is None]
    if unfinished:
        rows: list[list[Cell | str]] = [
            [
                run.label,
                number_cell(f"{(n := run.numbers['rounds'])} of {run.config.get('rounds')}", n),
                number_cell(
                    percent(run.numbers.get("accuracy_mean"))
                    + f" {GROUND_TRUTH}" * run.uses_ground_truth,
                    run.numbers.get("accuracy_mean"),
                ),
            ]
            for run in unfinished
        ]
        yield page.table(["not finished", "rounds", "test accuracy so far"], rows)


def _common(experiments: Experiments) -> dict[str, str]:
    """What was compared: data, split, model, seeds and dates."""
    every = [run for runs in experiments.values() for run in runs]
    shown = {}
    for key in ("dataset", "split", "model", "rounds"):
        values = [_component_text(run.config.get(key)) for run in every]
        shown[key] = "; ".join(dict.fromkeys(values))
    seeds = {name: ", ".join(str(r.seed) for r in runs) for name, runs in experiments.items()}
    same = len(set(seeds.values())) == 1
    each = [f"{name}: {held}" for name, held in seeds.items()]
    shown["seeds"] = next(iter(seeds.values())) if same else "; ".join(each)
    stamps = [(run.path / "config.yaml").stat().st_mtime for run in every]
    days = sorted({f"{datetime.fromtimestamp(stamp, UTC):%Y-%m-%d}" for stamp in stamps})
    shown["started"] = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return shown


def _component_text(value: Any) -> str:  # Any: YAML
    """
    >>> _component_text({"name": "iid", "clients": 5})
    'iid (clients 5)'
    """
    if not isinstance(value, Mapping):
        return setting_text(value)
    rest = {k: v for k, v in leaves(value).items() if k != "name" and v is not None}
    told = ", ".join(f"{key} {setting_text(held)}" for key, held in rest.items())
    return f"{value.get('name', '')} ({told})" if told else str(value.get("name", ""))


def _joint_figures(experiments: Experiments, name: str) -> list[list[Block]]:
    every, names = [r for runs in experiments.values() for r in runs], ", ".join(experiments)
    has_seeds = any(len(runs) > 1 for runs in experiments.values())
    over = "Means over seeds." if has_seeds else ""
    figures = []
    if any(len(run.evaluated()) for run in every):
        alt = f"Mean test accuracy by round of {names}"
        figures.append(
            [page.figure(draw.accuracy_figure(experiments), f"{name}-joint-accuracy", alt, over)]
        )
    if any(len(run.last_test()) for run in every):
        alt = f"Test accuracy of every client of {names}"
        pooled = "Clients of all seeds together." if has_seeds else ""
        figures.append(
            [page.figure(draw.clients_figure(experiments), f"{name}-joint-clients", alt, pooled)]
        )
    if any(len(run.evaluated()) and len(run.rounds.filter(regex="^bytes_")) for run in every):
        alt = f"Test accuracy against bytes sent of {names}"
        drawn = draw.efficiency_figure(experiments)
        figures.append([page.figure(drawn, f"{name}-joint-efficiency", alt, over)])
    return figures


def _each(experiments: Experiments, name: str) -> Iterator[Block]:
    """Runs one by one, folded; where they are many, the first seed of the first experiments."""
    every = [run for runs in experiments.values() for run in runs]
    chosen = every
    if len(every) > MAX_DETAILED:
        chosen = [runs[0] for runs in experiments.values()][:MAX_DETAILED]
    for number, run in enumerate(chosen):
        mark = f" {GROUND_TRUTH}" * run.uses_ground_truth
        summary = f"{run.label}: {run.title}, {percent(run.numbers.get('accuracy_mean'))}{mark}"
        summary += "" if run.summary is not None else " (not finished)"
        anchor = f"{name}-run{number}"
        yield page.fold(summary, run_sections(run, anchor), anchor)
    if len(chosen) < len(every):
        yield note(
            f"Shown are {len(chosen)} of {len(every)} runs, the first seed of each experiment; "
            "flray report with the folder of a run shows that run."
        )


def _clusterings(run: RunRecord, name: str) -> Iterator[Block]:
    """The last clustering of a run, earlier ones folded, and a table where there are several."""
    events = list(run.clusterings)
    drawn = events
    if len(events) > MAX_DRAWN:
        drawn = [events[k] for k in np.linspace(0, len(events) - 1, MAX_DRAWN).astype(int)]
    for t in reversed(drawn):
        found = read_clustering(run.clusterings[t])
        told = f"Clustering {draw.when(t)}: {found.num_clients} clients in {found.counted}"
        if found.groups is not None:
            told += f", ARI {partition_scores(found.labels, found.groups)['ari']:.2f}"
        blocks = _one_clustering(found, run, f"{name}-clustering-{t}")
        yield from [page.text(told), *blocks] if t == events[-1] else [page.fold(told, blocks)]
    if len(drawn) < len(events):
        shown = ", ".join(map(str, drawn))
        yield note(f"Drawn are {len(drawn)} of {len(events)}: after rounds {shown}.")
    sheet = run_sheet(run, drawn)
    yield from page.sheet_blocks(sheet) if sheet is not None else []
    errors = errors_by_round(run)
    if len(errors) > 1:
        alt = "Clustering error by round: false positives and false negatives by both truths"
        yield page.figure(error_figure(errors), f"{name}-errors", alt)
    if len(events) > 1:
        rows = [_event_row(t, read_clustering(run.clusterings[t])) for t in events]
        head = ["when", "clients", "clusters", "largest", "ARI", "NMI", "purity"]
        yield page.table(head, rows, "all clusterings")


def _event_row(t: int, found: Clustering) -> list[Cell | str]:
    scores = {} if found.groups is None else partition_scores(found.labels, found.groups)
    largest = max(int(found.members(c).sum()) for c in np.unique(found.labels).tolist())
    counts = [number_cell(str(n), n) for n in (found.num_clients, found.num_clusters, largest)]
    names = ("ari", "nmi", "purity")
    return [
        draw.when(t),
        *counts,
        *(number_cell(fixed(scores.get(n)), scores.get(n)) for n in names),
    ]


def _one_clustering(found: Clustering, run: RunRecord, name: str) -> list[Block]:
    alt = "Distances between clients: raw, reordered by the dendrogram, and by cluster"
    threshold = look_up(run.config, draw.THRESHOLD)
    distance = page.figure(distance_figure(found, threshold=threshold), f"{name}-distance", alt)
    alt = "Clients in the plane, coloured by cluster and by planted group"
    embedding = page.figure(embedding_figure(found), f"{name}-embedding", alt)
    alt = "Who is related to whom, as matrix and as graph"
    graph = page.figure(graph_figure(found), f"{name}-graph", alt)
    return [distance, page.side_by_side([[embedding, who_is_where(found, run)], [graph]])]


def who_is_where(found: Clustering, run: RunRecord) -> Block:
    """Clusters with their members, their planted groups and how well they do at the end."""
    last = run.last_test().set_index("client")["accuracy"]
    _, of_group = matched_colours(found.labels, found.groups)
    rows: list[list[Cell | str]] = []
    for label in np.unique(found.labels).tolist():
        mine = found.members(label)
        members = found.clients[mine]
        groups = None if found.groups is None else found.groups[mine]
        accuracy = last.reindex(members)
        mix = [] if groups is None else [Cell(chips=tuple(_group_chips(groups, of_group)))]
        rows.append(
            [
                str(label),
                number_cell(str(len(members)), len(members)),
                _members(members, groups, accuracy, of_group),
                *mix,
                number_cell(percent(float(accuracy.mean())), float(accuracy.mean())),
            ]
        )
    planted = [] if found.groups is None else ["planted groups"]
    head = ["cluster", "size", "members", *planted, "mean test accuracy"]
    overlap = "; clusters overlap, a client may be in several" if found.is_overlapping else ""
    return page.table(head, rows, f"who is where; accuracy at the last evaluation{overlap}")


def _members(
    members: Ids, groups: Ids | None, accuracy: "pd.Series[float]", of_group: Mapping[int, Colour]
) -> Cell:
    """A chip for each client in the colour of its planted group, or ranges where they are many."""
    if len(members) > MAX_CHIPS:
        return Cell(ranges(np.sort(members)))
    chips = []
    for k in np.argsort(members):
        told = f"client {members[k]}, test accuracy {percent(float(accuracy.iloc[k]))}"
        chip = {"text": str(members[k]), "title": told}
        if groups is not None:
            chip["title"] += f", planted group {groups[k]}"
            chip["colour"] = to_hex(of_group[int(groups[k])])
        chips.append(chip)
    return Cell(chips=tuple(chips))


def _group_chips(groups: Ids, of_group: Mapping[int, Colour]) -> Iterator[dict[str, str]]:
    """How many of each group, the largest first."""
    names, sizes = np.unique(groups, return_counts=True)
    for k in np.argsort(-sizes, kind="stable"):
        yield {"text": f"group {names[k]}: {sizes[k]}", "colour": to_hex(of_group[int(names[k])])}


def _at_the_end(run: RunRecord) -> Block | None:
    """Who uses which model at the last evaluation; None if there is one or each has its own."""
    last = run.last_test()
    if not len(last) or not 1 < last["model"].nunique() < len(last):
        return None
    clients = last["client"].to_numpy(np.int64)
    groups = last["group"].to_numpy(np.int64) if "group" in last else None
    unused = np.zeros((len(clients), len(clients)))
    return who_is_where(
        Clustering(clients, last["model"].to_numpy(np.int64), unused, groups=groups), run
    )


def ranges(clients: Ids) -> str:
    """
    >>> ranges(np.array([0, 1, 2, 7, 9, 10]))
    '0–2, 7, 9–10'
    """
    runs = np.split(clients, np.flatnonzero(np.diff(clients) != 1) + 1)
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs if len(r))


def _costs(run: RunRecord, name: str) -> Block:
    """What a run sent by kind, and where its time went by phase."""
    up, down = (draw.bytes_by_kind(run.rounds, f"bytes_{side}_") for side in ("up", "down"))
    kinds, phases, parts = sorted({*up, *down}), draw.seconds_by_phase(run.rounds), []
    if kinds:
        alt = f"Bytes sent in each round by kind: {', '.join(kinds)}"
        sums = {
            kind: [float(side[kind].sum()) if kind in side else 0.0 for side in (up, down)]
            for kind in kinds
        }
        rows = [[k, *(number_cell(fixed(v, 1, 1e-6, " MB"), v) for v in sums[k])] for k in kinds]
        drawn = page.figure(draw.traffic_figure(up, down), f"{name}-traffic", alt)
        parts.append([drawn, page.table(["kind", "up", "down"], rows, "bytes of the whole run")])
    if kinds and len(run.evaluated()):
        alt = "Mean test accuracy against the bytes sent until then"
        parts.append(
            [page.figure(draw.efficiency_figure({run.name: [run]}), f"{name}-efficiency", alt)]
        )
    if len(phases.columns):
        alt = f"Seconds of each round by phase: {', '.join(map(str, phases))}"
        total = float(phases.to_numpy().sum()) or 1.0
        rows = [
            [
                phase,
                number_cell(fixed(s, unit=" s"), s),
                number_cell(fixed(100 * s / total, 0, unit=" %"), s),
            ]
            for phase, s in phases.sum().items()
        ]
        drawn = page.figure(draw.time_figure(phases), f"{name}-time", alt)
        parts.append(
            [drawn, page.table(["phase", "seconds", "share"], rows, "time of the whole run")]
        )
    return page.side_by_side(parts, narrow=True)


def _settings(config: Plain) -> list[Block]:
    """The resolved configuration as a table for each component, and as the file it is in."""
    tables, alone = {}, {}
    for key, value in config.items():
        if not isinstance(value, Mapping) or not value:
            alone[key] = setting_text(value)
            continue
        inner = leaves(value)
        title = setting_text(inner.pop("name", ""))
        caption = f"{key}: {title}" if title else key
        tables[caption] = {name: setting_text(held) for name, held in inner.items()}
    raw = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return [
        page.pairs({**tables, "": alone}, "settings"),
        page.fold("config.yaml", [page.code(raw)]),
    ]


def _rerun(run: RunRecord) -> list[Block]:
    """The command that gives the same numbers, and how to check that it did."""
    if run.summary is None:
        told = "It goes on where it stopped."
        typed = f"flray run --out {page.typed(run.path)} --resume"
    else:
        digest = run.summary.get("params_sha256", MISSING)
        told = (
            f"The same versions on the same kind of device give the same params_sha256: {digest}."
        )
        typed = f"flray run {page.typed(run.path / 'config.yaml')} --out again"
    return [page.command(typed), note(told)]


def _environment(run: RunRecord) -> Iterator[Block]:
    """Versions, commit and hardware, of every start if the run was resumed."""
    held = run.environment
    if not held:
        yield note("Nothing is recorded of what this ran on.")
        return
    starts: Sequence[Plain] = [held, *held.get("resumed", [])]
    described = [_described(start) for start in starts]
    yield page.pairs({"": described[0]})
    for number, start in enumerate(described[1:], 1):
        differs = [f"{k} {v}" for k, v in start.items() if described[0].get(k) != v]
        told = ", ".join(differs) or "on the same versions and hardware"
        yield note(f"Resumed ({number}): {told}.")


def _described(start: Plain) -> dict[str, str]:
    flat = leaves({key: value for key, value in start.items() if key != "resumed"})
    return {
        key.removeprefix("versions.").removeprefix("hardware."): setting_text(value)
        for key, value in flat.items()
        if value is not None
    }
