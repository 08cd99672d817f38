"""What a sweep will run, before anything is trained: its rows and their client steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flray.clustering.encoder import encoders_of
from flray.clustering.update import Update, Weights
from flray.config.experiment import Experiment
from flray.data.dataset import Dataset
from flray.data.events import Timeline, make_timeline
from flray.engines.plan import num_local_steps
from flray.errors import ExperimentError
from flray.execution.cohort import cohort_size, sample_cohort
from flray.runs.preparing import deal, evaluation_of, load_dataset
from flray.server.summary import summary_names
from flray.sweeps.branching import branches
from flray.sweeps.keys import code_version, digest, prefix_key
from flray.sweeps.rows import experiment_of, known_and_examples
from flray.sweeps.search import seeds_of
from flray.sweeps.space import OptunaSearch, Space
from flray.wording import counted


@dataclass(frozen=True)
class PlannedRows:
    """Rows of a space with their client steps; a sample of them if a search suggests rows.

    Steps are those of a row on its own whose clients end in one cluster and have as many examples
    as with the first seed of the split.
    """

    experiments: list[Experiment]
    steps: list[int]  # of each row
    shared: list[int]  # of each row, those that it takes over from a row before it
    num_rows: int  # that the sweep will have
    num_known: int  # those of them that no search suggests

    @property
    def one_by_one(self) -> int:
        """Client steps of all rows, each run on its own."""
        return round(sum(self.steps) / len(self.steps) * self.num_rows)

    @property
    def at_most(self) -> int:
        """Client steps that a sweep trains if no two rows end in the same clusters."""
        return round(self.one_by_one * (1 - sum(self.shared) / max(1, sum(self.steps))))


def planned_rows(space: Space) -> PlannedRows:
    """The rows of a space and their client steps. Loads the data and deals them, trains nothing.

    Rows share FedAvg's rounds up to a clustering in the same round by the same signatures.

    Raises:
        ExperimentError: A row is no valid experiment, data are missing, or no row has the metric.
    """
    known, examples = known_and_examples(space)
    experiments = [experiment_of(row.plain) for row in known + examples]
    check_metric(space, experiments)
    require_encoders(experiments)
    counts: dict[int, tuple[int, int]] = {}  # steps of a row and those it shares, by its number
    for numbers, timeline in dealt(experiments):
        rounds: dict[str, list[int]] = {}
        begun: set[str] = set()
        for number in numbers:
            experiment, shared = experiments[number], 0
            if branches(experiment):
                last = experiment.algorithm.build().rounds_before
                signature = experiment.plain["algorithm"].get("clustering", {}).get("signature")
                key = digest([prefix_key(experiment, code_version(), False), last, signature])
                if key in begun:
                    shared = predicted_steps(experiment, timeline, last, rounds)
                begun.add(key)
            counts[number] = predicted_steps(experiment, timeline, None, rounds), shared
    steps, shared_steps = map(list, zip(*(counts[k] for k in range(len(counts))), strict=True))
    num_rows, search = len(known), space.options.search
    if isinstance(search, OptunaSearch):
        num_rows += search.samples * len(seeds_of(space))
    return PlannedRows(experiments, steps, shared_steps, num_rows, len(known))


def describe_space(space: Space, rows: PlannedRows) -> str:
    """One sentence on what a sweep will run: its rows, their prefixes and their client steps.

    Client steps are those of the rows one by one; a sweep trains fewer, which depends on its
    clusterings. `flray check` and `flray plan` print it.

    Args:
        rows: The rows of the space, as `planned_rows` returns them.
    """
    experiments = rows.experiments
    if isinstance(space.options.search, OptunaSearch):
        return (
            f"{counted(rows.num_rows - rows.num_known, 'row')} suggested by Optuna and "
            f"{counted(rows.num_known, 'baseline')}; one by one they would take about "
            f"{rows.one_by_one:,} client steps"
        )
    branching = [e for e in experiments if branches(e)]
    prefixes = {prefix_key(e, code_version(), has_gpu=False) for e in branching}
    sharing = (
        f": {len(branching)} from {counted(len(prefixes), 'prefix', 'prefixes')} of FedAvg, "
        f"{len(experiments) - len(branching)} without one"
    )
    return (
        f"{counted(len(experiments), 'row')}{sharing if branching else ''}; one by one they would "
        f"take about {counted(rows.one_by_one, 'client step')}{_if_clusters_draw(branching)}"
    )


def dealt(experiments: Sequence[Experiment]) -> Iterator[tuple[list[int], Timeline]]:
    """The data of rows among their clients: the numbers of the rows that have them, and who holds
    what in which round. Every dataset is loaded once, and every split dealt with one seed.

    Raises:
        ExperimentError: Data are missing, a split refuses them, or no score is there to rank by.
    """
    loads: dict[str, dict[str, list[int]]] = {}  # rows by dataset, and by everything that deals it
    for number, experiment in enumerate(experiments):
        of_split = digest([experiment.plain[name] for name in ("split", "events")])
        splits = loads.setdefault(digest(experiment.plain["dataset"]), {})
        splits.setdefault(of_split, []).append(number)
    for splits in loads.values():
        dataset: Dataset | None = None
        for numbers in splits.values():
            experiment = experiments[numbers[0]]
            dataset = dataset or load_dataset(experiment)
            if evaluation_of(experiment, dataset) != experiment.settings.evaluate:
                raise ExperimentError(
                    f"the targets of {dataset.name} are numbers, and rows of a sweep are ranked by "
                    "the first of evaluate.scores: name it, as in evaluate.scores=[mae]"
                )
            yield numbers, make_timeline(deal(experiment, dataset), experiment.settings.events)


def require_encoders(experiments: Sequence[Experiment]) -> None:
    """Refuse rows whose encoder is not trained yet if the images to train it on are missing."""
    for encoder in encoders_of(*(experiment.algorithm.build() for experiment in experiments)):
        encoder.require()


def _if_clusters_draw(branching: Sequence[Experiment]) -> str:
    """The condition for a prediction to hold, where clusters sample cohorts of their own."""
    if all(experiment.settings.participation == 1 for experiment in branching):
        return ""
    return " if clients end in one cluster (every cluster draws at least one client a round)"


def check_metric(space: Space, experiments: Sequence[Experiment]) -> None:
    """Refuse a metric that no row will have, before anything is trained.

    An algorithm of the user's own, named with a colon, may return metrics of its own.

    Raises:
        ExperimentError: The metric is unknown, or a search needs validation examples that nobody
            has.
    """
    metric = space.options.metric
    names = summary_names({s: None for e in experiments for s in e.settings.evaluate.score_columns})
    if metric not in names and not any(":" in e.algorithm.name for e in experiments):
        raise ExperimentError(f"unknown metric {metric!r}; known: {', '.join(names)}")
    has_validation = any(e.plain["split"].get("validation", True) for e in experiments)
    is_needed = space.is_scheduled or isinstance(space.options.search, OptunaSearch)
    if is_needed and "validation_" in metric and not has_validation:
        raise ExperimentError(
            f"the search goes by {metric}, but no client has validation examples: set "
            "split.validation=0.1, or name another metric"
        )


def predicted_steps(
    experiment: Experiment,
    timeline: Timeline,
    last: int | None = None,
    rounds: dict[str, list[int]] | None = None,
) -> int:
    """Client steps of a run, as its summary counts them, if its clients end in one cluster.

    Exact for FedAvg, since cohorts and batches follow from the seed. A method whose clusters draw
    cohorts of their own may take more or fewer after its clustering.

    Args:
        experiment: The experiment of the run.
        timeline: Who holds which examples in which round.
        last: The round up to which they are counted; None: the last one of the run.
        rounds: Steps of rounds that were counted for other rows with this timeline; those of
            further rounds are added.
    """
    settings, algorithm = experiment.settings, experiment.algorithm.build()
    last = settings.rounds if last is None else last
    key = digest([experiment.plain[name] for name in ("participation", "train", "seed")])
    counted_rounds = ({} if rounds is None else rounds).setdefault(key, [])
    for t in range(len(counted_rounds) + 1, last + 1):
        split = timeline.at(t)
        size = cohort_size(len(split.clients), settings.participation)
        cohort = sample_cohort(split.clients, size, settings.seed, t)
        steps = num_local_steps(split.num_train_examples[cohort], settings.train)
        counted_rounds.append(int(steps.sum()))
    total = sum(counted_rounds[:last])
    signature = getattr(getattr(algorithm, "clustering", None), "signature", None)
    if branches(experiment) and isinstance(signature, Update | Weights):  # trained by all
        split = timeline.at(max(algorithm.rounds_before, 1))
        epochs = getattr(signature, "epochs", None) or settings.train.epochs
        per_epoch = num_local_steps(split.num_train_examples[split.clients], settings.train)
        total += int(per_epoch.sum()) // settings.train.epochs * epochs
    return total
