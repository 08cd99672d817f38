"""The federation as an algorithm sees it: clients, their sizes, and questions to them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from flray.client.host import Host
from flray.client.tasks import (
    ClientLosses,
    ClientsJob,
    ExampleLosses,
    Judge,
    JudgedPart,
    Predict,
    PredictionKind,
    Train,
    is_finite,
)
from flray.columns import (
    CLIENT_STEPS,
    CLIENTS_DROPPED,
    GROUND_TRUTH_READS,
    HOLDOUT_LABELS_READ,
    PLACING_BYTES,
)
from flray.data.dataset import Ids
from flray.data.split import Split
from flray.engines.engine import BlockResult
from flray.engines.training import Gradient, Training
from flray.errors import ClientFailure, ExperimentError, is_gpu_full
from flray.execution.answers import Judgement, Predictions
from flray.execution.asking import ask
from flray.execution.cohort import Cohort, nobody, sample_cohort, sample_evaluated
from flray.execution.executor import Executor, Failed, Output
from flray.execution.meter import Meter
from flray.execution.population import Population
from flray.execution.trained import Trained, TrainedModels
from flray.models.bank import ModelBank, Params
from flray.models.fixed_point import WeightArray
from flray.models.mixing import (
    Aggregation,
    ClientModels,
    MixingRow,
    Models,
    Relation,
    Weighted,
    mix,
    rows_of_clients,
)
from flray.models.server_optimizers import ServerStep

__all__ = [
    "GROUND_TRUTH",
    "TEST_DATA",
    "Cohort",
    "Federation",
    "Judgement",
    "Meter",
    "OnClientFailure",
    "Oracle",
    "Predictions",
    "Share",
    "nobody",
    "sample_cohort",
]

GROUND_TRUTH = "ground truth (labels or groups a real server never sees)"
TEST_DATA = "the test data of clients"

FEWEST_BLOCKS = 16  # of a question to very many clients, so that many hosts share the work

OnClientFailure = Literal["raise", "drop"]


@dataclass(frozen=True)
class Oracle:
    """Ground truth, for methods that declare its use; a real server would not have it.

    Reached through `Federation.oracle`, which counts every access.
    """

    split: Split

    def label_counts(self, clients: Ids) -> Ids:
        """(K, labels) how many training examples of each label each of the clients holds."""
        return self.split.label_counts(clients)

    def groups(self, clients: Ids) -> Ids:
        """(K,) the group of each of the clients."""
        assert self.split.groups is not None  # `require` of a stage that reads them
        return self.split.groups[clients]


@dataclass(frozen=True)
class Share:
    """The clients that this run trains, where other runs of a sweep train the others.

    Algorithms sample, mix and count as if all of the cohort had answered.
    """

    clients: Ids  # clients that train here
    after: int  # all clients are evaluated here up to this round, later only `clients`
    trained: list[Trained] = field(default_factory=list)  # trainings since the list was cleared


@dataclass(frozen=True, kw_only=True)
class Federation(Population):
    """The clients of a round, and everything that an algorithm can ask them for.

    `init`, `cohort`, `round` and `deploy` of an algorithm receive the federation of their round:

    - Who is there: `clients`, `holdout`, `changed`, `num_examples`; who takes part: `sample`,
      `sample_clusters`.
    - First models: `initial_bank`, `initial_models`.
    - Work of clients: `train` (local training), `judge` and
      `example_losses` (losses of models on the clients' data),
      `predict` (models on public examples), `map` and `chain` (any other task).
    - Means at the server: `average` (train and mix), `mix`, `mix_rows`.
    - Costs: `count_models`, `count_placing`, `meter`.
    - Needs: `require_public`, `require_example_losses`, `require_ground_truth`; ground truth
      itself is `oracle`.

    Arrays over all clients have shape (M,) and are indexed by client id. Arrays over a cohort have
    shape (K,) and follow its clients, which are in ascending order. Answers depend on seed, round,
    clients and models, never on the executor, the number of actors or the order of arrival. With
    `on_client_failure: drop`, clients that fail are missing in the answers and counted.

    Four clients train a small network in this process, and the server averages their models:

    >>> from flray.client.host import HostSettings, start_host
    >>> from flray.data.datasets.synthetic import Synthetic
    >>> from flray.data.events import make_timeline
    >>> from flray.data.splits.iid import Iid
    >>> from flray.engines.training import plain_gradient
    >>> from flray.execution.executor import Inline
    >>> from flray.models.bank import params_of, stack
    >>> from flray.models.mlp200 import Mlp200
    >>> dataset = Synthetic(num_train=80, num_test=20, size=8).load()
    >>> timeline = make_timeline(Iid(clients=4).split(dataset, seed=0), ())
    >>> module = Mlp200(dataset.image_shape, num_classes=10, hidden=5)
    >>> settings = HostSettings("loop", "cpu", torch.float32, block=2, threads=1, seed=0)
    >>> fed = Federation(
    ...     timeline=timeline,
    ...     initial=stack([params_of(module)]),
    ...     executor=Inline(start_host(module, dataset, timeline, settings)),
    ...     training=Training(lr=0.1),
    ...     aggregation=Aggregation(),
    ...     participation=0.5,
    ...     block=2,
    ...     seed=0,
    ... )
    >>> bank = fed.initial_bank()
    >>> cohort = Cohort(t=1, clients=fed.sample(1, fed.clients))
    >>> trained = fed.train(bank, cohort, plain_gradient)
    >>> len(trained.clients), [leaf.shape[0] for leaf in trained.params.values()]  # K models
    (2, [2, 2, 2, 2])
    >>> after = fed.mix(Relation.joint(fed.num_clients), trained, bank)
    >>> after.num_rows, after.owner  # one model, which all M clients use
    (1, array([0, 0, 0, 0]))
    >>> fed.meter.counts["client_steps"] == int(trained.num_steps.sum())
    True
    """

    initial: Params  # the model that every client starts from, leaves (1, ...)
    executor: Executor
    training: Training  # of round t; `during` gives that of another round
    aggregation: Aggregation
    block: int  # clients per job
    on_client_failure: OnClientFailure = "raise"
    uses_ground_truth: bool = False  # the experiment allows `oracle`
    has_example_losses: bool = True  # the module defines example_losses
    input_shape: tuple[int, ...] | None = None  # shape of an example; None: not known
    draw: Callable[[int], Params] | None = None  # initial model number n >= 1; 0 is `initial`
    buffers: frozenset[str] = frozenset()  # leaves that no gradient reaches: BatchNorm statistics
    meter: Meter = field(default_factory=Meter)  # costs, shared by the federations of all rounds
    on_trained: Callable[[Trained], None] | None = None  # called after training, not for probes
    share: Share | None = None  # None: all clients train here
    scheduled: Training | None = None  # of all rounds; None: `training`

    def during(self, t: int) -> Self:
        """The same clients in round t, with the learning rate of that round."""
        scheduled = self.scheduled or self.training
        return replace(self, t=t, training=scheduled.at(t), scheduled=scheduled)

    def at_rate_of(self, t: int) -> Self:
        """The clients as they are now, who train with the learning rate of round t."""
        return replace(self, training=(self.scheduled or self.training).at(t))

    def scored(self, number: float | None = None) -> Ids:
        """The clients whose models are evaluated: those that may train, and holdout clients.

        Args:
            number: of both so many are drawn from the seed and the round. None: all.
        """
        clients = sample_evaluated(self.seed, self.t, self.clients, number)
        holdout = sample_evaluated(self.seed, self.t, self.holdout, number)
        present = np.union1d(clients, holdout)
        if self.share is None or self.t <= self.share.after:
            return present
        return np.intersect1d(present, self.share.clients)

    @property
    def oracle(self) -> Oracle:
        """Ground truth, if the experiment allows it. Accesses are counted, which marks the run."""
        self._read_ground_truth(GROUND_TRUTH)
        return Oracle(self._split)

    def groups(self, clients: Ids) -> Ids:
        """(K,) the group of each client; planted groups are ground truth, known ones are not."""
        oracle = Oracle(self._split) if self._split.knows_groups else self.oracle
        return oracle.groups(clients)

    def _read_ground_truth(self, what: str) -> None:
        self.require_ground_truth(what)
        self.meter.counts[GROUND_TRUTH_READS] += 1

    def require_ground_truth(self, what: str) -> None:
        """Refuse an experiment that does not allow `what` to be read."""
        if not self.uses_ground_truth:
            raise ExperimentError(
                f"this method reads {what}; say `uses_ground_truth: true` in the experiment, whose "
                "results are marked, or choose an option that does without"
            )

    def require_example_losses(self) -> None:
        """Refuse a module that does not give the loss of each example."""
        if not self.has_example_losses:
            raise ExperimentError(
                "clients of this method choose among models by their losses: the model must define "
                "example_losses(batch) -> (B,)"
            )

    def require_public(self) -> None:
        """Refuse an experiment whose server has no public examples."""
        if not len(self._split.server):
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

    def weights(self, clients: Ids | None = None) -> NDArray[np.float64]:
        """(K,) how much each of these clients counts in a mean: n_k, or 1; None: all M clients."""
        num = self.num_examples if clients is None else self.num_examples[clients]
        return np.ones(len(num)) if self.aggregation.weights == "uniform" else num.astype(float)

    def learned(self, params: Params) -> Params:
        """The leaves that gradients reach: all but statistics of BatchNorm."""
        return {name: leaf for name, leaf in params.items() if name not in self.buffers}

    def train(
        self,
        bank: ModelBank,
        cohort: Cohort,
        gradient: Gradient,
        memo: Params | None = None,
        *,
        shared: Params | None = None,
        training: Training | None = None,
        weights: Sequence[NDArray[np.float64]] = (),
        rounds: Sequence[tuple[int, ...]] = (),
    ) -> Trained:
        """Local training of the cohort, each client from its row of the bank.

        Returns the clients that answered, ascending, and their models; the bank is unchanged. The
        bank may have leaves beside the module's, which move along what `gradient` returns for them.

        Args:
            gradient: what the optimiser of a client steps along, `plain_gradient` for SGD.
            memo: read by the gradient, leaves (K, ...) with a row for each client of the cohort.
            shared: read by the gradient as part of its memo, leaves (...) without a client axis,
                the same for all clients; sent once.
            training: instead of the experiment's own; `fed.training.only(names)` for some leaves.
            weights: of each client of the cohort (n_k,), a weight q of each of its training
                examples: the loss of a batch is Σ q ℓ / B. By default all are 1.
            rounds: of each client of the cohort, the rounds whose data it trains on. By default
                the data that it holds now.
        """
        training, is_probe = training or self.training, cohort.is_probe
        start = bank.owner[cohort.clients]
        job = ClientsJob(cohort.clients, start, memo or {}, tuple(weights), tuple(rounds))
        if self.share is not None:
            job = job.part(np.flatnonzero(np.isin(cohort.clients, self.share.clients)))
        self._count_labels_read(job.clients)
        if bank.num_rows > len(job.clients):  # send only the rows that the cohort uses
            bank = bank.of_some(job.clients)
            job = replace(job, rows=bank.owner[job.clients])
        kept = self.executor.trainings_kept
        task = Train(training, gradient, cohort.t, is_probe, shared or {}, num_kept=kept)
        with self.meter.phase("probe" if is_probe else "train"):
            done, failed = ask(self.executor, task, bank.params, self._blocks(job, self.block))
        failed |= not_finite(done)
        self._decide(failed, cohort.t, job.clients)
        trained = self._joined(task, bank.params, done, failed)
        if self.on_trained is not None and not is_probe:
            self.on_trained(trained)
        if self.share is not None:
            self.share.trained.append(trained)
        return trained

    def _blocks(self, job: ClientsJob, largest: int) -> list[ClientsJob]:
        """The job in blocks of `execution.block`, larger ones where that leaves enough of them."""
        size = max(self.block, min(largest, len(job.clients) // FEWEST_BLOCKS))
        return job.in_parts(self.executor.clients_per_job or size)

    def _joined(
        self,
        task: Train,
        bank: Params,
        done: list[tuple[ClientsJob, BlockResult]],
        failed: Collection[int],
    ) -> Trained:
        """What came back of the clients that did not fail; models stay where they are."""
        ids = np.concatenate([nobody(), *(job.clients for job, _ in done)])
        answered = np.flatnonzero(~np.isin(ids, list(failed)))
        losses = np.concatenate([[], *(result.loss for _, result in done)])
        models = TrainedModels(self.executor, task, bank, done, index=answered)
        rounds = [of_client for job, _ in done for of_client in job.rounds]
        num_steps = self.num_steps(ids, task.training, rounds)[answered]
        self.meter.note_logged([result.logged for _, result in done])
        self.meter.counts[CLIENT_STEPS] += int(num_steps.sum())
        return Trained(ids[answered], models, losses[answered], num_steps)

    def judge(self, bank: ModelBank, cohort: Cohort, part: JudgedPart) -> Judgement:
        """Loss and accuracy of every model of the bank on each client's own part.

        Clients without examples of that part have NaN. With `on_client_failure: drop`, clients
        that fail are left out. Test examples need the permission `uses_ground_truth`.

        Args:
            bank: U models, all of which are sent to each client.
            part: `train`, `validation` or `test`.
        """
        self._count_labels_read(cohort.clients)
        if part == "test":
            self._read_ground_truth(TEST_DATA)
        with self.meter.phase("judge"):
            answers = self.map(Judge(part, cohort.t), cohort, bank.params)
        values = np.array(list(answers.values())).reshape(len(answers), 2, bank.num_rows)
        return Judgement(np.array(list(answers), np.int64), values[:, 0], values[:, 1])

    def example_losses(self, bank: ModelBank, cohort: Cohort) -> dict[int, ClientLosses]:
        """The losses of every model of the bank on each training example of the clients.

        They stay with the clients: what a method sends of them, it counts itself. With
        `on_client_failure: drop`, clients that fail are missing in the answer.
        """
        self._count_labels_read(cohort.clients)
        with self.meter.phase("judge"):
            return self.map(ExampleLosses(cohort.t), cohort, bank.params)

    def _count_labels_read(self, clients: Ids) -> None:
        if num := int(np.isin(clients, self.holdout).sum()):
            self.meter.counts[HOLDOUT_LABELS_READ] += num

    def predict(self, models: Params, cohort: Cohort, kind: PredictionKind) -> Predictions:
        """Predictions of each client's model on the public examples of the server.

        The server computes them with models that clients have sent before, so no transfer is
        counted. With `on_client_failure: drop`, clients whose models fail are left out.

        Args:
            models: leaves (K, ...), a model of each client of the cohort.
        """
        self.require_public()
        rows = np.arange(len(cohort.clients))
        with self.meter.phase("predict"):
            answers = self.map(Predict(kind, cohort.t), cohort, models, rows=rows)
        values = torch.stack(list(answers.values())) if answers else torch.empty(0, 0, 0)
        return Predictions(np.array(list(answers), np.int64), values)

    def map(
        self,
        task: Callable[[Host, Params, ClientsJob], Sequence[Output | Exception]],
        cohort: Cohort,
        params: Params | None = None,
        *,
        rows: Ids | None = None,
        dropped: str = CLIENTS_DROPPED,
    ) -> dict[int, Output]:
        """The output of the task for each client of the cohort, in ascending order of clients.

        With `on_client_failure: drop`, clients that fail are missing in the answer.

        Args:
            task: called on a host with (host, params, job), returns an output per client of the
                job. An output that is an exception is a failure of that client. A task whose
                `clients_at_once` is above `execution.block` gets jobs of up to so many clients.
            params: sent once, not once per job.
            rows: (K,) the row of `params` that each client uses, for tasks that read `job.rows`.
            dropped: count of the meter for the clients that failed.
        """
        job = ClientsJob(cohort.clients, nobody() if rows is None else rows)
        largest = getattr(task, "clients_at_once", self.block)
        done, failed = ask(self.executor, task, params or {}, self._blocks(job, largest))
        answers: dict[int, Output] = {}
        for block, outputs in done:
            for i, output in zip(block.clients.tolist(), outputs, strict=True):
                if isinstance(output, Exception):
                    failed[i] = Failed(output)
                else:
                    answers[i] = output
        self._decide(failed, cohort.t, cohort.clients, dropped)
        return answers

    def chain(
        self,
        task: Callable[[Host, Params, ClientsJob], tuple[Sequence[Output], Params]],
        t: int,
        clients: Ids,
        carried: Params,
    ) -> tuple[dict[int, Output], Params]:
        """Run an inherently serial task, client after client in the order given.

        Returns the outputs by client, and what the last client handed on. What is handed on travels
        from client to client, so any host may run any of them. With `on_client_failure: drop`, the
        chain goes on past a failing client with what it was handed.

        Args:
            task: called on a host with (host, carried, job of one client), returns the outputs of
                the job, one, and what the next client receives.
            carried: what the first client receives.
        """
        answers: dict[int, Output] = {}
        for job in ClientsJob(clients).alone():
            done, failed = ask(self.executor, task, carried, [job])
            self._decide(failed, t, clients)
            for _, ((output,), handed_on) in done:
                answers[int(job.clients[0])], carried = output, handed_on
        return dict(sorted(answers.items())), carried

    def _decide(
        self, failed: dict[int, Failed], t: int, asked: Ids, column: str = CLIENTS_DROPPED
    ) -> None:
        """Stop if clients failed, or go on without them and count them.

        A full GPU is no client's failure: who is left out would depend on what else runs there.
        """
        if not failed:
            return
        full = [k for k, client in failed.items() if is_gpu_full(client.error)]
        if self.on_client_failure == "drop" and not full:
            self.meter.counts[column] += len(failed)
            return
        first = min(full or failed)
        remedy = "set on_client_failure=drop to go on without such clients"
        if len(failed) == len(asked) > 1:
            remedy = "where everybody fails, the cause is the model, its training or the data"
        if full:
            remedy = "the cause is the GPU, not a client"
        named = ", ".join(map(str, sorted(failed)[:10])) + (", ..." if len(failed) > 10 else "")
        raise ClientFailure(
            f"in round {t} client {first} failed: {failed[first].reason} "
            f"({len(failed)} of {len(asked)} clients failed: {named}); {remedy}"
        ) from failed[first].error

    def average(
        self, relation: Relation, bank: ModelBank, cohort: Cohort, gradient: Gradient
    ) -> tuple[ModelBank, Trained]:
        """A round of averaging: send models, let the cohort train, mix what comes back.

        Returns each client's new model, the mean of those it hears, and what was trained. Counts
        the models that are sent.

        Args:
            relation: who hears whom, `Relation.joint(fed.num_clients)` for FedAvg.
        """
        trained = self.train(bank, cohort, gradient)
        self.count_models(bank, cohort, trained)
        return self.mix(relation, trained, bank), trained

    def count_models(self, bank: ModelBank, cohort: Cohort, trained: Trained) -> None:
        """Count a model sent to each client of the cohort, and one received from each heard."""
        down = len(cohort.clients)
        # With a share, the clients that other runs train count as if they had answered.
        up = len(trained.clients) if self.share is None else down
        size = bank.bytes_per_model
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
        """The bank after averaging, W' = A X + B W.

        Each client's model becomes the mean of the models of those it hears, weighted by n_k. A
        client that hears nobody who trained keeps its model. Clients that hear alike share a row;
        with an optimiser of the server those that also had the same model.

        Args:
            relation: who hears whom, `Relation.of_clusters(labels)` for averages in clusters.
            bank: the models before the round, W.
        """
        for owners in (relation.row_of_client, relation.column_of_client):
            if len(owners) != self.num_clients:
                raise ExperimentError(
                    f"the relation of a mean must be of each of {self.num_clients} clients, got "
                    f"{len(owners)}; make it of all clients, whoever is in the cohort"
                )
        with self.meter.phase("mix"):
            weighted = self._weighted(relation.strengths, trained.clients, bank)
            rows, owner = rows_of_clients(relation, weighted, bank, self.aggregation)
            return replace(self.aggregated(rows, trained.models, bank), owner=owner)

    def mix_rows(
        self, hears: WeightArray, trained: Trained | ClientModels, bank: ModelBank
    ) -> ModelBank:
        """The bank whose row u is the mean of the clients it hears, with strength hears[u, j] n_j.

        A row that hears nobody keeps its model, whether a client uses it or not; who uses which
        row stays as it is.

        Args:
            hears: (U, M) strengths >= 0, of which only the ratios within a row count.
        """
        with self.meter.phase("mix"):
            weighted = self._weighted(lambda clients: hears[:, clients], trained.clients, bank)
            rows = [weighted.row(u, u, self.aggregation) for u in range(len(hears))]
            return self.aggregated(rows, trained.models, bank)

    def aggregated(self, rows: Sequence[MixingRow], trained: Models, bank: ModelBank) -> ModelBank:
        """W' = A X + B W, moved on by the server's optimiser where the experiment has one.

        Every mean of models goes through here. Who uses which row is left to the caller.
        """
        mixed = mix(rows, trained, bank.params)
        if not self.aggregation.has_optimizer:
            return replace(bank, params=mixed)
        move = ServerStep(self.aggregation.optimizer, self.aggregation.server_lr, self.buffers)
        return move(mixed, bank, [(row.previous, len(row.heard) > 0) for row in rows])

    def _weighted(
        self, strengths: Callable[[Ids], WeightArray], heard: Ids, bank: ModelBank
    ) -> Weighted:
        """Strengths (V, K) of clients times n_k or 1, 0 for clients that may not train."""

        def times_n(clients: Ids) -> WeightArray:
            is_there = np.isin(clients, self.clients)
            return strengths(clients) * np.where(is_there, self.weights(clients), 0.0)

        return Weighted.of(times_n, heard, bank, self.aggregation.unheard)


def not_finite(done: Sequence[tuple[ClientsJob, BlockResult]]) -> dict[int, Failed]:
    """The clients whose loss or weights are not finite, as failures."""
    error = FloatingPointError("its loss or weights became NaN or infinite; lower train.lr")
    return {int(i): Failed(error) for job, result in done for i in job.clients[~is_finite(result)]}
