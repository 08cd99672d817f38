"""Runs side by side: one paired table, and FL+HC's own table."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from flray import columns as recorded
from flray.reports.columns import TEST, VALIDATION, column_of, known, shown
from flray.reports.ratios import Measured, mean_ratio
from flray.reports.runs import Experiments, RunRecord
from flray.reports.sheets import Fields, Heading, Sheet, seed_mean, sheet_of

# Accuracies of other protocols have a column where a run recorded them.
_OTHER_PROTOCOLS = (
    recorded.GLOBAL_ACCURACY_MEAN,
    recorded.TUNED_ACCURACY_MEAN,
    recorded.TUNED_GLOBAL_ACCURACY_MEAN,
)
_ACCURACIES = (TEST, *_OTHER_PROTOCOLS, VALIDATION)
# Every column that may differ between seeds; the terminal has room for the spreads of accuracies.
MEASURED = (
    *(*_ACCURACIES, recorded.ACCURACY_WORST, recorded.ACCURACY_VARIANCE),
    *(recorded.CLUSTERS, recorded.ARI),
)
_COLUMNS = (*MEASURED, recorded.BYTES_UP, recorded.BYTES_DOWN, recorded.SECONDS)
_WHERE_RECORDED = (*_OTHER_PROTOCOLS, recorded.ARI)
LEAST_PAIRS = 3  # seeds, for a test of their differences
SAME = 1e-9  # points; differences that are equal but for rounding have no spread to test with


def reference_of(experiments: Experiments) -> str:
    """The experiment that differences and ratios are taken to: FedAvg where it is among them, else
    the first, in the order in which experiments were named."""
    fedavg = [n for n, runs in experiments.items() if runs[0].value("algorithm.name") == "fedavg"]
    return next(iter([*fedavg, *experiments]))


def comparison_sheet(experiments: Experiments, spreads: Sequence[str] = _ACCURACIES) -> Sheet:
    """A row for each experiment, a mean over its seeds; differences are paired by seed.

    Args:
        spreads: the columns that have the standard deviation over seeds behind their means.
    """
    reference = reference_of(experiments)
    others = [name for name in experiments if name != reference]
    numbers = sorted({len(runs) for runs in experiments.values()})  # of seeds
    every = [run for runs in experiments.values() for run in runs]
    known_keys = {k for run in every for k, value in run.numbers.items() if value is not None}
    columns = [c for c in _COLUMNS if c not in _WHERE_RECORDED or c in known_keys]
    cells = {
        (name, column, "ours"): _mean(runs, column, column in spreads)
        for name, runs in experiments.items()
        for column in columns
    }
    headings: list[str | Heading] = [*columns]
    spread = "± is the standard deviation over seeds"
    if others:
        headings.insert(1, Heading("vs", f"vs {reference}"))
        spread += ", behind vs the standard error of the paired difference"
        cells[reference, "vs", "difference"] = {"text": " "}
    for name in others:
        pairs = _differences(experiments[name], experiments[reference])
        cells[name, "vs", "difference"] = _paired(pairs)
    title = f"mean over {numbers[0] if len(numbers) == 1 else 'n'} seeds"
    if numbers == [1]:
        title, spread = "", "± is the standard error over clients"
        for name, (run,) in experiments.items():
            error = run.numbers.get(recorded.ACCURACY_SE_CLIENTS)
            cells[name, TEST, "ours"]["error"] = shown(TEST, error)
    notes = (f"{spread}.", *paired_tests(experiments))
    return sheet_of(title, _labels(experiments), headings, cells, notes)


def paired_tests(experiments: Experiments) -> list[str]:
    """Tests of the differences to the reference, seed by seed, where there are enough."""
    reference, told = reference_of(experiments), []
    for name in experiments:
        pairs = _differences(experiments[name], experiments[reference])
        if len(pairs) >= LEAST_PAIRS and np.ptp(pairs) > SAME:  # never of the reference itself
            told.append(f"{name} - {reference}: {pairs_text(pairs)}")
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
    """FL+HC's own columns: the round after the clustering and the last, with the ratio to the
    reference at the same seed and round; None where nothing was clustered or compared with."""
    reference = reference_of(experiments)
    after = recorded.ROUND_AFTER_CLUSTERING
    clustered = {
        name: found
        for name, runs in experiments.items()
        if name != reference and (found := [run for run in runs if after in run.numbers])
    }
    shares = {TEST: "accuracy %", recorded.CLIENTS_REACHING_TARGET: "at target %"}
    rounds = {"after": after, "end": recorded.ROUNDS}
    cells: dict[tuple[str, str, str], Fields] = {}
    for name, runs in clustered.items():
        cells[name, recorded.ROUND, "ours"] = {
            "value": np.mean([run.numbers[after] for run in runs])
        }
        for column in shares:
            for when, key in rounds.items():
                mine = [_measured(run, int(run.numbers[key]), column) for run in runs]
                ratio, _ = mean_ratio(mine, column, experiments[reference])
                cells[name, f"{column} {when}", "ours"] = {
                    **seed_mean([100 * each.value for each in mine]),
                    "ratio": ratio,
                    "has_ratio": True,
                    **_marks(runs),
                }
        aris = [known(run.numbers.get(recorded.ARI)) for run in runs]
        cells[name, recorded.ARI, "ours"] = seed_mean([ari for ari in aris if not np.isnan(ari)])
    headings = [
        Heading(recorded.ROUND, "round", decimals=0),
        *(Heading(f"{c} {when}", when, group) for c, group in shares.items() for when in rounds),
        Heading(recorded.ARI, "ARI"),
    ]
    has_spread = any(cell.get("error") is not None for cell in cells.values())
    notes = ["± is the standard deviation over seeds."] * has_spread
    title = f"after the clustering and at the end, with the ratio to {reference}"
    return sheet_of(title, _labels(clustered), headings, cells, notes) if clustered else None


def _labels(experiments: Experiments) -> pd.DataFrame:
    return pd.DataFrame({"experiment": list(experiments)}, index=list(experiments))


def _mean(runs: Sequence[RunRecord], column: str, has_spread: bool) -> Fields:
    """The cell of a recorded column: a mean over seeds."""
    cell = seed_mean([shown(column, run.numbers.get(column)) for run in runs])
    if not has_spread:
        cell["error"] = None
    if column == TEST:
        cell["seeds"] = tuple(run.seed for run in runs)
    # Shares alone are marked: ground truth can improve them, and experiments are ranked by them.
    return cell | (_marks(runs) if column_of(column).unit.startswith("%") else {})


def _paired(differences: Sequence[float]) -> Fields:
    """Mean of the differences seed by seed, and its standard error."""
    cell = seed_mean(differences)
    if cell["error"] is not None:
        cell["error"] /= np.sqrt(len(differences))
    return cell if differences else {"text": "no common seed"}


def _differences(runs: Sequence[RunRecord], against: Sequence[RunRecord]) -> list[float]:
    """Of the accuracies in percent, of the seeds that both have."""
    base = {run.seed: shown(TEST, run.numbers.get(TEST)) for run in against}
    return [shown(TEST, r.numbers.get(TEST)) - base[r.seed] for r in runs if r.seed in base]


def _measured(run: RunRecord, t: int, column: str) -> Measured:
    """The value of a column in round t; NaN where it was not evaluated or is not finite."""
    return Measured(run, t, known(run.at(t).get(column)))


def _marks(runs: Sequence[RunRecord]) -> Fields:
    return {
        "uses_ground_truth": any(run.uses_ground_truth for run in runs),
        "missing_seeds": max(run.missing_seeds for run in runs),
    }
