"""The columns of rounds.parquet, clients.parquet and rows.parquet, and keys of summary.json.

Writers and readers take names from here; `docs/evaluation.md` explains each of them.

Names are composed: a prefix of EVALUATED says what models were evaluated on (`holdout_`, `tuned_`),
then come the score and its statistic over clients (`accuracy_mean`, `mae_worst`), then a
suffix, SE_CLIENTS for the standard error, AFTER for the round after the first clustering, AT_BEST
for the best round by validation: `tuned_accuracy_mean_after_clustering`. BYTES and CLUSTERING begin
the names of what was sent and of what was measured of a clustering.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """How tables and figures show a recorded number.

    >>> Column("sent up", "MB up", scale=1e-6, unit="MB").label
    'sent up (MB)'
    """

    title: str
    short: str = ""  # for tables in the terminal; "": the title
    scale: float = 1.0  # from what is recorded to what is shown
    unit: str = ""
    decimals: int = 2  # 0: a count, whose mean has one
    group: str = ""  # heading above several columns
    note: str = ""  # a sentence below tables with this column
    error: str = ""  # the column that holds its standard error in one run; "": none
    is_mean: bool = False  # a summary has the mean over clusterings, not the value of the last
    is_main: bool = False  # shown for each row of a sweep

    @property
    def label(self) -> str:
        """Title of an axis, with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


class ScoreColumn(str):
    """The name of a recorded column of a score: text that also knows the score.

    Tables and figures take title, unit and decimals of the column from it.
    """

    score: "ScoreColumns"

    def __new__(cls, name: str, score: "ScoreColumns") -> "ScoreColumn":
        column = super().__new__(cls, name)
        column.score = score
        return column

    def __getnewargs__(self) -> tuple[str, "ScoreColumns"]:  # type: ignore[override]  # of copies
        return str(self), self.score


@dataclass(frozen=True)
class ScoreColumns:
    """A score as a run records it: name, unit and direction, which name and order its columns.

    >>> mae = ScoreColumns("mae", "kW")
    >>> mae.mean, mae.column("worst", "holdout_"), mae.mode
    ('mae_mean', 'holdout_mae_worst', 'min')
    """

    name: str
    unit: str = ""  # %: recorded as a fraction, shown in percent
    higher_is_better: bool = False

    def column(self, statistic: str, prefix: str = "") -> ScoreColumn:
        """The column of a statistic over clients, one of STATISTICS; a prefix of EVALUATED."""
        return ScoreColumn(f"{prefix}{self.name}_{statistic}", self)

    @property
    def mean(self) -> ScoreColumn:
        """The mean over clients on their test parts, by which experiments are compared."""
        return self.column("mean")

    @property
    def validation(self) -> ScoreColumn:
        """The mean over clients on their validation parts, by which a sweep chooses."""
        return self.column("mean", "validation_")

    @property
    def title(self) -> str:
        """The name in words."""
        return self.name.replace("_", " ")

    @property
    def mode(self) -> str:
        """max if higher is better, else min."""
        return "max" if self.higher_is_better else "min"


# Statistics of a score over clients.
STATISTICS = ("mean", "se_clients", "variance", "worst", "worst_decile")
SE_SAMPLE = "se_sample"  # another one, where a sample of clients is evaluated

# What the meter of a federation counts while it trains.
CLIENT_STEPS = "client_steps"
FINE_TUNING_STEPS = "client_steps_fine_tuning"  # of FLT's encoder, a part of the client steps
CLIENT_STEPS_EVALUATION = "client_steps_evaluation"
CLIENTS_DROPPED = "clients_dropped"
GROUND_TRUTH_READS = "ground_truth_reads"
PLACING_BYTES = "placing_bytes_down"
# Holdout clients that trained or judged models in a round, which takes labels, to be placed.
HOLDOUT_LABELS_READ = "holdout_labels_read"

# rounds.parquet: a row for each round.
ROUND = "round"
COHORT_SIZE = "cohort_size"
TRAIN_LOSS = "train_loss"
CLUSTERS = "clusters"
ACCURACY_MEAN = "accuracy_mean"
SE_CLIENTS = "_se_clients"  # ends the standard error over clients
CLIENTS_REACHING_TARGET = "clients_reaching_target"
# With `evaluate.clients`: clients that may train and were evaluated
CLIENTS_EVALUATED = "clients_evaluated"
VALIDATION_ACCURACY_MEAN = "validation_accuracy_mean"
VALIDATION_LOSS_MEAN = "validation_loss_mean"
SECONDS = "seconds"
SECONDS_TRAIN = "seconds_train"
SECONDS_PROBE = "seconds_probe"
SECONDS_EVALUATE = "seconds_evaluate"
BYTES = "bytes_"  # begins what was sent
BYTES_UP = "bytes_up"  # total of a run; bytes_up_KIND are columns of a round
BYTES_DOWN = "bytes_down"
CLUSTERING = "clustering_"  # begins what was measured of a clustering
CLUSTERING_CLUSTERS = "clustering_clusters"
CLUSTERING_OVERLAPPING = "clustering_overlapping"

