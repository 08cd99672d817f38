"""Tables of experiments side by side: what `flray compare` and the first part of a page show.

Means over seeds with paired differences, and FL+HC's table of the round after the clustering.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from flray import columns as recorded
from flray.columns import ScoreColumn
from flray.reports.columns import Heading, column_of, finite, scaled, with_unit
from flray.reports.ratios import Measured, mean_ratio
from flray.reports.runs import Experiments, RunRecord, score_of
from flray.reports.settings import settings_text
from flray.reports.sheets import Fields, Sheet, mark_fields, seed_mean, sheet_of
from flray.wording import counted

_PROTOCOLS = ("global_", "tuned_", "tuned_global_")  # how columns of other protocols begin
_COSTS = (recorded.BYTES_UP, recorded.BYTES_DOWN, recorded.SECONDS)
LEAST_PAIRS = 3  # seeds needed for a test of their differences
SAME = 1e-9  # of the unit shown; differences within it are equal: there is no spread to test with


def references_of(experiments: Experiments) -> dict[str, str]:
    """For each experiment the name of the one it is compared with, on the same data.

    It is the first FedAvg on the same dataset and split, else the first experiment on them. If no
    two experiments have the same data, data are what is compared: all have one reference.
    """
    keys = ("dataset", "split", "events")
    data = {
        name: settings_text({key: runs[0].config.get(key) for key in keys})
        for name, runs in experiments.items()
    }
    if len(set(data.values())) == len(data):
        data = dict.fromkeys(data, "")
    references: dict[str, str] = {}
    for name, runs in experiments.items():
        if runs[0].value("algorithm.name") == "fedavg":
            references.setdefault(data[name], name)
    for name in experiments:
        references.setdefault(data[name], name)
    return {name: references[data[name]] for name in experiments}


def measured_of(experiments: Experiments) -> list[str]:
    """Columns that may differ between seeds; those of other protocols and ARI if recorded."""
    first, all_runs = score_of(experiments), [run for runs in experiments.values() for run in runs]
    present = {k for run in all_runs for k, value in run.numbers.items() if value is not None}
    protocols = [first.column("mean", prefix) for prefix in _PROTOCOLS]
    others = dict.fromkeys(s.mean for run in all_runs for s in run.scores if s != first)
    spread = (first.column("worst"), first.column("variance"))
    columns = (first.mean, *others, *protocols, first.validation, *spread)
    optional = {*others, *protocols, recorded.ARI}
    listed = (*columns, recorded.CLUSTERS, recorded.ARI)
    return [column for column in listed if column not in optional or column in present]


def comparison_sheet(experiments: Experiments, spreads: Sequence[str] | None = None) -> Sheet:
    """A row for each experiment with means over its seeds; differences are paired by seed.

    Columns are the recorded scores, the worst client, variance, clusters and costs; then the
    difference to the reference (see `references_of`). Notes have tests of these differences. With
    several references, experiments on the same data are beside each other, and labels name them.

    Args:
        experiments: The finished runs of each experiment by name.
        spreads: The columns whose means are shown with their standard deviation over seeds. None:
            means of scores, for which the terminal has room.
    """
    references, score = references_of(experiments), score_of(experiments)
    common = sorted(set(references.values()), key=list(experiments).index)
    experiments = {
        n: experiments[n] for base in common for n in references if references[n] == base
    }
    others = [name for name in experiments if name not in common]
    num_seeds = sorted({len(runs) for runs in experiments.values()})
    columns = [*measured_of(experiments), *_COSTS]
    if spreads is None:
        spreads = [c for c in columns if isinstance(c, ScoreColumn) and c.endswith("_mean")]
    cells = {
        (name, column, "ours"): _mean(runs, column, column in spreads)
        for name, runs in experiments.items()
        for column in columns
    }
    headings: list[str | Heading] = [*columns]
    spread = "± is the standard deviation over seeds"
    if others:
        decimals = column_of(score.mean).decimals
        base = common[0] if len(common) == 1 else "same data"
        headings.insert(1, Heading("vs", f"vs {base}", decimals=decimals))
        spread += ", behind vs the standard error of the paired difference"
        cells |= {(name, "vs", "difference"): {"text": " "} for name in common}
    for name in others:
        pairs = _differences(experiments[name], experiments[references[name]])
        cells[name, "vs", "difference"] = _paired(pairs)
    title = f"mean over {num_seeds[0] if len(num_seeds) == 1 else 'n'} seeds"
    if num_seeds == [1]:
        title, spread = "", "± is the standard error over clients"
        for name, (run,) in experiments.items():
            error = run.numbers.get(score.column("se_clients"))
            cells[name, score.mean, "ours"]["error"] = scaled(score.mean, error)
    if len(common) > 1:
        spread += "; vs compares with FedAvg on the same dataset and split, else the first on them"
    notes = [f"{spread}.", *sample_notes(experiments), *_failure_notes(experiments)]
    notes += paired_tests(experiments)
    return sheet_of(title, _labels(experiments, common), headings, cells, notes)


def sample_notes(experiments: Experiments) -> list[str]:
    """Notes that name experiments whose scores are those of a sample of clients."""
    notes = []
    for name, runs in experiments.items():
        sampled = runs[0].value("evaluate.clients")
        if sampled is None or sampled > runs[0].rounds[recorded.CLIENTS_EVALUATED].max():
            continue  # more than there are: all were evaluated
        numbers, score = runs[0].numbers, runs[0].score
        at_end = finite(numbers.get(recorded.CLIENTS_EVALUATED))
        error = finite(numbers.get(score.column(recorded.SE_SAMPLE)))
        note = f"{name}: rounds before the last are evaluated on samples of {sampled:,} clients"
        if error > 0:
            text = with_unit(score.mean, numbers.get(score.mean), error)
            note += f", the last one on {at_end:,.0f} of {numbers['clients']:,} ({text}, ± is the "
            note += "standard error of the sample)"
        notes.append(f"{note}.")
    return notes


def _failure_notes(experiments: Experiments) -> list[str]:
    """Notes that name experiments in which clients failed and were left out."""
    times = {
        name: int(sum(run.numbers.get(recorded.CLIENTS_DROPPED) or 0 for run in runs))
        for name, runs in experiments.items()
    }
    return [
        f"{name}: clients failed and were left out {counted(number, 'time')} "
        "(on_client_failure: drop)."
        for name, number in times.items()
        if number
    ]


def paired_tests(experiments: Experiments) -> list[str]:
    """Notes with tests of the differences to the reference, for experiments with enough seeds.

    Differences are those of the score on test parts, in its unit, paired by seed.
    """
    references, notes = references_of(experiments), []
    decimals = column_of(score_of(experiments).mean).decimals
    for name in experiments:
        reference = references[name]
        pairs = _differences(experiments[name], experiments[reference])
        if len(pairs) >= LEAST_PAIRS and np.ptp(pairs) > SAME:  # never of the reference itself
            notes.append(f"{name} - {reference}: {pairs_text(pairs, decimals)}")
    if notes:
        notes.append(
            "t assumes normal differences, Wilcoxon symmetric ones; no correction for several."
        )
    return notes


def pairs_text(pairs: Sequence[float], decimals: int = 2) -> str:
    """The paired t test and Wilcoxon's signed-rank test of differences, two-sided.

    The number in brackets is the smallest p value that Wilcoxon's test can have with so few pairs:
    with fewer than six seeds it never falls below 0.05.

    Args:
        pairs: At least two differences that are not all equal.

    >>> pairs_text([1.0, 2.0, 3.0])
    '3 seeds, 95 % interval -0.48 to +4.48, t test p = 0.074, Wilcoxon p = 0.25 (at least 0.25)'
    """
    t = stats.ttest_1samp(pairs, 0.0)
    low, high = t.confidence_interval(0.95)
    rank = stats.wilcoxon(pairs)  # exact for few, tied or not
    least = 2.0 ** (1 - len(pairs))  # all differences of one sign
    return (
        f"{len(pairs)} seeds, 95 % interval {low:+.{decimals}f} to {high:+.{decimals}f}, "
        f"t test p = {t.pvalue:.2g}, "
        f"Wilcoxon p = {rank.pvalue:.2g} (at least {least:.2g})"
    )


def clustering_sheet(experiments: Experiments) -> Sheet | None:
    """FL+HC's columns: the round after the clustering and the last, with ratios to the reference.

    Columns are the mean of the first score on test parts and the share of clients that reach
    `evaluate.target`, each after the clustering and at the end, and the ARI of the clusters. Ratios
    are taken at the same seed and round. Experiments with another score than the first one are left
    out, since their target is another one too. None if no experiment but the reference clustered.
    """
    references, score = references_of(experiments), score_of(experiments)
    bases = dict.fromkeys(references.values())
    after = recorded.ROUND_AFTER_CLUSTERING
    clustered = {
        name: with_round
        for name, runs in experiments.items()
        if name not in bases and runs[0].score == score
        if (with_round := [run for run in runs if after in run.numbers])
    }
    shares = {
        score.mean: column_of(score.mean).short,
        recorded.CLIENTS_REACHING_TARGET: "at target %",
    }
    rounds = {"after": after, "end": recorded.ROUNDS}
    cells: dict[tuple[str, str, str], Fields] = {}
    for name, runs in clustered.items():
        mean_round = np.mean([run.numbers[after] for run in runs])
        cells[name, recorded.ROUND, "ours"] = {"value": mean_round}
        for column in shares:
            for when, key in rounds.items():
                measured = [_measured(run, int(run.numbers[key]), column) for run in runs]
                ratio, _ = mean_ratio(measured, column, experiments[references[name]])
                cells[name, f"{column} {when}", "ours"] = {
                    **seed_mean([scaled(column, number.value) for number in measured]),
                    "ratio": ratio,
                    "has_ratio": True,
                    **mark_fields(runs),
                }
        aris = [finite(run.numbers.get(recorded.ARI)) for run in runs]
        cells[name, recorded.ARI, "ours"] = seed_mean([ari for ari in aris if not np.isnan(ari)])
    headings = [
        Heading(recorded.ROUND, "round", decimals=0),
        *(
            Heading(f"{column} {when}", when, group, column_of(column).decimals)
            for column, group in shares.items()
            for when in rounds
        ),
        Heading(recorded.ARI, "ARI"),
    ]
    has_spread = any(cell.get("error") is not None for cell in cells.values())
    notes = ["± is the standard deviation over seeds."] * has_spread
    compared = ", ".join(dict.fromkeys(references[name] for name in clustered))
    title = f"after the clustering and at the end, with the ratio to {compared}"
    return sheet_of(title, _labels(clustered), headings, cells, notes) if clustered else None


def _labels(experiments: Experiments, references: Sequence[str] = ()) -> pd.DataFrame:
    """The names of experiments, after those of their data if there are several references."""
    labels = pd.DataFrame({"experiment": list(experiments)}, index=list(experiments))
    if len(references) > 1:
        titles = [runs[0].title.split(" · ", 1)[1] for runs in experiments.values()]
        labels.insert(0, "data", titles)
    return labels


def _mean(runs: Sequence[RunRecord], column: str, has_spread: bool) -> Fields:
    """The cell of a recorded column: a mean over seeds."""
    cell = seed_mean([scaled(column, run.numbers.get(column)) for run in runs])
    if not has_spread:
        cell["error"] = None
    if column == runs[0].score.mean:
        cell["seeds"] = tuple(run.seed for run in runs)
    # Only scores are marked: ground truth may improve them, and they rank experiments.
    return cell | (mark_fields(runs) if isinstance(column, ScoreColumn) else {})


def _paired(differences: Sequence[float]) -> Fields:
    """The mean of the paired differences and its standard error."""
    cell = seed_mean(differences)
    if cell["error"] is not None:
        cell["error"] /= np.sqrt(len(differences))
    return cell if differences else {"text": "no common seed"}


def _differences(runs: Sequence[RunRecord], against: Sequence[RunRecord]) -> list[float]:
    """The differences of scores on test parts for the seeds that both have."""
    test = against[0].score.mean
    base = {run.seed: scaled(test, run.numbers.get(test)) for run in against}
    return [scaled(test, r.numbers.get(test)) - base[r.seed] for r in runs if r.seed in base]


def _measured(run: RunRecord, t: int, column: str) -> Measured:
    """The value of a column in round t, NaN if it was not evaluated."""
    return Measured(run, t, finite(run.at(t).get(column)))
