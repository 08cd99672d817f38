"""Runs side by side: one paired table, and FL+HC's own table."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from flray.report.columns import TEST, VALIDATION, column_of, known
from flray.report.ratios import Measured, mean_ratio
from flray.report.runs import Experiments, RunRecord
from flray.report.sheets import (
    Cells,
    Fields,
    Heading,
    Sheet,
    headings_of,
    mark_notes,
    numbers,
    seed_mean,
)

# What stands beside each other, and which of it only where a run has it.
_COLUMNS = (
    *(TEST, "global_accuracy_mean", "tuned_accuracy_mean", "tuned_global_accuracy_mean"),
    *(VALIDATION, "accuracy_worst", "accuracy_variance"),
    *("clusters", "bytes_up", "bytes_down", "seconds"),
)
_OTHER_PROTOCOLS = _COLUMNS[1:4]
_WITH_SPREAD = _COLUMNS[:5]
LEAST_PAIRS = 3  # seeds, for a test of their differences
SAME = 1e-9  # points; differences that are equal but for rounding have no spread to test with


def comparison_sheet(experiments: Experiments) -> Sheet:
    """A row for each experiment, a mean over its seeds; differences are paired by seed."""
    first, num_seeds = next(iter(experiments)), max(map(len, experiments.values()))
    recorded = {key for runs in experiments.values() for run in runs for key in run.numbers}
    columns = [c for c in _COLUMNS if c not in _OTHER_PROTOCOLS or c in recorded]
    cells: Cells = {}
    for name, runs in experiments.items():
        for column in columns:
            cell = seed_mean([_value(run, column) for run in runs])
            if column not in _WITH_SPREAD:
                cell["error"] = None
            elif column == TEST and len(runs) == 1:
                cell["error"] = _value(runs[0], "accuracy_se_clients")
            if column_of(column).unit.startswith("%"):  # what knowing the groups improves
                cell["uses_ground_truth"] = _uses_ground_truth(runs)
            cells[name, column, "ours"] = cell
        if len(experiments) > 1:
            versus = _paired_difference(runs, experiments[first])
            cells[name, "vs", "difference"] = {"text": " "} if name == first else versus
    frame = numbers(cells)
    headings = headings_of(columns, frame)
    if len(experiments) > 1:
        headings.insert(1, Heading("vs", f"vs {first}"))
    spread = "± is the standard error over clients."
    if num_seeds > 1:
        spread = "± is the standard deviation over seeds"
        spread += (
            ", behind vs the standard error of the paired difference."
            if len(experiments) > 1
            else "."
        )
    labels = pd.DataFrame({"experiment": list(experiments)}, index=list(experiments))
    title = f"mean over {num_seeds} seeds" if num_seeds > 1 else ""
    notes = (spread, *paired_tests(experiments), *mark_notes(frame))
    return Sheet(title, labels, tuple(headings), frame, notes=notes)


def paired_tests(experiments: Experiments) -> list[str]:
    """Tests of the differences to the first experiment, seed by seed, where there are enough."""
    first, *others = experiments
    told = []
    for name in others:
        pairs = _differences(experiments[name], experiments[first])
        if len(pairs) >= LEAST_PAIRS and np.ptp(pairs) > SAME:
            told.append(f"{name} - {first}: {pairs_text(pairs)}")
    if told:
        told.append(
            "t assumes normal differences, Wilcoxon symmetric ones; no correction for several."
        )
    return told


def pairs_text(pairs: Sequence[float]) -> str:
    """The paired t test and Wilcoxon's signed-rank test of differences, two-sided.

    >>> pairs_text([1.0, 2.0, 3.0])
    '3 seeds, 95 % interval -0.48 to +4.48, t test p = 0.074, Wilcoxon p = 0.25 (at least 0.25)'
    """
    t = stats.ttest_1samp(pairs, 0.0)
    low, high = t.confidence_interval(0.95)
    rank = stats.wilcoxon(pairs)  # exact for few, tied or not
    least = 2.0 ** (1 - len(pairs))  # all differences of one sign
    return (
        f"{len(pairs)} seeds, 95 % interval {low:+.2f} to {high:+.2f}, t test p = {t.pvalue:.2g}, "
        f"Wilcoxon p = {rank.pvalue:.2g} (at least {least:.2g})"
    )


def clustering_sheet(experiments: Experiments) -> Sheet | None:
    """FL+HC's own columns: the round after the clustering and the last, with the ratio to the first
    experiment at the same seed and round; None where nothing was clustered or compared with."""
    first, *others = experiments
    clustered = {
        name: found
        for name in others
        if (found := [run for run in experiments[name] if "round_after_clustering" in run.numbers])
    }
    if not clustered:
        return None
    shares = {TEST: "accuracy %", "clients_reaching_target": "at target %"}
    rounds = {"after": "round_after_clustering", "end": "rounds"}
    cells: Cells = {}
    for name, runs in clustered.items():
        after = [float(run.numbers["round_after_clustering"]) for run in runs]
        cells[name, "round", "ours"] = {"value": np.mean(after)}
        for column in shares:
            for when, key in rounds.items():
                mine = [_measured(run, int(run.numbers[key]), column) for run in runs]
                cells[name, f"{column} {when}", "ours"] = {
                    **seed_mean([100 * each.value for each in mine]),
                    "ratio": mean_ratio(mine, column, experiments[first]).value,
                    "has_ratio": True,
                    "uses_ground_truth": _uses_ground_truth(runs),
                }
        aris = [ari for run in runs if (ari := known(run.numbers.get("ari"))) is not None]
        cells[name, "ari", "ours"] = seed_mean(aris)
    headings = [Heading("round", "round", "", 0)]
    headings += [
        Heading(f"{c} {when}", when, group) for c, group in shares.items() for when in rounds
    ]
    labels = pd.DataFrame({"experiment": list(clustered)}, index=list(clustered))
    title = f"after the clustering and at the end, with the ratio to {first}"
    frame = numbers(cells)
    spread = "± is the standard deviation over seeds."
    notes = [spread] * bool(frame["error"].notna().any()) + list(mark_notes(frame))
    return Sheet(title, labels, (*headings, Heading("ari", "ARI")), frame, notes=tuple(notes))


def _uses_ground_truth(runs: Sequence[RunRecord]) -> bool:
    return any(run.uses_ground_truth for run in runs)


def _measured(run: RunRecord, t: int, column: str) -> Measured:
    """The value of a column in round t; NaN where it was not evaluated or is not finite."""
    value = known(run.at(t).get(column))
    return Measured(run, t, np.nan if value is None else value)


def _value(run: RunRecord, key: str) -> float:
    """A number as it is shown; NaN where there is none."""
    value = known(run.numbers.get(key))
    return np.nan if value is None else column_of(key).scale * value


def _paired_difference(runs: Sequence[RunRecord], against: Sequence[RunRecord]) -> Fields:
    """Mean of the differences seed by seed, and its standard error."""
    pairs = _differences(runs, against)
    cell = seed_mean(pairs)
    if cell["error"] is not None:
        cell["error"] /= np.sqrt(len(pairs))
    return cell if pairs else {"text": "no common seed"}


def _differences(runs: Sequence[RunRecord], against: Sequence[RunRecord]) -> list[float]:
    """Of the accuracies in percent, of the seeds that both have."""
    base = {run.seed: _value(run, TEST) for run in against}
    return [_value(run, TEST) - base[run.seed] for run in runs if run.seed in base]
