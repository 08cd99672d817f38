"""Evaluation on the whole test set and after fine-tuning, beside what every run reports."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from flray.algorithms.local import LocalState
from flray.client.tasks import ClientsJob, PartScore, Train
from flray.data.pixels import place_examples
from flray.engines.loop import Loop
from flray.engines.training import plain_gradient
from flray.errors import ClientFailure, ExperimentError
from flray.execution.cluster import connected
from flray.execution.evaluating import tune_and_score
from flray.execution.federation import Cohort
from flray.models.bank import ModelBank, load_params, stack
from flray.randomness import torch_seed
from flray.runs.assemble import start_executor
from flray.runs.preparing import prepare
from flray.runs.rehearsal import describe
from flray.server.evaluation import score_globally
from flray.server.summary import last_trained_score

from scenarios import (
    assert_same_run,
    recorded,
    state_of,
    tiny_experiment,
    tiny_federation,
    without_seconds,
)

BOTH = ["evaluate.on=global", "evaluate.fine_tune={epochs: 2}"]
NEW = ("global_", "tuned_")  # how columns and parts of the protocols begin


def last_bank(result) -> ModelBank:
    state = state_of(result)
    if isinstance(state, LocalState):
        return state.models.bank(np.arange(len(state.models.block_of)))
    return state.bank


def rows_of(result, part: str) -> pd.DataFrame:
    """The rows of the last round, by client."""
    frame = result.clients[result.clients["part"] == part]
    return frame[frame["round"] == frame["round"].max()].set_index("client")


def judged(module, x, y) -> tuple[int, int, float]:
    """Hits, examples and mean loss of a module in evaluation mode."""
    with torch.no_grad():
        logits = module.eval()(x)
    return int((logits.argmax(1) == y).sum()), len(y), cross_entropy(logits, y).item()


def assert_scores(row, expected: tuple[int, int, float]) -> None:
    assert (row["correct"], row["total"]) == expected[:2]
    assert row["loss"] == pytest.approx(expected[2], rel=1e-4)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_fine_tuning_is_gradient_descent_on_the_clients_own_data(tiny_run, engine) -> None:
    """One batch holds all of a client's data: v <- 0.5 v + g, w <- w - 0.2 v, three times."""
    overrides = [
        *("train.batch_size=1000", "evaluate.on=global", f"execution.engine={engine}"),
        *("evaluate.fine_tune={epochs: 3, lr: 0.2}", "rounds=2"),
    ]
    result = tiny_run(*overrides)
    payload, bank = prepare(tiny_experiment(*overrides)).payload, last_bank(result)
    split = payload.timeline.at(2)
    examples = place_examples(payload.dataset, split, torch.device("cpu"), torch.float32)
    moved = 0
    for i in range(6):
        module = payload.module
        load_params(module, bank.row(int(bank.owner[i])))
        before = judged(module, *examples.batch(torch.from_numpy(split.test[i])))
        velocity = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        x, y = examples.batch(torch.from_numpy(split.train[i]))
        for _ in range(3):
            named = dict(module.named_parameters())
            gradients = torch.autograd.grad(cross_entropy(module(x), y), list(named.values()))
            for (name, p), g in zip(named.items(), gradients, strict=True):
                velocity[name] = 0.5 * velocity[name] + g
                p.data = p.data - 0.2 * velocity[name]
        test = judged(module, *examples.batch(torch.from_numpy(split.test[i])))
        assert_scores(rows_of(result, "tuned_test").loc[i], test)
        moved += test != before
        if len(split.validation[i]):
            own = judged(module, *examples.batch(torch.from_numpy(split.validation[i])))
            assert_scores(rows_of(result, "tuned_validation").loc[i], own)
        whole = judged(module, *examples.batch(torch.from_numpy(split.global_test)))
        assert_scores(rows_of(result, "tuned_global").loc[i], whole)
        assert whole[1] == 100
    assert moved == 6


