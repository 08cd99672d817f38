"""A sweep on the page: what it cost, what came out best, figures over its settings, its rows."""

import shlex
from collections.abc import Iterator

import pandas as pd
import yaml

from flray.report.page_elements import (
    MISSING,
    Cell,
    Html,
    Number,
    cards,
    command,
    element,
    fold,
    joined,
    note,
    pairs,
    section,
    table,
)
from flray.report.page_embed import embed
from flray.report.page_folders import holds_run, read_page_run
from flray.report.page_numbers import count, fixed, known
from flray.report.page_run import run_sections
from flray.report.runs import GROUND_TRUTH, GROUND_TRUTH_NOTE, INCOMPLETE, INCOMPLETE_NOTE
from flray.report.sweep_figures import (
    curve_figure,
    curve_keys,
    dots_figure,
    heatmap_figure,
    heatmap_pairs,
    marks_of,
    parallel_figure,
    scale_of,
    title_of,
)
from flray.report.sweep_record import (
    ERROR,
    FOLDER,
    MERGE_PLACE,
    MISSING_ROWS,
    NUM_SEEDS,
    RUN,
    SEED,
    SPREAD,
    STATUS,
    TEST,
    USES_GROUND_TRUTH,
    VALIDATION,
    Sweep,
    left_out_note,
    short_names,
)

MAX_HEATMAPS = 6
MIN_PARALLEL = 3  # settings from which lines through all of them help


def sweep_sections(sweep: Sweep, name: str, level: int = 2) -> list[tuple[str, str, Html]]:
    """Heading, anchor and section of each part.

    Args:
        name: unique on the page; anchors and figures begin with it.
        level: of the headings.
    """
    return [
        (heading, f"{name}-{anchor}", section(level, heading, body, anchor=f"{name}-{anchor}"))
        for heading, anchor, body in _parts(sweep, name, level)
    ]


def sweep_title(sweep: Sweep) -> str:
    """What was varied, in words."""
    given = sweep.space.get("space") or sweep.keys  # a baseline sets other keys too
    varied = [key for key in sweep.keys if key in given and len(sweep.values(key)) > 1]
    named = list(short_names(varied).values())
    return f"Sweep over {', '.join(named)}" if named else "Sweep"


def _parts(sweep: Sweep, name: str, level: int) -> Iterator[tuple[str, str, Html]]:
    notes = [note(GROUND_TRUTH_NOTE)] if sweep.rows[USES_GROUND_TRUTH].any() else []
    notes += [note(INCOMPLETE_NOTE)] if sweep.configurations[MISSING_ROWS].any() else []
    yield "Overview", "overview", joined([cards(_headline(sweep)), *notes])
    if len(sweep.best):
        yield (
            f"Best by {title_of(sweep.metric).removesuffix(' (%)')}",
            "best",
            _best(sweep, name, level),
        )
    figures = list(_figures(sweep, name))
    if figures:
        yield "What the settings do", "figures", joined(figures)
    yield "All rows", "rows", joined([_rows_table(sweep), *notes])
    if len(sweep.failed):
        yield "Failed rows", "failed", _failed_table(sweep)
    raw = yaml.safe_dump(dict(sweep.space), sort_keys=False, allow_unicode=True)
    if sweep.space:
        shown = fold("space.yaml", element("pre", element("code", raw)))
        again = command(f"flray sweep {shlex.quote(f'{sweep.name}/space.yaml')} --out again")
        yield "How to run it again", "again", joined([again, shown])


def _headline(sweep: Sweep) -> list[tuple[str, str, str]]:
    counts, rows = sweep.counts, sweep.rows
    by_status = rows[STATUS].value_counts().to_dict() if STATUS in rows else {}
    total = counts.get("rows", len(rows))
    trained, naive = (
        known(counts.get("client_steps_trained")),
        known(counts.get("client_steps_naive")),
    )
    shown = [
        *_best_cards(sweep.best),
        ("rows", count(total), "configurations"),
        ("trained", count(counts.get("done", by_status.get("done"))), ""),
        ("shared", count(counts.get("shared", by_status.get("shared"))), "equal to a trained one"),
        ("unfinished", count(counts.get("unfinished") or by_status.get("unfinished")), ""),
        ("stopped early", count(counts.get("stopped") or None), "by the scheduler"),
        ("failed", count(counts.get("failed", by_status.get("failed", 0))), ""),
        ("client steps trained", count(trained), f"of {count(naive)} one by one"),
    ]
    if trained and naive:
        shown.append(("saved", f"{100 * (1 - trained / naive):.1f} %", "of client steps"))
    return [card for card in shown if card[1] != MISSING]


def _best_cards(best: pd.DataFrame) -> Iterator[tuple[str, str, str]]:
    """Test accuracy of the best configuration, and what it was chosen by."""
    for column in (TEST, VALIDATION):
        if column in best and len(best):
            title = title_of(column).removesuffix(" (%)")
            value = f"{_measured(best, column).text} %{marks_of(best)[0]}"
            yield f"best row: {title}", value, _of_seeds(best)


def _of_seeds(best: pd.DataFrame) -> str:
    number, missing = int(best[NUM_SEEDS].iloc[0]), int(best[MISSING_ROWS].iloc[0])
    if missing:
        return f"mean over {number} of {number + missing} seeds"
    return f"mean over {number} seeds" if number > 1 else ""


