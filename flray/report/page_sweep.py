"""A sweep on the page: what it cost, what came out best, figures over its settings, its rows."""

from collections.abc import Iterator

import pandas as pd
import yaml

from flray.report import measure_figures as measures
from flray.report import page_blocks as page
from flray.report import sweep_figures as draw
from flray.report.measure_figures import EVOLVING
from flray.report.page_blocks import Block, Cell, fixed, known, note, number_cell
from flray.report.page_run import run_sections
from flray.report.runs import holds_run, read_run
from flray.report.sheets import (
    GROUND_TRUTH,
    GROUND_TRUTH_NOTE,
    INCOMPLETE,
    INCOMPLETE_NOTE,
    MISSING,
)
from flray.report.sweep_sheet import top_sheet, value_text
from flray.report.sweeps import (
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
_WHOLE = ("clusters", "client_steps")
_HEADS = {
    VALIDATION: "validation %",
    TEST: "test %",
    "accuracy_mean_after_clustering": "after clustering %",
    "clients_reaching_target": "at target %",
    "accuracy_worst": "worst %",
}


def sweep_title(sweep: Sweep) -> str:
    """What was varied, in words."""
    given = sweep.space.get("space") or sweep.keys  # a baseline sets other keys too
    varied = [key for key in sweep.keys if key in given and len(sweep.values(key)) > 1]
    named = list(short_names(varied).values())
    return f"Sweep over {', '.join(named)}" if named else "Sweep"


def sweep_sections(sweep: Sweep, name: str) -> list[Block]:
    """Everything there is to see of a sweep.

    Args:
        name: unique on the page; anchors and figures begin with it.
    """
    return [
        page.section(head, f"{name}-{anchor}", body) for head, anchor, body in _parts(sweep, name)
    ]


def _parts(sweep: Sweep, name: str) -> Iterator[tuple[str, str, list[Block]]]:
    notes = [note(GROUND_TRUTH_NOTE)] if sweep.rows[USES_GROUND_TRUTH].any() else []
    notes += [note(INCOMPLETE_NOTE)] if sweep.configurations[MISSING_ROWS].any() else []
    yield "Overview", "overview", [page.cards(_headline(sweep)), *notes]
    if len(sweep.best):
        metric = draw.title_of(sweep.metric).removesuffix(" (%)")
        yield f"Best by {metric}", "best", list(_best(sweep, name))
    figures = list(_figures(sweep, name))
    if figures:
        yield "What the settings do", "figures", figures
    yield "All rows", "rows", [_rows_table(sweep), *notes]
    if len(sweep.failed):
        yield "Failed rows", "failed", [_failed_table(sweep)]
    if sweep.space:
        raw = yaml.safe_dump(dict(sweep.space), sort_keys=False, allow_unicode=True)
        again = page.command(f"flray sweep {page.typed(sweep.path / 'space.yaml')} --out again")
        yield "How to run it again", "again", [again, page.fold("space.yaml", [page.code(raw)])]


def _headline(sweep: Sweep) -> Iterator[tuple[str, str, str]]:
    counts, rows = sweep.counts, sweep.rows
    by_status = rows[STATUS].value_counts().to_dict() if STATUS in rows else {}
    for title, configuration in (("best row", sweep.best), *_baseline_rows(sweep)):
        for column in (TEST, VALIDATION):
            if column in configuration and len(configuration):
                what = draw.title_of(column).removesuffix(" (%)")
                value = f"{_measured(configuration, column)} %{draw.marks_of(configuration)[0]}"
                yield f"{title}: {what}", value, _of_seeds(configuration)
    seeds = rows[SEED].nunique() if SEED in rows else 1
    tried = rows.drop_duplicates(sweep.telling) if sweep.telling else rows[:1]
    told = f"{len(tried)} configurations" + (f", {seeds} seeds" if seeds > 1 else "")
    yield "rows", fixed(counts.get("rows", len(rows)), 0), told
    if sweep.num_tied > 1:
        yield "tied for the best", str(sweep.num_tied), "configurations"
    for status, remark in (
        ("done", "trained to the end"),
        ("shared", "equal to a trained one"),
        ("unfinished", ""),
        ("stopped", "early, by the scheduler"),
        ("failed", ""),
    ):
        number = counts.get(status, by_status.get(status, 0))
        if number or status in ("done", "failed"):
            yield status, fixed(int(number), 0), remark
    trained, naive = (known(counts.get(f"client_steps_{k}")) for k in ("trained", "naive"))
    yield "client steps trained", fixed(trained, 0), f"of {fixed(naive, 0)} one by one"
    if trained and naive:
        yield "saved", f"{100 * (1 - trained / naive):.1f} %", "of client steps"


def _baseline_rows(sweep: Sweep) -> Iterator[tuple[str, pd.DataFrame]]:
    for k in sweep.baselines.index[:2]:
        row = sweep.baselines.loc[[k]]
        values = [value_text(row[key].iloc[0]) for key in sweep.keys]
        yield ", ".join(filter(None, values)) or "baseline", row


def _of_seeds(configuration: pd.DataFrame) -> str:
    number, missing = (int(configuration[name].iloc[0]) for name in (NUM_SEEDS, MISSING_ROWS))
    if missing:
        return f"mean over {number} of {number + missing} seeds"
    return f"mean ± sd over {number} seeds" if number > 1 else ""


def _best(sweep: Sweep, name: str) -> Iterator[Block]:
    """The best configurations, then settings, numbers and the command line of the best one."""
    yield from page.sheet_blocks(top_sheet(sweep))
    best, rows = sweep.best, sweep.rows_of(sweep.best)
    keys = [*sweep.keys, *([MERGE_PLACE] if MERGE_PLACE in best else [])]
    shown = {key: value_text(v) for key in keys if pd.notna(v := best[key].iloc[0])}
    mark = draw.marks_of(best)[0]
    shown |= {draw.title_of(c): _measured(best, c) + mark for c in sweep.measured}
    yield page.pairs({"the best": shown})
    yield note(f"The {'highest' if sweep.is_maximised else 'lowest'} {sweep.metric}, over seeds.")
    if best[MISSING_ROWS].any():
        yield note(f"{INCOMPLETE_NOTE} It is shown since no configuration is complete.")
    elif sweep.num_left_out:
        yield note(f"{left_out_note(sweep.num_left_out)}.")
    where = FOLDER if FOLDER in rows else RUN
    if where in rows and pd.notna(folder := rows[where].iloc[0]):
        file = page.typed(sweep.path / str(folder) / "config.yaml")
        yield page.command(f"flray run {file} --out best")
        if holds_run(sweep.path / str(folder)):
            run = read_run(sweep.path / str(folder), str(folder))
            told = f"The run of the best row: {folder}, seed {run.seed}"
            yield page.fold(told, run_sections(run, f"{name}-bestrun"))


def _figures(sweep: Sweep, name: str) -> Iterator[Block]:
    if sweep.configurations.empty:
        return
    named, curves, found = (
        short_names(sweep.keys),
        draw.curve_keys(sweep),
        draw.heatmap_pairs(sweep),
    )
    spread = "Bands are one standard deviation over seeds. " if sweep.has_seeds else ""
    for number, key in enumerate(curves):
        alt = f"Accuracy and number of clusters against {named[key]}"
        told = f"{spread}A line for each combination of the other settings."
        yield page.figure(draw.curve_figure(sweep, key), f"{name}-curve{number}", alt, told)
        measured = [[block] for block in _measure_figures(sweep, key, f"{name}-{number}")]
        if measured:
            yield page.side_by_side(measured)
    for number, key in enumerate(k for k in EVOLVING if k in sweep.keys):
        evolution = measures.evolution_figure(sweep, key)
        if evolution is not None:
            alt = f"Accuracy by round for each {named[key]}"
            told = "Means over seeds, as REPA's Figs. 4 and 5."
            yield page.figure(evolution, f"{name}-evolution{number}", alt, told)
    drawn = [
        [
            page.figure(
                draw.heatmap_figure(sweep, across, down),
                f"{name}-heat{number}",
                f"Test accuracy by {named[across]} and {named[down]}",
                f"Each cell is the best by {sweep.metric} over all other settings.",
            )
        ]
        for number, (across, down) in enumerate(found[:MAX_HEATMAPS])
    ]
    if drawn:
        yield page.side_by_side(drawn)
    if len(found) > MAX_HEATMAPS:
        yield note(f"Shown are {MAX_HEATMAPS} of {len(found)} pairs of settings.")
    if len(sweep.keys) >= MIN_PARALLEL:
        alt = f"Every configuration as a line through {', '.join(named.values())} to its results"
        told = "A line is a configuration, its colour the metric; the best one is thick."
        yield page.figure(draw.parallel_figure(sweep), f"{name}-parallel", alt, told)
    lone = [key for key in sweep.keys if key not in curves]
    if not found and lone:
        alt = f"Accuracy by {named[lone[0]]}"
        yield page.figure(draw.dots_figure(sweep, lone[0]), f"{name}-dots", alt)


def _measure_figures(sweep: Sweep, key: str, name: str) -> Iterator[Block]:
    """What clusterings were measured by, against a number."""
    against = f"against {short_names(sweep.keys)[key]}"
    if any(column in sweep.measured for column in measures.CORRELATIONS):
        drawn, alt = measures.correlation_figure(sweep, key), "Correlation of embeddings and data"
        told = "How far embeddings follow the data, as REPA's Fig. 1."
        yield page.figure(drawn, f"{name}-correlation", f"{alt} {against}", told)
    if "uniformity" in sweep.measured:
        drawn, told = measures.uniformity_figure(sweep, key), "As REPA's Fig. 2."
        alt = f"Uniformity of clusters {against}"
        yield page.figure(drawn, f"{name}-uniformity", alt, told)
    if "overlap_fp" in sweep.measured and sweep.configurations["overlap_fp"].nunique() > 1:
        told = "Wrong and missing companions of a client, as FLIS's Fig. 3."
        alt = f"Clustering error {against}"
        drawn = measures.clustering_error_figure(sweep, key)
        yield page.figure(drawn, f"{name}-error", alt, told)


def _settings_of(sweep: Sweep) -> dict[str, str]:
    """The columns that tell rows apart, by name."""
    seed = {SEED: SEED} if SEED in sweep.rows else {}
    return {**short_names([key for key in sweep.keys if key != SEED]), **seed}


def _rows_table(sweep: Sweep) -> Block:
    rows, settings = sweep.rows, _settings_of(sweep)
    fixed_columns = [column for column in (STATUS, RUN) if column in rows]
    incomplete = (sweep.missing_rows > 0) & rows.index.isin(sweep.finished.index)
    measured = [_HEADS.get(column, draw.title_of(column)) for column in sweep.measured]
    body = []
    for number, (_, row) in enumerate(rows.iterrows()):
        mark = f" {GROUND_TRUTH}" * bool(row[USES_GROUND_TRUTH])
        line = [number_cell(f"{number}{mark}", number)]
        line += [_setting_cell(row[key]) for key in settings]
        line += [_number_cell(row[column], column) for column in sweep.measured]
        for column in fixed_columns:
            cell = _setting_cell(row[column])
            is_marked = column == STATUS and incomplete.iloc[number]
            line.append(Cell(f"{cell.text} {INCOMPLETE}") if is_marked else cell)
        body.append(line)
    return page.table(["row", *settings.values(), *measured, *fixed_columns], body)


def _failed_table(sweep: Sweep) -> Block:
    settings = _settings_of(sweep)
    rows = []
    for _, row in sweep.failed.iterrows():
        told = [f"{settings[k]}={value_text(row[k])}" for k in settings if pd.notna(row[k])]
        message = row.get(ERROR)
        rows.append([", ".join(told), str(message) if pd.notna(message) else "no message"])
    return page.table(["row", "message"], rows)


def _setting_cell(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_cell(value_text(value) or MISSING, value)
    return Cell(value_text(value) or MISSING)


def _number_cell(value: object, column: str) -> Cell:
    number = known(value)
    if number is None:
        return number_cell(MISSING, None)
    is_whole = column in _WHOLE and number.is_integer()
    decimals = 0 if is_whole else 1 if column in _WHOLE else 2
    return number_cell(
        fixed(number, decimals, draw.scale_of(column)), draw.scale_of(column) * number
    )


def _measured(configuration: pd.DataFrame, column: str) -> str:
    """A number of a configuration with its spread over seeds."""
    words = _number_cell(configuration[column].iloc[0], column).text
    spread = known(configuration[column + SPREAD].iloc[0])
    return f"{words} ± {fixed(spread, scale=draw.scale_of(column))}" if spread else words
