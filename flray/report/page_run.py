"""A run on the page: headline numbers, figures, clusterings, costs, settings, how to re-run."""

from collections.abc import Iterator

from flray.report.colours import for_figure
from flray.report.figures import accuracy_figure, clients_figure
from flray.report.page_clusterings import at_the_end, clusterings
from flray.report.page_costs import costs
from flray.report.page_elements import MISSING, Html, cards, element, joined, section
from flray.report.page_embed import embed
from flray.report.page_folders import PageRun
from flray.report.page_numbers import count, duration, fixed, known, megabytes, percent
from flray.report.page_settings import environment, rerun, settings
from flray.report.runs import GROUND_TRUTH, look_up

SHORT_HASH = 12


def run_sections(run: PageRun, name: str, level: int = 2) -> list[tuple[str, str, Html]]:
    """Everything there is to see of a run: heading, anchor and section of each part.

    Args:
        name: unique on the page; anchors and figures begin with it.
        level: of the headings.
    """
    return [
        (heading, f"{name}-{anchor}", section(level, heading, body, anchor=f"{name}-{anchor}"))
        for heading, anchor, body in _parts(run, name)
    ]


def state_of(run: PageRun) -> Html:
    """What must be said before the numbers: that a run is not finished, that it knew the groups."""
    said = []
    if run.summary is None:
        done, planned = run.numbers["rounds"], run.config.get("rounds", "?")
        said.append(
            f"This run is not finished: {done} of {planned} rounds are recorded, "
            "and what follows is how it stood then."
        )
    if run.uses_ground_truth:
        said.append(
            f"{GROUND_TRUTH} This run uses ground truth: labels or groups that a real server does "
            "not know."
        )
    return joined(element("p", text, class_="warn") for text in said)


def headline(run: PageRun) -> list[tuple[str, str, str]]:
    """What it is, the number, a remark; numbers that a run does not have are left out."""
    numbers = run.numbers
    mark = f" {GROUND_TRUTH}" if run.uses_ground_truth else ""
    accuracy = fixed(_times(100, numbers.get("accuracy_mean")))
    error = fixed(_times(100, numbers.get("accuracy_se_clients")))
    target = look_up(run.config, "evaluate.target")
    shown = [
        ("test accuracy", f"{accuracy} ± {error} %{mark}", "mean ± SE over clients"),
        (
            "global test accuracy",
            percent(numbers.get("global_accuracy_mean")),
            "on the whole test set",
        ),
        (
            "fine-tuned test accuracy",
            percent(numbers.get("tuned_accuracy_mean")),
            "after training on the client's own data",
        ),
        (
            "fine-tuned global test accuracy",
            percent(numbers.get("tuned_global_accuracy_mean")),
            "after training on the client's own data, on the whole test set",
        ),
        ("validation accuracy", percent(numbers.get("validation_accuracy_mean")), ""),
        ("worst client", percent(numbers.get("accuracy_worst")), ""),
        ("variance over clients", f"{fixed(_times(1e4, numbers.get('accuracy_variance')))} %²", ""),
        (
            "newcomers",
            percent(numbers.get("holdout_accuracy_mean")),
            "test accuracy of clients that never trained",
        ),
        ("clusters", count(numbers.get("clusters")), _groups_remark(run)),
        ("ARI", fixed(numbers.get("ari")), "partition against planted groups"),
        (
            "clients at target",
            percent(numbers.get("clients_reaching_target"), 1),
            f"target {percent(target, 1)}",
        ),
        (
            "after the clustering",
            percent(numbers.get("accuracy_mean_after_clustering")),
            f"test accuracy in round {count(numbers.get('round_after_clustering'))}",
        ),
        ("rounds", _rounds(run), ""),
        ("client steps", count(numbers.get("client_steps")), "batches of SGD"),
        ("sent up", megabytes(numbers.get("bytes_up")), ""),
        ("sent down", megabytes(numbers.get("bytes_down")), ""),
        ("clients dropped", count(numbers.get("clients_dropped") or None), ""),
        ("time", duration(numbers.get("seconds")), ""),
        ("params_sha256", str(numbers.get("params_sha256", MISSING))[:SHORT_HASH], "of all models"),
    ]
    return [card for card in shown if not card[1].startswith(MISSING)]


def _parts(run: PageRun, name: str) -> Iterator[tuple[str, str, Html]]:
    yield "Headline numbers", "numbers", joined([state_of(run), cards(headline(run))])
    shown, known_as = run.shown, for_figure(run.name)
    figures = []
    if len(shown.evaluated()):
        alt = "Mean test accuracy over clients by round, with the rounds of clusterings"
        figures.append(embed(accuracy_figure({known_as: shown}), f"{name}-accuracy", alt))
    if len(shown.last_test()):
        alt = "Test accuracy of every client, sorted and by cluster: how fair it is"
        figures.append(embed(clients_figure({known_as: shown}), f"{name}-clients", alt))
    if figures:
        body = element("div", *figures, class_="figures")
        yield "Accuracy by round and by client", "accuracy", body
    if shown.clusterings:
        yield "Clusterings", "clusterings", clusterings(shown, f"{name}-clustering")
    elif (where := at_the_end(shown)) is not None:
        yield "Who is where", "where", where
    if len(shown.rounds):
        yield "Communication and time", "costs", costs(shown, name)
    yield "Settings", "settings", settings(run)
    yield "How to run it again", "again", rerun(run)
    yield "Environment", "environment", environment(run)


def _rounds(run: PageRun) -> str:
    done = count(run.numbers.get("rounds"))
    return done if run.summary is not None else f"{done} of {run.config.get('rounds', '?')}"


def _groups_remark(run: PageRun) -> str:
    last = run.shown.last_test()
    if "group" not in last or last["group"].isna().all():
        return "distinct models in use"
    return f"of {last['group'].nunique()} planted groups"


def _times(factor: float, value: object) -> float | None:
    number = known(value)
    return None if number is None else factor * number