# Measures of a clustering: with CLUSTERING in front in rounds.parquet, without it in summary.json.
ARI = "ari"
NMI = "nmi"
PURITY = "purity"
OVERLAP_FP = "overlap_fp"  # FLIS, Fig. 3
OVERLAP_FN = "overlap_fn"
EQUAL_FP = "equal_fp"
EQUAL_FN = "equal_fn"
ERRORS = (OVERLAP_FP, OVERLAP_FN, EQUAL_FP, EQUAL_FN)
LABEL_CORRELATION = "label_correlation"  # REPA, Fig. 1
DRIFT_CORRELATION = "drift_correlation"
DATA_CORRELATION = "data_correlation"
CORRELATIONS = (LABEL_CORRELATION, DRIFT_CORRELATION, DATA_CORRELATION)
UNIFORMITY = "uniformity"  # REPA, Fig. 2
UNIFORMITY_RANDOM = "uniformity_random"
UNIFORMITY_LABELS = "uniformity_labels"
ROBUSTNESS = "robustness"  # REPA, Alg. 1
ROBUSTNESS_SE = "robustness_se"
ROBUSTNESS_CLIENTS = "robustness_clients"

# clients.parquet: a row for each client and evaluation, also with ROUND.
CLIENT = "client"
NAME = "name"  # of the client in the data, where they have one; beside the columns of the file
PART = "part"
CORRECT = "correct"
TOTAL = "total"
ACCURACY = "accuracy"
ACCURACY_COLUMNS = ScoreColumns(ACCURACY, "%", higher_is_better=True)
LOSS = "loss"
MODEL = "model"
GROUP = "group"
# All of them but those of scores
OF_CLIENTS = (ROUND, CLIENT, NAME, PART, CORRECT, TOTAL, LOSS, MODEL, GROUP)

# summary.json: numbers of the last round, and these.
ROUNDS = "rounds"
SEED = "seed"
# Name, unit and direction (max, min) of the first score, unless accuracy is the only one
SCORE = "score"
SCORE_UNIT = "score_unit"
SCORE_MODE = "score_mode"
CLUSTERS_OVERLAP = "clusters_overlap"
ROUND_AFTER_CLUSTERING = "round_after_clustering"
ROUNDS_TO_TARGET = "rounds_to_target"
USES_GROUND_TRUTH = "uses_ground_truth"
ENDED_BY = "ended_by"
BEST_ROUND = "best_round"
SPLIT_SHA256 = "split_sha256"
PARAMS_SHA256 = "params_sha256"
AFTER = "_after_clustering"  # ends numbers of the round after the first clustering
AT_BEST = "_at_best_round"  # ends numbers of the best round by validation

# rows.parquet: a row for each configuration of a sweep, with its settings and its summary.
ROW = "row"
STATUS = "status"
RUN = "run"
FOLDER = "folder"
ERROR = "error"
MERGE_PLACE = "merge_place"

# How the columns begin that hold the costs of a round.
COUNTED = (CLIENT_STEPS, CLIENTS_DROPPED, BYTES)

# What clients were evaluated on: how the columns begin, the part of clients.parquet, and whether
# they are of holdout clients.
EVALUATED = (
    ("", "test", False),
    ("holdout_", "test", True),
    ("validation_", "validation", False),
    ("global_", "global", False),
    ("global_holdout_", "global", True),
    ("tuned_", "tuned_test", False),
    ("tuned_holdout_", "tuned_test", True),
    ("tuned_validation_", "tuned_validation", False),
    ("tuned_global_", "tuned_global", False),
    ("tuned_global_holdout_", "tuned_global", True),
)


def score_column(key: str, scores: Iterable[ScoreColumns]) -> str:
    """A column, with its score if it is the column of one of these scores.

    >>> score_column("validation_mae_mean", [ScoreColumns("mae", "kW")]).score.unit
    'kW'
    """
    for score in scores:
        names = [score.column(name, prefix) for prefix, _, _ in EVALUATED for name in STATISTICS]
        if key.removesuffix(AFTER) in names:
            return ScoreColumn(key, score)
    return key


def is_taken(score: str, scores: Iterable[str]) -> bool:
    """True if columns of a score of this name would be, or begin like, those of something else.

    >>> names = ["accuracy", "loss", "holdout_accuracy", "seconds_late"]
    >>> [is_taken(name, names) for name in names]
    [False, True, True, True]
    """
    evaluated = {prefix + name for prefix, *_ in EVALUATED if prefix for name in (*scores, LOSS)}
    return score in OF_CLIENTS or score in evaluated or of_one_round(score)


def of_one_round(column: str) -> bool:
    """True for columns that mean something for a round and nothing for the run.

    A summary repeats the numbers of the last round, but not its costs.

    >>> [of_one_round(name) for name in ("seconds_train", "accuracy_mean")]
    [True, False]
    """
    costs = ("seconds", "bytes", PLACING_BYTES, CLIENT_STEPS, CLIENTS_DROPPED, "clients_skipped")
    reads = (GROUND_TRUTH_READS, HOLDOUT_LABELS_READ)
    return column.startswith((ROUND, COHORT_SIZE, "clustering", "logged_", *costs, *reads))