def _best(sweep: Sweep, name: str, level: int) -> Html:
    """Settings, numbers and the command line of the best configuration, and its run."""
    best, rows = sweep.best, sweep.rows_of(sweep.best)
    shown = {key: _cell_text(v) for key in sweep.keys if pd.notna(v := best[key].iloc[0])}
    if MERGE_PLACE in best:
        shown[MERGE_PLACE] = _cell_text(best[MERGE_PLACE].iloc[0])
    numbers = {title_of(c): _measured(best, c).text for c in sweep.measured}
    parts = [
        pairs(shown | numbers),
        note(f"The {'highest' if sweep.is_maximised else 'lowest'} {sweep.metric}, over seeds."),
    ]
    if best[MISSING_ROWS].any():
        parts.append(note(f"{INCOMPLETE_NOTE} It is shown since no configuration is complete."))
    elif sweep.num_left_out:
        parts.append(note(f"{left_out_note(sweep.num_left_out)}."))
    where = FOLDER if FOLDER in rows else RUN
    if where in rows and pd.notna(folder := rows[where].iloc[0]):
        file = shlex.quote(f"{sweep.name}/{folder}/config.yaml")
        parts.append(command(f"flray run {file} --out best"))
        path = sweep.path / str(folder)
        if holds_run(path):
            run = read_page_run(path, str(folder))
            bodies = [body for _, _, body in run_sections(run, f"{name}-bestrun", level + 1)]
            parts.append(fold(f"The run of the best row: {folder}", *bodies))
    return joined(parts)


def _figures(sweep: Sweep, name: str) -> Iterator[Html]:
    if sweep.configurations.empty:
        return
    named = short_names(sweep.keys)
    spread = "Bands are one standard deviation over seeds. " if sweep.has_seeds else ""
    for number, key in enumerate(curve_keys(sweep)):
        alt = f"Accuracy and number of clusters against {named[key]}"
        told = f"{spread}A line for each combination of the other settings."
        yield embed(curve_figure(sweep, key), f"{name}-curve{number}", alt, told)
    found = heatmap_pairs(sweep)
    drawn = [
        embed(
            heatmap_figure(sweep, across, down),
            f"{name}-heat{number}",
            f"Test accuracy by {named[across]} and {named[down]}",
            f"Each cell is the best by {sweep.metric} over all other settings.",
        )
        for number, (across, down) in enumerate(found[:MAX_HEATMAPS])
    ]
    if drawn:
        yield element("div", *drawn, class_="figures")
    if len(found) > MAX_HEATMAPS:
        yield note(f"Shown are {MAX_HEATMAPS} of {len(found)} pairs of settings.")
    if len(sweep.keys) >= MIN_PARALLEL:
        alt = f"Every configuration as a line through {', '.join(named.values())} to its results"
        told = "A line is a configuration, its colour the metric; the best one is thick."
        yield embed(parallel_figure(sweep), f"{name}-parallel", alt, told)
    lone = [key for key in sweep.keys if key not in curve_keys(sweep)]
    if not found and lone:
        alt = f"Accuracy by {named[lone[0]]}"
        yield embed(dots_figure(sweep, lone[0]), f"{name}-dots", alt)


def _rows_table(sweep: Sweep) -> Html:
    rows = sweep.rows
    settings = [*sweep.keys, *([SEED] if SEED in rows and SEED not in sweep.keys else [])]
    fixed_columns = [column for column in (STATUS, RUN) if column in rows]
    is_finished = rows.index.isin(sweep.finished.index)
    incomplete = (sweep.missing_rows > 0) & is_finished
    named = short_names(sweep.keys)
    head = [
        "row",
        *(named.get(k, k) for k in settings),
        *(_HEADS.get(c, title_of(c)) for c in sweep.measured),
        *fixed_columns,
    ]
    body = []
    for number, ((_, row), is_incomplete) in enumerate(
        zip(rows.iterrows(), incomplete, strict=True)
    ):
        mark = f" {GROUND_TRUTH}" if row[USES_GROUND_TRUTH] else ""
        line: list[Cell] = [Number(f"{number}{mark}", number)]
        line += [_setting_cell(row[key]) for key in settings]
        line += [_number_cell(row[column], column) for column in sweep.measured]
        line += [_setting_cell(row[column]) for column in fixed_columns]
        if is_incomplete and STATUS in rows:
            line[head.index(STATUS)] = f"{row[STATUS]} {INCOMPLETE}"
        body.append(line)
    return table(head, body, is_sortable=True)


def _failed_table(sweep: Sweep) -> Html:
    named = short_names(sweep.keys)
    settings = [*sweep.keys, *([SEED] if SEED in sweep.rows else [])]
    rows = [
        [
            ", ".join(
                f"{named.get(k, k)}={_cell_text(row[k])}" for k in settings if pd.notna(row[k])
            ),
            str(row[ERROR]) if ERROR in sweep.rows and pd.notna(row[ERROR]) else "no message",
        ]
        for _, row in sweep.failed.iterrows()
    ]
    return table(["row", "message"], rows)


def _setting_cell(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = known(value)
        return Number(MISSING if number is None else _cell_text(value), number)
    return MISSING if value is None or value is pd.NA else str(value)


def _number_cell(value: object, column: str) -> Number:
    number = known(value)
    if number is None:
        return Number(MISSING, None)
    scaled = scale_of(column) * number
    return Number(f"{scaled:,.0f}" if column in _WHOLE else f"{scaled:.2f}", scaled)


_WHOLE = ("clusters", "client_steps")
_HEADS = {
    VALIDATION: "validation %",
    TEST: "test %",
    "accuracy_mean_after_clustering": "after clustering %",
    "clients_reaching_target": "at target %",
    "accuracy_worst": "worst %",
}


def _measured(best: pd.DataFrame, column: str) -> Number:
    """A number of a configuration with its spread over seeds."""
    cell = _number_cell(best[column].iloc[0], column)
    spread = known(best[column + SPREAD].iloc[0])
    if not spread or cell.value is None:
        return cell
    return Number(f"{cell.text} ± {fixed(scale_of(column) * spread)}", cell.value)


def _cell_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
