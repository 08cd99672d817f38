"""The best configurations of a sweep, with its baselines beside them."""

import pandas as pd

from flray.report.sheets import Heading, Sheet, mark_notes, numbers
from flray.report.sweep_figures import scale_of, title_of
from flray.report.sweeps import (
    MISSING_ROWS,
    NUM_SEEDS,
    SPREAD,
    TEST,
    USES_GROUND_TRUTH,
    VALIDATION,
    Sweep,
    short_names,
)

TOP = 5  # configurations


def top_sheet(sweep: Sweep) -> Sheet:
    """The best configurations by the metric, then the baselines; equal ones share a rank."""
    ranked = sweep.ranked.drop(sweep.baselines.index)
    shown = pd.concat([ranked.head(TOP), sweep.baselines])
    ranks = ranked[sweep.metric].round(12).rank(method="min", ascending=not sweep.is_maximised)
    ties = ranks.value_counts()
    names = [
        "baseline" if k not in ranks else f"{ranks[k]:.0f}{' (tie)' * bool(ties[ranks[k]] > 1)}"
        for k in shown.index
    ]
    settings = short_names(sweep.keys)
    labels = pd.DataFrame({"rank": names}, index=shown.index)
    for key, name in settings.items():
        labels[name] = [value_text(value) for value in shown[key]]
    columns = [c for c in dict.fromkeys((sweep.metric, VALIDATION, TEST, "clusters")) if c in shown]
    cells = {}
    for k, row in shown.iterrows():
        for column in columns:
            scale = scale_of(column)
            cells[k, column, "ours"] = {
                "value": scale * row[column],
                "error": scale * row[column + SPREAD] if scale > 1 else None,
                "seeds": tuple(range(int(row[NUM_SEEDS]))),
                "uses_ground_truth": scale > 1 and row[USES_GROUND_TRUTH] > 0,
                "missing_seeds": row[MISSING_ROWS] if scale > 1 else 0,
            }
    frame = numbers(cells)
    notes = [f"Ranked by {sweep.metric}, a mean over seeds."]
    if sweep.has_seeds:
        notes.append("± is the standard deviation over seeds.")
    if sweep.num_tied > 1:
        notes.append(f"{sweep.num_tied} configurations tie for the best; the first is taken.")
    is_whole = "clusters" in shown and (shown["clusters"].dropna() % 1 == 0).all()
    decimals = {"clusters": 0 if is_whole else 1}
    headings = [Heading(c, title_of(c), "", decimals.get(c, 2)) for c in columns]
    return Sheet(
        f"the best {min(TOP, len(ranked))} of {len(ranked)} configurations",
        labels,
        tuple(headings),
        frame,
        notes=(*notes, *mark_notes(frame)),
    )


def value_text(value: object) -> str:
    """
    >>> value_text(0.30000000000000004), value_text("ward"), value_text(None)
    ('0.3', 'ward', '')
    """
    if value is None or value != value or value is pd.NA:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
