"""The federation as an algorithm sees it: clients, their sizes, and tasks to run on them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flray.client.host import Host
from flray.client.keeping import ExpectedSums, KeptBlock, TrainAndKeep, kept_block
from flray.client.scoring import ExampleScores, ScoreJob
from flray.client.tasks import (
    ClientsJob,
    Judge,
    JudgedPart,
    PartScore,
    Predict,
    PredictionKind,
    Score,
    Train,
    TrainJob,
    TuneAndScore,
)
from flray.columns import (
    CLIENT_STEPS,
    CLIENT_STEPS_EVALUATION,
    CLIENTS_DROPPED,
    GROUND_TRUTH_READS,
    HOLDOUT_LABELS_READ,
    PLACING_BYTES,
)
from flray.data.dataset import Ids
from flray.data.dealing import whole_share
from flray.data.events import Timeline
from flray.data.split import Part, Split
from flray.engines.plan import num_local_steps
from flray.engines.training import Gradient, Training
from flray.errors import ClientFailure, ExperimentError
from flray.execution.attempts import not_finite, run_isolating_failures
from flray.execution.executor import Executor, Failed, Output
from flray.execution.trained import Blocks, HeldBlocks, HostedBlocks, Trained, TrainedModels
from flray.models.bank import ModelBank, Params
from flray.models.fixed_point import Weights
from flray.models.mixing import (
    Aggregation,
    ClientModels,
    Relation,
    expected_terms,
    mix,
    mix_bank,
    mixing_rows,
    rows_of_clients,
)
from flray.randomness import generator

# Examples that one host scores at a time: few enough for many hosts, unless there are very many.
SCORE_TOGETHER, MOST_TOGETHER = 5000, 50_000
SCORE_GROUPS = 16
# Of sums that hosts send with their training: more would be much to send where they are not used.
EXPECTED_SUMS_BYTES = 4 << 20

GROUND_TRUTH = "ground truth (labels or groups a real server never sees)"
TEST_DATA = "the test data of clients"

OnClientFailure = Literal["raise", "drop"]

DIVERGED_IN_TUNING = (
    "its loss or weights became NaN or infinite in the fine-tuning of the evaluation; "
    "lower evaluate.fine_tune.lr"
)


@dataclass(frozen=True)
class Cohort:
    """The clients that are asked in round t.

    What comes back for a cohort of K clients has K rows, in the order of `clients`.

    >>> cohort = Cohort(t=3, clients=np.array([1, 4]))
    >>> cohort.t, len(cohort.clients)
    (3, 2)
    """

    t: int  # Round, counted from 1
    clients: Ids  # (K,) ids in ascending order
    # True for training that only serves a signature: it is not part of the round, and its batches
    # come in another random order
    is_probe: bool = False


@dataclass(frozen=True)
class Judgement:
    """Loss and accuracy of U models on the data of K clients, as `Federation.judge` returns them.

    Row k belongs to clients[k], column u to row u of the judged bank.

    >>> loss, accuracy = np.array([[2.0, 1.0]]), np.array([[0.7, 0.6]])
    >>> judgement = Judgement(np.array([4]), loss, accuracy)
    >>> judgement.best, judgement.most_accurate  # client 4: model 1 by loss, model 0 by accuracy
    (array([1]), array([0]))
    """

    clients: Ids  # (K,) ascending
    loss: NDArray[np.float64]  # (K, U) mean over the client's examples; NaN if it has none
    accuracy: NDArray[np.float64]  # (K, U) share of the client's examples, likewise

    @property
    def best(self) -> Ids:
        """(K,) the model with the least loss, the first of equals; -1 where all are NaN.

        >>> loss = np.array([[2.0, 1.0], [np.nan, np.nan]])
        >>> Judgement(np.array([4, 9]), loss, loss).best
        array([ 1, -1])
        """
        least: Ids = np.nan_to_num(self.loss, nan=np.inf).argmin(1)
        return np.where(np.isnan(self.loss).all(1), -1, least)

    @property
    def most_accurate(self) -> Ids:
        """(K,) the model with the highest accuracy, the first of equals; -1 where all are NaN."""
        most: Ids = np.nan_to_num(self.accuracy, nan=-1.0).argmax(1)
        return np.where(np.isnan(self.accuracy).all(1), -1, most)


@dataclass(frozen=True)
class Predictions:
    """Predictions of K clients' models on the R public examples of the server.

    >>> hard = torch.eye(3)[torch.tensor([[0, 2], [1, 2]])]  # 2 models, 2 examples, 3 classes
    >>> Predictions(np.array([0, 5]), hard).values.argmax(2).tolist()
    [[0, 2], [1, 2]]
    """

    clients: Ids  # (K,) ascending
    values: Tensor  # B (K, R, classes): one-hot rows or class probabilities


@dataclass
class Meter:
    """Costs of a round: bytes by kind, steps, failures, reads of ground truth, seconds by phase.

    Algorithms and signatures add to it; the server reads and resets it after each round, and every
    count becomes a column of the round's row.

    >>> meter = Meter()
    >>> meter.count_transfer("model", down=8, up=4)
    >>> meter.read_and_reset(), meter.read_and_reset()
    ({'bytes_down_model': 8, 'bytes_up_model': 4}, {})
    """

    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    logged: dict[str, list[float]] = field(default_factory=dict)  # by name, a value a client

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to the column `seconds_<name>`."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - begin

    def count_transfer(self, kind: str, down: int = 0, up: int = 0) -> None:
        """Bytes a real system would have sent to clients (down) and received from them (up)."""
        self.counts[f"bytes_down_{kind}"] += down
        self.counts[f"bytes_up_{kind}"] += up

    def note_logged(self, blocks: Sequence[Mapping[str, NDArray[np.float64]]]) -> None:
        """Keep what modules logged, a value a client; NaN: it logged none of this name."""
        for name in dict.fromkeys(name for block in blocks for name in block):
            values = np.concatenate([block[name] for block in blocks if name in block])
            self.logged.setdefault(name, []).extend(values[~np.isnan(values)].tolist())

    def read_and_reset(self) -> dict[str, float]:
        """The columns of the round so far; counting starts again at zero."""
        row: dict[str, float] = dict(self.counts)
        row |= {f"seconds_{name}": value for name, value in self.seconds.items()}
        row |= {f"logged_{n}": float(np.mean(v)) for n, v in self.logged.items() if v}
        self.counts.clear()
        self.seconds.clear()
        self.logged.clear()
        return row


def nobody() -> Ids:
    """(0,) no client ids."""
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Oracle:
    """Ground truth, for methods that declare its use; a real server would not have it.

    Reached through `Federation.oracle`, which counts every access.
    """

    split: Split

    def label_counts(self, clients: Ids) -> Ids:
        """(K, labels) how many training examples of each label each of the clients holds."""
        return self.split.label_counts(clients)


@dataclass(frozen=True)
class Federation:
    """The clients of a round, and everything that an algorithm can ask them for.

    `init`, `cohort`, `round` and `deploy` of an algorithm receive the federation of their round:

    - Who is there: `clients`, `holdout`, `changed`, `num_examples`; who takes part: `sample`,
      `sample_clusters`.
    - First models: `initial_bank`, `initial_models`.
    - Work of clients: `train` (local training), `judge` (losses of models on the clients' data),
      `predict` (models on public examples), `map` and `chain` (any other task).
    - Means at the server: `average` (train and mix), `mix`, `mix_rows`.
    - Costs: `count_models`, `count_placing`, `meter`.
    - Needs: `require_public`, `require_example_losses`, `require_ground_truth`; ground truth
      itself is `oracle`.

    Arrays over all clients have shape (M,) and are indexed by client id. Arrays over a cohort have
    shape (K,) and follow its clients, which are in ascending order. Answers depend on seed, round,
    clients and models, never on the executor, the number of actors or the order of arrival. With
    `on_client_failure: drop`, clients that fail are missing in the answers and counted.

    >>> fed = Federation(
    ...     clients=np.array([0, 1, 3]),  # client 2 is a holdout client
    ...     num_clients=4,
    ...     num_examples=np.array([5, 10, 20, 5]),
    ...     initial={"w": torch.zeros(1, 2)},
    ...     executor=None,  # no client is asked below
    ...     training=Training(),
    ...     aggregation=Aggregation(),
    ...     participation=0.67,
    ...     block=10,
    ...     seed=0,
    ...     holdout=np.array([2]),
    ... )
    >>> fed.cohort_size, len(fed.sample(1, fed.clients))
    (2, 2)
    >>> fed.initial_bank().owner, fed.weights()
    (array([0, 0, 0, 0]), array([ 5., 10., 20.,  5.]))
    """

    clients: Ids  # (K,) clients that may train in this round, ascending
    num_clients: int  # M, holdout and absent clients included
    num_examples: Ids  # (M,) n_k, number of training examples
    initial: Params  # the model that every client starts from, leaves (1, ...)
    executor: Executor
    training: Training
    aggregation: Aggregation
    participation: float  # ρ, the share of clients in a cohort
    block: int  # clients per job
    seed: int
    on_client_failure: OnClientFailure = "raise"
    holdout: Ids = field(default_factory=nobody)  # clients that are present but never train
    changed: Ids = field(default_factory=nobody)  # clients that joined or got other data in round t
    num_public: int = 0  # public examples of the server
    has_example_losses: bool = True  # the module defines example_losses
    ground_truth: Oracle | None = None  # None: the experiment does not allow it
    t: int = 1  # the round whose clients and data these are
    draw: Callable[[int], Params] | None = None  # initial model number n >= 1; 0 is `initial`
    meter: Meter = field(default_factory=Meter)
    buffers: frozenset[str] = frozenset()  # leaves that no gradient reaches: BatchNorm statistics
    on_trained: Callable[["Trained"], None] | None = None  # called after training, not for probes
    # Exponents of the last sums, by leaf: the next ones are mostly equal. They change no result.
    last_exponents: dict[str, Ids] = field(default_factory=dict)
    expected: ExpectedSums | None = None  # sums that hosts may send with the next training

    def during(self, timeline: Timeline, t: int) -> "Federation":
        """The same federation as it is in round t."""
        split = timeline.at(t)
        return replace(
            self,
            clients=split.clients,
            holdout=np.setdiff1d(split.holdout, split.absent),
            changed=timeline.changed(t),
            num_examples=split.num_train_examples,
            ground_truth=Oracle(split) if self.ground_truth else None,
            t=t,
        )

    def scored(self) -> Ids:
        """The clients whose models are evaluated: those that may train, and holdout clients."""
        return np.union1d(self.clients, self.holdout)

    @property
    def oracle(self) -> Oracle:
        """Ground truth, if the experiment allows it. Accesses are counted, which marks the run."""
        return self._ground_truth(GROUND_TRUTH)

    def _ground_truth(self, what: str) -> Oracle:
        self.require_ground_truth(what)
        assert self.ground_truth is not None
        self.meter.counts[GROUND_TRUTH_READS] += 1
        return self.ground_truth

    def require_ground_truth(self, what: str) -> None:
        """Refuse an experiment that does not allow `what` to be read."""
        if self.ground_truth is None:
            raise ExperimentError(
                f"this method reads {what}; say `uses_ground_truth: true` in the experiment, whose "
                "results are marked, or choose an option that does without"
            )

    def require_example_losses(self) -> None:
        """Refuse a module that does not tell the loss of each example."""
        if not self.has_example_losses:
            raise ExperimentError(
                "clients of this method choose among models by their losses: the model must define "
                "example_losses(batch) -> (B,)"
            )

    def require_public(self) -> None:
        """Refuse an experiment whose server has no public examples."""
        if not self.num_public:
            raise ExperimentError(
                "this method compares models on public examples of the server, and there are none; "
                "set split.server, 2500 in FLIS"
            )

    def initial_bank(self) -> ModelBank:
        """The bank in which all M clients use the initial model."""
        return ModelBank(self.initial, np.zeros(self.num_clients, dtype=np.int64))

    def initial_models(self, number: int) -> Params:
        """Models drawn independently, leaves (number, ...); the first is `initial`."""
        if number > 1 and self.draw is None:
            raise ExperimentError(f"{number} initial models were asked for and only one was given")
        others = [self.draw(n) for n in range(1, number)] if self.draw else []
        return {
            name: torch.cat([leaf, *(model[name][None].to(leaf) for model in others)])
            for name, leaf in self.initial.items()
        }

    def generator(self, purpose: str, *where: int) -> np.random.Generator:
        """Random numbers that depend on the seed, `purpose` and `where` (a round, a client) alone.

        An algorithm draws from nothing else, so that resumed and distributed runs repeat it.
        """
        return generator(self.seed, purpose, *where)

    def sample(self, t: int, members: Ids, size: int | None = None) -> Ids:
        """A cohort of `size` of the members, at most all of them; of no members nobody is drawn.

        Args:
            size: number of clients, by default max(rho |members|, 1).
        """
        if size is None:
            size = cohort_size(len(members), self.participation)
        return sample_cohort(members, size, self.seed, t)

    def sample_clusters(self, t: int, labels: Ids, size: int | None = None) -> Ids:
        """A sample of each cluster; labels (M,) of all clients, of which -1 are in none.

        Args:
            size: number of clients of each cluster, by default max(rho |cluster|, 1).
        """
        present = labels[self.clients]
        clusters = [self.clients[present == c] for c in np.unique(present[present >= 0])]
        cohorts = [self.sample(t, members, size) for members in clusters]
        return np.sort(np.concatenate([nobody(), *cohorts]))

    @property
    def cohort_size(self) -> int:
        """max(rho K, 1), where K is the number of clients that may train."""
        return cohort_size(len(self.clients), self.participation)

    def weights(self) -> NDArray[np.float64]:
        """(M,) how much each client counts in a mean: n_k, or 1."""
        uniform = self.aggregation.weights == "uniform"
        return np.ones(self.num_clients) if uniform else self.num_examples.astype(np.float64)

    def train(
        self,
        bank: ModelBank,
        cohort: Cohort,
        gradient: Gradient,
        memo: Params | None = None,
        *,
        shared: Params | None = None,
        training: Training | None = None,
    ) -> Trained:
        """Local training of the cohort, each client from its row of the bank.

        Returns the clients that answered, ascending, and their models; the bank is unchanged.

        Args:
            gradient: what the optimiser of a client steps along, `plain_gradient` for SGD.
            memo: read by the gradient, leaves (K, ...) with a row for each client of the cohort.
            shared: read by the gradient as part of its memo, leaves (...) without a client axis,
                the same for all clients; sent once.
            training: instead of the experiment's own.
        """
        memo, training = memo or {}, training or self.training
        self._count_labels_read(cohort)
        if bank.num_rows > len(cohort.clients):
            bank = bank.of_some(cohort.clients)  # what is sent follows the cohort
        size = self.executor.clients_per_job or self.block
        jobs = [
            TrainJob(
                cohort.clients[part],
                bank.owner[cohort.clients[part]],
                {name: leaf[part] for name, leaf in memo.items()},
            )
            for part in _slices(len(cohort.clients), size)
        ]
        task = Train(training, gradient, cohort.t, cohort.is_probe, shared or {})
        with self.meter.phase("probe" if cohort.is_probe else "train"):
            done, failed, blocks = self._run_blocks(task, bank.params, jobs)
        failed |= not_finite(done)
        if failed:
            self._decide(failed, cohort.t, cohort.clients)
        clients = np.setdiff1d(cohort.clients, list(failed))
        trained = self._joined(done, clients, blocks, training)
        self.meter.counts[CLIENT_STEPS] += int(trained.num_steps.sum())
        if self.on_trained is not None and not cohort.is_probe:
            self.on_trained(trained)
        return trained

    def _run_blocks(
        self, task: Train, bank: Params, jobs: Sequence[TrainJob]
    ) -> tuple[list[tuple[TrainJob, KeptBlock]], dict[int, Failed], Blocks]:
        """Train the blocks; their models stay where they were trained."""
        if self.executor.trainings_kept:
            expected = None if task.is_probe else self.expected
            keeping = TrainAndKeep(task, self.executor.trainings_kept, expected=expected)
            kept, failed = run_isolating_failures(self.executor, keeping, bank, jobs)
            blocks = HostedBlocks(
                self.executor,
                keeping,
                bank,
                jobs=[job for job, _ in kept],
                places=[block.place for _, block in kept],
                sums=[block.sums for _, block in kept],
                last_exponents=self.last_exponents,
            )
            return kept, failed, blocks
        done, failed = run_isolating_failures(self.executor, task, bank, jobs)
        kept = [(job, kept_block(result)) for job, result in done]
        return kept, failed, HeldBlocks([result.params for _, result in done])

    def judge(self, bank: ModelBank, cohort: Cohort, part: JudgedPart) -> "Judgement":
        """Loss and accuracy of every model of the bank on each client's own part.

        Clients without examples of that part have NaN. With `on_client_failure: drop`, clients
        that fail are left out. Test examples need the permission `uses_ground_truth`.
        """
        self._count_labels_read(cohort)
        if part == "test":
            self._ground_truth(TEST_DATA)
        with self.meter.phase("judge"):
            answers = self.map(Judge(part, cohort.t), cohort, bank.params)
        shape = len(answers), bank.num_rows
        return Judgement(
            clients=np.array(list(answers), dtype=np.int64),
            loss=np.array([answer.loss for answer in answers.values()]).reshape(shape),
            accuracy=np.array([answer.accuracy for answer in answers.values()]).reshape(shape),
        )

    def _count_labels_read(self, cohort: Cohort) -> None:
        if num := int(np.isin(cohort.clients, self.holdout).sum()):
            self.meter.counts[HOLDOUT_LABELS_READ] += num

    def predict(self, models: Params, cohort: Cohort, kind: PredictionKind) -> Predictions:
        """Predictions of each client's model on the public examples of the server.

        The server computes them with models that clients have sent before, so no transfer is
        counted. With `on_client_failure: drop`, clients whose models fail are left out.

        Args:
            models: leaves (K, ...), a model of each client of the cohort.
        """
        self.require_public()
        size = self.executor.clients_per_job or self.block
        rows = np.arange(len(cohort.clients))
        jobs = [TrainJob(cohort.clients[part], rows[part]) for part in _slices(len(rows), size)]
        with self.meter.phase("predict"):
            done, failed = run_isolating_failures(
                self.executor, Predict(kind, cohort.t), models, jobs
            )
        if failed:
            self._decide(failed, cohort.t, cohort.clients)
        answers = {
            int(i): values
            for job, outputs in done
            for i, values in zip(job.clients, outputs, strict=True)
        }
        clients = np.array(sorted(answers), np.int64)
        predictions = [answers[i] for i in clients.tolist()]
        return Predictions(
            clients, torch.stack(predictions) if predictions else torch.empty(0, 0, 0)
        )

    def score(self, bank: ModelBank, jobs: Sequence[ScoreJob]) -> list[ExampleScores]:
        """The scores of each job, in their order; jobs that follow each other are sent together."""
        groups = _grouped(jobs)
        outputs = self.executor.map(Score(), bank.params, groups)
        for _ in range(self.executor.retries):
            again = [k for k, output in enumerate(outputs) if isinstance(output, Failed)]
            if not again:
                break
            repeated = self.executor.map(Score(), bank.params, [groups[k] for k in again])
            for k, output in zip(again, repeated, strict=True):
                outputs[k] = output
        scores: list[ExampleScores] = []
        for output in outputs:
            if isinstance(output, Failed):
                raise ClientFailure(f"evaluation failed: {output.reason}") from output.error
            scores.extend(output)
        return scores

    def tune_and_score(
        self, bank: ModelBank, cohort: Cohort, tuning: Training, parts: tuple[Part, ...]
    ) -> dict[int, dict[Part, PartScore]]:
        """Scores of each client's model after training on the client's own data, by client.

        The tuned models do not leave their hosts. What it costs is not counted as training, but in
        `client_steps_evaluation`. With `on_client_failure: drop`, clients that fail are missing in
        the answer and counted in `clients_dropped_evaluation`.
        """
        size = self.executor.clients_per_job or self.block
        clients = [cohort.clients[part] for part in _slices(len(cohort.clients), size)]
        jobs = [TrainJob(part, bank.owner[part]) for part in clients]
        task = TuneAndScore(tuning, cohort.t, parts)
        done, failed = run_isolating_failures(self.executor, task, bank.params, jobs)
        scores: dict[int, dict[Part, PartScore]] = {}
        for job, outputs in done:
            for i, part_scores in zip(map(int, job.clients), outputs, strict=True):
                if part_scores is None:
                    failed[i] = Failed(FloatingPointError(DIVERGED_IN_TUNING))
                else:
                    scores[i] = part_scores
        if failed:
            self._decide(failed, cohort.t, cohort.clients, "clients_dropped_evaluation")
        steps = num_local_steps(self.num_examples[sorted(scores)], tuning)
        self.meter.counts[CLIENT_STEPS_EVALUATION] += int(steps.sum())
        return dict(sorted(scores.items()))

    def average(
        self, relation: Relation, bank: ModelBank, cohort: Cohort, gradient: Gradient
    ) -> tuple[ModelBank, Trained]:
        """A round of averaging: send models, let the cohort train, mix what comes back.

        Returns each client's new model, the mean of those it hears, and what was trained.
        """
        expected = self.expected_sums(relation, bank, cohort)
        trained = replace(self, expected=expected).train(bank, cohort, gradient)
        self.count_models(bank, cohort, trained)
        return self.mix(relation, trained, bank), trained

    def expected_sums(
        self, relation: Relation, bank: ModelBank, cohort: Cohort
    ) -> ExpectedSums | None:
        """What mixing will ask hosts for if all clients answer and no model outgrows its scale.

        None where models do not stay with hosts, or the sums are large.
        """
        if not self.last_exponents or not len(cohort.clients):
            return None
        if len(relation.rows) * bank.bytes_per_model > EXPECTED_SUMS_BYTES:
            return None
        rows, _ = rows_of_clients(self._weighted(relation), cohort.clients, bank, self.aggregation)
        terms = expected_terms(rows, dict(self.last_exponents))
        return None if terms is None else ExpectedSums(cohort.clients, terms)

    def count_models(self, bank: ModelBank, cohort: Cohort, trained: Trained) -> None:
        """Count a model sent to each client of the cohort, and one received from each heard."""
        down = len(cohort.clients)
        size = bank.bytes_per_model
        up = len(trained.clients)
        self.meter.count_transfer("model", down=down * size, up=up * size)

    def count_placing(self, bank: ModelBank, clients: Ids) -> None:
        """Count all models of the bank sent to each holdout client of `clients`, which chooses.

        Holdout clients choose whenever models are evaluated, so this is what they would cost if
        they came now: a column of its own, not part of `bytes_down`.
        """
        num = len(np.intersect1d(clients, self.holdout))
        if num:
            self.meter.counts[PLACING_BYTES] += num * bank.num_rows * bank.bytes_per_model

    def mix(self, relation: Relation, trained: Trained, bank: ModelBank) -> ModelBank:
        """The bank after averaging, W' = A X + B W: each client's model becomes the mean of the
        models of those it hears, weighted by n_k.

        A client that hears nobody who trained keeps its model.
        """
        with self.meter.phase("mix"):
            weighted = self._weighted(relation)
            return mix_bank(weighted, trained.clients, trained.models, bank, self.aggregation)

    def _weighted(self, relation: Relation) -> Relation:
        """The relation with strengths multiplied by n_j, 0 for clients that may not train."""
        return Relation(relation.rows * self._mixing_weights(), relation.of)

    def mix_rows(
        self, hears: Weights, trained: Trained | ClientModels, bank: ModelBank
    ) -> ModelBank:
        """The bank whose row u is the mean of the clients it hears, with strength hears[u, j] n_j.

        A row that hears nobody keeps its model, whether a client uses it or not; who uses which
        row stays as it is.
        """
        with self.meter.phase("mix"):
            weighted = hears * self._mixing_weights()
            rows = mixing_rows(weighted, trained.clients, bank, self.aggregation)
            return replace(bank, params=mix(rows, trained.models, bank.params))

    def _mixing_weights(self) -> Weights:
        """(M,) n_k or 1 of the clients that may train, 0 for the others."""
        counts = np.zeros(self.num_clients)
        counts[self.clients] = self.weights()[self.clients]
        return counts

    def map(
        self,
        task: Callable[[Host, Params, ClientsJob], Sequence[Output]],
        cohort: Cohort,
        params: Params | None = None,
    ) -> dict[int, Output]:
        """The output of the task for each client of the cohort, in ascending order of clients.

        With `on_client_failure: drop`, clients that fail are missing in the answer.

        Args:
            task: called on a host with (host, params, job), returns an output per client of the
                job.
            params: sent once, not once per job.
        """
        size = self.executor.clients_per_job or self.block
        jobs = [ClientsJob(cohort.clients[part]) for part in _slices(len(cohort.clients), size)]
        done, failed = run_isolating_failures(self.executor, task, params or {}, jobs)
        if failed:
            self._decide(failed, cohort.t, cohort.clients)
        answers = {
            int(i): output
            for job, outputs in done
            for i, output in zip(job.clients, outputs, strict=True)
        }
        return dict(sorted(answers.items()))

    def chain(
        self,
        task: Callable[[Host, Params, ClientsJob], tuple[Sequence[Output], Params]],
        t: int,
        clients: Ids,
        carried: Params,
    ) -> tuple[dict[int, Output], Params]:
        """Run an inherently serial task, client after client in the order given.

        What the task hands on travels from block to block, so any host may run any of them. With
        `on_client_failure: drop`, the chain goes on past a failing client with what it was handed.
        """
        answers: dict[int, Output] = {}
        for part in _slices(len(clients), self.block):
            waiting = [ClientsJob(clients[part])]
            while waiting:
                job = waiting.pop(0)
                done, failed = run_isolating_failures(self.executor, task, carried, [job])
                if len(done) == 1 and len(job.clients) == len(done[0][0].clients):
                    outputs, carried = done[0][1]
                    answers |= zip((int(i) for i in job.clients), outputs, strict=True)
                elif len(job.clients) > 1:
                    waiting = job.alone() + waiting  # singles that ran did so out of turn: again
                else:
                    self._decide(failed, t, clients)
        return dict(sorted(answers.items())), carried

    def _decide(
        self, failed: dict[int, Failed], t: int, asked: Ids, counter: str = CLIENTS_DROPPED
    ) -> None:
        """Stop, or go on without the clients that failed and count them."""
        first = min(failed)
        if self.on_client_failure == "raise":
            remedy = "set on_client_failure=drop to go on without such clients"
            if len(failed) == len(asked) > 1:
                remedy = "where everybody fails, the cause is the model, its training or the data"
            raise ClientFailure(
                f"in round {t} client {first} failed: {failed[first].reason} "
                f"({len(failed)} of {len(asked)} clients failed: {sorted(failed)[:10]}); {remedy}"
            ) from failed[first].error
        self.meter.counts[counter] += len(failed)

    def _joined(
        self,
        done: Sequence[tuple[TrainJob, KeptBlock]],
        clients: Ids,
        blocks: Blocks,
        training: Training,
    ) -> Trained:
        """What came back of the clients, in their order; models stay in their blocks."""
        ids = np.concatenate([nobody(), *(job.clients for job, _ in done)])
        sizes = [len(job.clients) for job, _ in done]
        order = np.argsort(ids, kind="stable")
        order = order[np.isin(ids[order], clients)]
        models = TrainedModels(
            blocks,
            block=np.repeat(np.arange(len(done)), sizes)[order],
            slot=np.concatenate([nobody(), *map(np.arange, sizes)])[order],
            largest={
                name: np.concatenate([np.empty(0), *(kept.largest[name] for _, kept in done)])[
                    order
                ]
                for name in self.initial
            },
            nobody={name: leaf[:0] for name, leaf in self.initial.items()},
        )
        self.meter.note_logged([kept.logged for _, kept in done])
        return Trained(
            clients=clients,
            models=models,
            loss=np.concatenate([np.empty(0), *(kept.loss for _, kept in done)])[order],
            num_steps=num_local_steps(self.num_examples[clients], training),
        )


def sample_cohort(members: Ids, size: int, seed: int, t: int) -> Ids:
    """At most `size` members that take part in round t, keyed by it and the smallest member."""
    if not len(members):
        return members
    rng = generator(seed, "cohort", t, int(members.min()))
    return np.sort(rng.choice(members, min(size, len(members)), replace=False))


def cohort_size(num_clients: int, participation: float) -> int:
    """How many of the clients take part in a round: max(rho K, 1), rounded down."""
    return max(whole_share(num_clients, participation), 1)


def _grouped(jobs: Sequence[ScoreJob]) -> list[list[ScoreJob]]:
    """Consecutive jobs with a limit on their examples, or one that has more."""
    all_examples = sum(len(job.examples) for job in jobs)
    most = min(max(SCORE_TOGETHER, all_examples // SCORE_GROUPS), MOST_TOGETHER)
    groups: list[list[ScoreJob]] = []
    total = 0
    for job in jobs:
        total += len(job.examples)
        if not groups or total > most:
            groups.append([])
            total = len(job.examples)
        groups[-1].append(job)
    return groups


def _slices(length: int, size: int) -> list[slice]:
    """
    >>> _slices(5, 3)
    [slice(0, 3, None), slice(3, 6, None)]
    """
    return [slice(start, start + size) for start in range(0, length, size)]
