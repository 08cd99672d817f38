"""`evaluate.clients`: a sample of clients stands for all of them, and its columns say so."""

import numpy as np
import pytest

from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.errors import ExperimentError
from flray.execution.cohort import sample_evaluated
from flray.measures.scores import ClientScores, sampling_errors
from flray.reports.comparison import sample_notes
from flray.reports.lines import round_line
from flray.reports.runs import read_run
from flray.runs.preparing import prepare

from scenarios import TINY, assert_same_run, run_experiment, without_seconds

PLAIN = override(TINY, ["rounds=3", "split.holdout=2", "evaluate.every=1"])


def run(tmp_path, *changes: str, **options):
    return run_experiment(parse_experiment(override(PLAIN, list(changes))), tmp_path, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sampled"), "evaluate.clients=2")


def test_a_sample_of_all_is_the_evaluation_of_all(whole, tmp_path) -> None:
    everybody = run(tmp_path, "evaluate.clients=100")
    new = [c for c in everybody.rounds if c not in whole.rounds]
    assert all(c == "clients_evaluated" or c.endswith("accuracy_se_sample") for c in new)
    assert len(new) > 1
    assert (everybody.rounds["accuracy_se_sample"] == 0).all()
    columns = list(without_seconds(whole.rounds))
    assert everybody.rounds[columns].equals(whole.rounds[columns])
    assert everybody.clients.equals(whole.clients)
    assert sample_notes({"tiny": [read_run(tmp_path, "tiny")]}) == []


def test_training_does_not_depend_on_the_sample(whole, sampled) -> None:
    assert sampled.summary["params_sha256"] == whole.summary["params_sha256"]
    assert sampled.rounds["train_loss"].equals(whole.rounds["train_loss"])


def test_so_many_clients_of_each_kind_are_scored(whole, sampled) -> None:
    """Two of those that train and two holdout clients; in the last round everybody."""
    test = sampled.clients[sampled.clients["part"] == "test"]
    of_round = {t: frame["client"].tolist() for t, frame in test.groupby("round")}
    assert len(of_round[1]) == len(of_round[2]) == 2 + 2
    everybody = whole.clients[(whole.clients["part"] == "test") & (whole.clients["round"] == 3)]
    assert of_round[3] == everybody["client"].tolist()
    assert sampled.rounds["clients_evaluated"].tolist() == [2, 2, whole.summary["clients"]]


def test_sampled_clients_have_the_scores_they_have_among_all(whole, sampled) -> None:
    keys = ["round", "part", "client"]
    both = sampled.clients.merge(whole.clients, on=keys, suffixes=("", "_whole"))
    assert len(both) == len(sampled.clients) > 0
    assert (both["accuracy"] == both["accuracy_whole"]).all()
    np.testing.assert_allclose(both["loss"], both["loss_whole"], rtol=1e-5)


def test_the_row_has_mean_and_error_of_the_sample(whole, sampled) -> None:
    """√((1 - n/N) s²/n) with the numbers of clients.parquet."""
    clients = whole.summary["clients"]
    training = prepare(parse_experiment(PLAIN)).payload.timeline.at(1).clients
    test = sampled.clients[sampled.clients["part"] == "test"]
    for t in (1, 2):
        accuracy = test[test["round"] == t].set_index("client")["accuracy"]
        values = accuracy.loc[sample_evaluated(0, t, training, 2)].to_numpy()
        row = sampled.rounds.set_index("round").loc[t]
        assert row["accuracy_mean"] == values.mean()
        error = np.sqrt((1 - 2 / clients) * values.var(ddof=1) / 2)
        assert row["accuracy_se_sample"] == pytest.approx(error)
    assert sampled.rounds["accuracy_se_sample"].iloc[-1] == 0


def test_a_resumed_run_samples_the_same_clients(sampled, tmp_path) -> None:
    stops = iter([True])
    run(tmp_path, "evaluate.clients=2", should_stop=lambda: next(stops, False))
    again = run(tmp_path, "evaluate.clients=2", resume=True)
    assert_same_run(again, sampled)


def test_the_last_round_may_be_a_sample_too(tmp_path) -> None:
    few = run(tmp_path, "evaluate.clients=2", "evaluate.clients_at_end=3", "rounds=1")
    assert few.summary["clients_evaluated"] == 3
    assert few.summary["accuracy_se_sample"] > 0
    (note,) = sample_notes({"tiny": [read_run(tmp_path, "tiny")]})
    assert "samples of 2 clients, the last one on 3 of" in note
    assert "standard error of the sample" in note
    line = round_line(few.rounds.to_dict("records")[0], 1)
    assert "±" in line
    assert "(sample of 3 clients)" in line


def test_means_of_samples_are_right_within_their_standard_errors() -> None:
    """Over 400 rounds: the mean is unbiased, and s. e.² is the variance of the means."""
    values = np.random.default_rng(0).integers(0, 11, 200)
    means, errors, drawn = [], [], np.zeros(200)
    for t in range(400):
        clients = sample_evaluated(3, t, np.arange(200), 100)
        total = np.full(100, 10)
        scores = ClientScores(clients, values[clients], total, np.zeros(100))
        means.append(scores.accuracy.mean())
        errors.append(sampling_errors(scores, 100, 200)["accuracy_se_sample"])
        drawn[clients] += 1
    truth = values.mean() / 10
    assert abs(np.mean(means) - truth) < 4 * np.mean(errors) / np.sqrt(400)
    assert np.var(means) == pytest.approx(np.square(errors).mean(), rel=0.25)
    # Whoever a client is, it is drawn in half of the rounds: 200 ± 10 of 400.
    assert np.abs(drawn - 200).max() < 4.5 * 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("evaluate.clients=0", "clients must be >= 1 or null, got 0"),
        ("evaluate.clients_at_end=5", "clients_at_end needs clients"),
    ],
)
def test_wrong_samples_are_refused(change, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        parse_experiment(override(PLAIN, [change]))
