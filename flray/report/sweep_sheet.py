"""The best configurations of a sweep, with its baselines beside them."""

import pandas as pd

from flray.records.columns import USES_GROUND_TRUTH
from flray.report.columns import TEST, VALIDATION, column_of, value_text
from flray.report.sheets import Cells, Sheet, headings_of, mark_notes, numbers
from flray.report.sweeps import MISSING_ROWS, NUM_SEEDS, SPREAD, Sweep

TOP = 5  # configurations


def top_sheet(sweep: Sweep) -> Sheet:
    """The best configurations by the metric, then the baselines; equal ones share a rank."""
    ranked = sweep.ranked.drop(sweep.baselines.index)
    shown = pd.concat([ranked.head(TOP), sweep.baselines])
    ranks = ranked[sweep.metric].round(12).rank(method="min", ascending=not sweep.is_maximised)
    ties = ranks.duplicated(keep=False)
    names = [
        f"{ranks[k]:.0f}{' (tie)' * bool(ties[k])}" if k in ranks else "baseline"
        for k in shown.index
    ]
    labels = pd.DataFrame({"rank": names}, index=shown.index)
    for key, name in sweep.names.items():
        labels[name] = [value_text(value) for value in shown[key]]
    columns = [c for c in dict.fromkeys((sweep.metric, VALIDATION, TEST, "clusters")) if c in shown]
    cells: Cells = {}
    for k, row in shown.iterrows():
        for column in columns:
            scale = column_of(column).scale
            cells[k, column, "ours"] = {
                "value": scale * row[column],
                "error": scale * row[column + SPREAD],
                "seeds": tuple(range(int(row[NUM_SEEDS]))),
                "uses_ground_truth": scale > 1 and row[USES_GROUND_TRUTH] > 0,
                "missing_seeds": row[MISSING_ROWS] if scale > 1 else 0,
            }
    frame = numbers(cells)
    notes = [f"Ranked by {sweep.metric}."]
    if sweep.has_seeds:
        notes = [f"Ranked by {sweep.metric}, a mean ± standard deviation over seeds."]
    if sweep.num_tied > 1:
        notes.append(f"{sweep.num_tied} configurations tie for the best; the first is taken.")
    return Sheet(
        f"the best {min(TOP, len(ranked))} of {len(ranked)} configurations",
        labels,
        tuple(headings_of(columns, frame)),
        frame,
        notes=(*notes, *mark_notes(frame)),
    )