def test_fine_tuning_trains_as_the_experiment_does_in_an_order_of_its_own(tiny_run) -> None:
    overrides = ["evaluate.fine_tune={epochs: 2}", "model.dropout=0.5", "execution.engine=loop"]
    result = tiny_run(*overrides)
    settings = tiny_experiment(*overrides).settings
    parts, bank = prepare(tiny_experiment(*overrides)), last_bank(result)
    host = start_executor(parts).host
    found = rows_of(result, "tuned_test")
    differing = 0
    for i in found.index:
        job = ClientsJob(np.array([i]), bank.owner[[i]])
        hits = []
        for seed in (torch_seed(host.seed, "fine-tune evaluation"), host.seed):
            task = Train(settings.train, plain_gradient, 4)
            block = task.block(replace(host, seed=seed), bank.params, job)
            engine = Loop(host.module, host.examples)
            tuned = engine.train(block, settings.train, plain_gradient)
            load_params(host.module, {name: leaf[0] for name, leaf in tuned.params.items()})
            ids = torch.from_numpy(parts.payload.timeline.at(4).test[i])
            hits.append(judged(host.module, *host.examples.batch(ids)))
        assert_scores(found.loc[i], hits[0])
        differing += hits[0] != hits[1]
    assert differing > 0


SPLITS = {
    "as dealt": "split.clients=6",
    "labels swapped": "split={name: label_swap, clients: 8}",
    "images rotated": "split={name: rotation, clients: 8}",
    "tested on their own": "split.test=own_split",
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_the_whole_test_set_is_judged_as_it_is_in_the_dataset(tiny_run, split) -> None:
    overrides = [split, "evaluate.on=global", "algorithm=local", "participation=1", "rounds=2"]
    result = tiny_run(*overrides)
    payload, bank = prepare(tiny_experiment(*overrides)).payload, last_bank(result)
    dataset = payload.dataset
    x = torch.from_numpy(dataset.images[dataset.test_ids]).float() / 255
    y = torch.from_numpy(dataset.labels[dataset.test_ids])
    found = rows_of(result, "global")
    assert len(found) == len(np.unique(bank.owner)) >= 6
    for i in found.index:
        load_params(payload.module, bank.row(int(bank.owner[i])))
        assert_scores(found.loc[i], judged(payload.module, x, y))
    mean = (found["correct"] / 100).mean()
    assert result.summary["global_accuracy_mean"] == pytest.approx(mean)
    binomial = np.sqrt(mean * (1 - mean) / 100)  # 100 images, however many clients
    assert result.summary["global_accuracy_se_binomial"] == pytest.approx(binomial)
    own = rows_of(result, "test")
    assert not np.array_equal(own["correct"] / own["total"], found["accuracy"])


def test_labels_changed_by_an_event_do_not_change_the_global_test_set(tiny_run) -> None:
    """Everybody swaps 0 and 1 in the last round: what a client learns is another task."""
    event = "events=[{round: 2, kind: relabel, clients: [0, 1, 2, 3, 4, 5], labels: [[0, 1]]}]"
    overrides = [event, "evaluate.on=global", "rounds=2"]
    result = tiny_run(*overrides)
    payload, bank = prepare(tiny_experiment(*overrides)).payload, last_bank(result)
    dataset = payload.dataset
    x = torch.from_numpy(dataset.images[dataset.test_ids]).float() / 255
    load_params(payload.module, bank.row(0))
    hits = judged(payload.module, x, torch.from_numpy(dataset.labels[dataset.test_ids]))
    assert_scores(rows_of(result, "global").loc[3], hits)


def test_a_model_that_several_clients_use_is_judged_once() -> None:
    fed, calls = recorded(tiny_federation())
    worse = {name: -leaf[0] for name, leaf in fed.initial.items()}
    bank = ModelBank(
        stack([{n: leaf[0] for n, leaf in fed.initial.items()}, worse]), np.arange(6) % 2
    )
    scores = score_globally(fed, bank, np.arange(1, 6), fed.timeline.at(1).global_test)
    ((jobs,), (answers,)) = calls[0].jobs, calls[0].outputs
    assert [(job.row, len(job.examples)) for job in jobs] == [(0, 100), (1, 100)]
    hits = [int(answer.correct.sum()) for answer in answers]
    assert hits[0] != hits[1]
    assert scores.clients.tolist() == [1, 2, 3, 4, 5]
    assert scores.correct.tolist() == [hits[i % 2] for i in range(1, 6)]


def test_tuned_models_stay_in_their_block() -> None:
    """Two at a time, and only numbers come back."""
    fed, calls = recorded(tiny_federation("execution.block=2"))
    tuned = tune_and_score(
        fed, fed.initial_bank(), Cohort(1, np.arange(5)), fed.training, ("test", "validation")
    )
    (call,) = calls
    assert [job.clients.tolist() for job in call.jobs] == [[0, 1], [2, 3], [4]]
    for by_part in (by_part for output in call.outputs for by_part in output):
        assert list(by_part) == ["test", "validation"]
        assert all(type(score) is PartScore for score in by_part.values())
        numbers = [n for s in by_part.values() for n in (s.correct, s.total, s.loss, *s.values)]
        assert {type(n) for n in numbers} == {int, float}
    assert list(tuned) == [0, 1, 2, 3, 4]


CASES = {
    "fedavg": [],
    "dropout": ["model.dropout=0.5"],
    "local": ["algorithm=local"],
    "flhc with holdout": ["algorithm=flhc", "algorithm.rounds_before=2", "split.holdout=2"],
}


@pytest.mark.parametrize(
    "more",
    [pytest.param(CASES[c], marks=[pytest.mark.long] * (c in ("fedavg", "local"))) for c in CASES],
    ids=CASES,
)
def test_what_is_trained_and_all_other_columns_do_not_depend_on_it(tiny_run, more) -> None:
    plain, judged_too = tiny_run(*more), tiny_run(*more, *BOTH)
    new = [key for key in judged_too.summary if key.startswith(NEW)]
    old = {key: value for key, value in judged_too.summary.items() if key not in new}
    assert {**old, "seconds": 0} == {**plain.summary, "seconds": 0}
    columns = list(without_seconds(plain.rounds))
    pd.testing.assert_frame_equal(judged_too.rounds[columns], plain.rounds[columns])
    added = set(judged_too.rounds) - set(plain.rounds)
    assert {name for name in added if not name.startswith(NEW)} == {"client_steps_evaluation"}
    own = judged_too.clients.query("part in ('test', 'validation')").reset_index(drop=True)
    pd.testing.assert_frame_equal(own, plain.clients)
    assert set(judged_too.clients["part"]) == {
        *("test", "validation", "global", "tuned_test", "tuned_validation", "tuned_global"),
    }


def test_columns_say_which_protocol_they_are_of(tiny_run) -> None:
    result = tiny_run(*BOTH, "split.holdout=2", "evaluate.target=0.3", "participation=1")
    prefixes = ["", "holdout_", "validation_", "global_", "global_holdout_", "tuned_"]
    prefixes += ["tuned_holdout_", "tuned_validation_", "tuned_global_", "tuned_global_holdout_"]
    parts = {"": "test", "validation_": "validation", "global_": "global"}
    held = tiny_experiment("split.holdout=2")
    holdout = held.split.build().split(held.dataset.build().load(), 0).holdout
    for prefix in prefixes:
        part = parts[prefix.removeprefix("tuned_").replace("holdout_", "")]
        rows = rows_of(result, f"tuned_{part}" if prefix.startswith("tuned_") else part)
        is_holdout = rows.index.isin(holdout)
        wanted = rows[is_holdout if "holdout_" in prefix else ~is_holdout]
        found = result.summary[f"{prefix}accuracy_mean"]
        assert found == pytest.approx(wanted["accuracy"].mean())
        reaching = (wanted["accuracy"] >= 0.3).mean()
        assert result.summary[f"{prefix}clients_reaching_target"] == reaching
    tuned = result.summary["tuned_accuracy_mean"], result.summary["tuned_holdout_accuracy_mean"]
    assert tuned != (result.summary["accuracy_mean"], result.summary["holdout_accuracy_mean"])


def test_steps_of_the_evaluation_are_counted_apart(tiny_run) -> None:
    """45 training examples are 5 batches of at most 10; 5 epochs of all 6 clients, every round."""
    split = "split={name: iid, clients: 6, samples_per_client: 50, validation: 0.1}"
    result = tiny_run(split, "evaluate={every: 2, fine_tune: {epochs: 5}}")
    steps = result.rounds.set_index("round")["client_steps_evaluation"]
    assert steps.dropna().to_dict() == {2: 6 * 5 * 5, 4: 6 * 5 * 5}
    assert result.summary["client_steps"] == 4 * 3 * 2 * 5
    assert "client_steps_evaluation" not in result.summary
    tuned = result.rounds.set_index("round")["tuned_accuracy_mean"]
    assert tuned.notna().tolist() == [False, True, False, True]


def test_resuming_gives_the_same_columns(tiny_run, tmp_path) -> None:
    whole = tiny_run(*BOTH)
    for part in range(2):
        tiny_run(*BOTH, out=tmp_path / "parts", resume=part > 0, should_stop=lambda: True)
    rest = tiny_run(*BOTH, out=tmp_path / "parts", resume=True)
    assert_same_run(rest, whole)


def test_absent_clients_are_not_tuned(tiny_run) -> None:
    result = tiny_run(*BOTH, "events=[{round: 2, kind: leave, clients: [0, 4]}]", "rounds=2")
    for part in ("global", "tuned_test", "tuned_global"):
        rows = result.clients[result.clients["part"] == part]
        scored = rows.groupby("round")["client"].apply(list)
        assert scored.to_dict() == {1: [0, 1, 2, 3, 4, 5], 2: [1, 2, 3, 5]}


def test_a_client_whose_tuned_model_diverges_is_named_or_dropped(tiny_run, known_run) -> None:
    diverging = ["evaluate.fine_tune={epochs: 2, lr: 1e30}", "rounds=2"]
    with pytest.raises(
        ClientFailure, match=r"round 1 client 0 failed.*lower evaluate.fine_tune.lr"
    ):
        tiny_run(*diverging)
    result = tiny_run(*diverging, "on_client_failure=drop")
    assert result.rounds["clients_dropped_evaluation"].tolist() == [6, 6]
    assert result.rounds["client_steps_evaluation"].tolist() == [0, 0]
    assert result.summary["clients_dropped"] == 0  # of training
    assert "clients_dropped_evaluation" not in result.summary  # which is of a round
    assert "tuned_accuracy_mean" not in result.rounds
    assert result.summary["params_sha256"] == known_run("rounds=2").summary["params_sha256"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.fine_tune={epochs: 0}"], "evaluate.fine_tune: epochs must be >= 1, got 0"),
        (["evaluate.fine_tune={lr: 0.1}"], "missing key 'evaluate.fine_tune.epochs'"),
        (["evaluate.fine_tune={epochs: 1, lr: 0}"], "evaluate.fine_tune: lr must be > 0"),
        (["evaluate.on=everything"], "evaluate.on must be one of local, global"),
        (
            [
                "evaluate.fine_tune={epochs: 1, lr: 0.1}",
                "train.optimizer=module",
                "train.momentum=0",
            ],
            "evaluate.fine_tune.lr does nothing with train.optimizer=module",
        ),
    ],
)
def test_wrong_protocols_are_refused(overrides, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny_experiment(*overrides)


def test_a_dataset_without_test_images_has_no_global_test_set() -> None:
    without = ["dataset.num_test=0", "split.test=own_split", "evaluate.on=global"]
    assert "4 rounds of fedavg" in describe(tiny_experiment(*without, "evaluate.on=local"))
    with pytest.raises(ExperimentError, match=r"evaluate.on=global needs test images .*synthetic"):
        describe(tiny_experiment(*without))


@pytest.mark.long
def test_client_actors_give_the_same_columns(tiny_run) -> None:
    more = [*BOTH, "split.holdout=1", "execution.block=2", "rounds=2"]
    actors = ["execution.executor=ray", "execution.actors={count: 2, num_cpus: 0.1}"]
    alone = tiny_run(*more)
    with connected():
        spread = tiny_run(*more, *actors)
    assert_same_run(spread, alone)


class TestLastTrained:
    """FLIS judges a client by the model it trained last; before its first time, the initial one."""

    ON = ("evaluate.last_trained=true", "rounds=4", "evaluate.every=1", "evaluate.target=0.1")

    def test_clients_that_train_alone_use_what_they_trained_last(self, tiny_run) -> None:
        """In every round, though half of the clients are heard in each."""
        result = tiny_run("algorithm=local", *self.ON, "participation=0.5")
        course = last_trained_score(result.clients, "accuracy").reindex(
            [1, 2, 3, 4], method="ffill"
        )
        np.testing.assert_allclose(course, result.rounds["accuracy_mean"], rtol=1e-12)
        assert course.nunique() > 2
        last = result.summary["last_trained_accuracy_mean"]
        assert last == pytest.approx(result.summary["accuracy_mean"])
        reached = result.summary["rounds_to_target"]
        assert reached >= 1
        assert result.summary["last_trained_rounds_to_target"] == reached

    @pytest.mark.parametrize("name", ["ditto", "pfedme"])
    def test_of_two_trainings_in_a_round_the_last_counts(self, tiny_run, name) -> None:
        """Both train a global model, and then the personal one that clients use."""
        result = tiny_run(f"algorithm={name}", *self.ON, "participation=1")
        course = last_trained_score(result.clients, "accuracy")[1:]
        np.testing.assert_allclose(course, result.rounds["accuracy_mean"], rtol=1e-12)
        assert course.nunique() > 2

    def test_it_changes_nothing_else(self, tiny_run) -> None:
        on, off = tiny_run("algorithm=fedavg", *self.ON), tiny_run("algorithm=fedavg", *self.ON[1:])
        for key in ("params_sha256", "accuracy_mean", "bytes_up", "client_steps"):
            assert on.summary[key] == off.summary[key]
        assert on.summary["last_trained_accuracy_mean"] != on.summary["accuracy_mean"]
        assert not any(key.startswith("last_trained") for key in off.summary)

    def test_megabits_are_those_of_each_client_until_the_target(self, tiny_run) -> None:
        """A model down and one up in each round for half of six clients, 32 bits a parameter."""
        result = tiny_run("algorithm=fedavg", *self.ON, "participation=0.5")
        when = result.summary["last_trained_rounds_to_target"]
        assert when >= 1
        num_params = 64 * 16 + 16 + 16 * 10 + 10
        expected = when * 0.5 * 2 * num_params * 32 / 1e6
        assert result.summary["last_trained_megabits_to_target"] == pytest.approx(expected)

    def test_holdout_clients_get_nothing_and_do_not_count_for_megabits(self, tiny_run) -> None:
        """All four of six clients that may train do so in every round."""
        result = tiny_run("algorithm=fedavg", *self.ON, "participation=1", "split.holdout=2")
        num_params = 64 * 16 + 16 + 16 * 10 + 10
        expected = result.summary["last_trained_rounds_to_target"] * 2 * num_params * 32 / 1e6
        assert result.summary["last_trained_megabits_to_target"] == pytest.approx(expected)

    def test_the_pass_of_flis_hc_counts_for_megabits_and_for_no_client(self, tiny_run) -> None:
        hc = tiny_run("algorithm=flis_hc", "split.server=30", *self.ON, "participation=0.5")
        of_round_0 = hc.clients[(hc.clients["part"] == "last_trained") & (hc.clients["round"] == 0)]
        assert len(of_round_0) == 6
        fedavg = tiny_run("algorithm=fedavg", "split.server=30", *self.ON, "participation=0.5")
        same = fedavg.clients.query("part == 'last_trained' and round == 0")["accuracy"]
        assert of_round_0["accuracy"].tolist() == same.tolist()
        num_params = 64 * 16 + 16 + 16 * 10 + 10
        models = hc.summary["last_trained_rounds_to_target"] * 0.5 * 2 * num_params * 32 / 1e6
        assert hc.summary["last_trained_model_megabits_to_target"] == pytest.approx(models)
        # The pass sends a model to each client and has one back.
        every = models + 2 * num_params * 32 / 1e6
        assert hc.summary["last_trained_megabits_to_target"] == pytest.approx(every)

    def test_training_for_a_signature_is_not_judged(self, tiny_run) -> None:
        """WD clusters after round 2 by a training of everybody; three of six are heard in it."""
        wd = "algorithm={name: wd, rounds_before: 2}"
        number = "algorithm.clustering.partition.number=2"
        result = tiny_run(wd, number, *self.ON, "participation=0.5")
        judged = result.clients.query("part == 'last_trained' and round == 2")
        assert len(judged) == 3
