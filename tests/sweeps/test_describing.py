"""What is known of a sweep before anything has trained."""

import pytest

from flray.config.overrides import THRESHOLD
from flray.data.datasets.synthetic import Synthetic
from flray.errors import ExperimentError
from flray.sweeps import describing
from flray.sweeps.describing import describe_space, planned_rows
from flray.sweeps.driver import run_sweep
from flray.sweeps.space import parse_space

from scenarios import TINY

FLHC = {**TINY, "algorithm": "flhc", "rounds": 3}


def described(varied, **more) -> str:
    space = parse_space({"experiment": FLHC, "space": varied, **more})
    return describe_space(space, planned_rows(space))


def test_a_space_is_described_without_training() -> None:
    """FedAvg's first rounds depend on the seed and on nothing that comes after them."""
    varied = {"algorithm.rounds_before": [1, 2], THRESHOLD: {"between_merges": 2}}
    fedavg = {"baseline": {"algorithm": "fedavg"}}
    text = described({**varied, "seed": [0, 1]}, **fedavg)
    assert text.startswith("10 rows: 8 from 2 prefixes of FedAvg, 2 without one")
    assert "client steps if clients end in one cluster" in text
    one = described({"algorithm.rounds_before": 1})
    assert one.startswith("1 row: 1 from 1 prefix of FedAvg, 0 without one")
    optuna = {"search": {"name": "optuna", "samples": 4}, **fedavg}
    text = described({**varied, "seeds": 2}, **optuna)
    assert text.startswith("8 rows suggested by Optuna and 2 baselines")


def test_rows_share_rounds_up_to_the_same_clustering() -> None:
    """Clustered after 1 and 2 of 3 rounds of everybody: one row of three trains what comes before,
    a pass of everybody included."""
    split = {"name": "iid", "clients": 6, "samples_per_client": 50, "validation": 0}
    experiment = {**FLHC, "split": split, "participation": 1.0}
    varied = {"algorithm.rounds_before": [1, 2], THRESHOLD: [0.5, 1.0, 2.0]}
    plain = {"experiment": experiment, "space": varied, "baseline": {"algorithm": "fedavg"}}
    rows = planned_rows(parse_space(plain))
    steps = 6 * 2 * 5  # of everybody in a round, or in a pass
    assert sorted(rows.steps) == [3 * steps] + [4 * steps] * 6
    assert sorted(rows.shared) == [0] * 3 + [2 * steps] * 2 + [3 * steps] * 2
    assert (rows.num_rows, rows.one_by_one, rows.at_most) == (7, 27 * steps, 17 * steps)
    optuna = plain | {"search": {"name": "optuna", "samples": 9}, "metric": "clusters"}
    assert planned_rows(parse_space(optuna)).num_rows == 1 + 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric": "accuracy"}, "unknown metric 'accuracy'; known: accuracy_mean, "),
        (
            {"split": {**TINY["split"], "validation": 0}, "scheduler": "asha"},
            "goes by validation_accuracy_mean, but no client has validation examples",
        ),
    ],
)
def test_a_metric_that_no_row_will_have_is_refused_before_anything_trains(
    tmp_path, given, message
) -> None:
    given = dict(given)
    experiment = {**TINY, "split": given.pop("split", TINY["split"])}
    space = parse_space({"experiment": experiment, "space": {"seed": [0, 1]}, **given})
    with pytest.raises(ExperimentError, match=message):
        run_sweep(space, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_row_whose_encoder_cannot_be_trained_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path))
    signature = {"encoder": {"dataset": "emnist", "model": "conv_ae"}}
    flt = {"name": "flt", "clustering": {"signature": signature}}
    space = parse_space({"experiment": TINY, "space": {"algorithm": ["fedavg", flt]}})
    advice = r"emnist was not found.*signature\.encoder\.dataset=fashion_mnist"
    with pytest.raises(ExperimentError, match=advice):
        planned_rows(space)


def test_a_dataset_is_loaded_once_and_a_split_dealt_once(monkeypatch) -> None:
    """Two splits, methods, numbers of rounds and seeds: 16 rows of one dataset."""
    loads, deals = [], []
    load, deal = Synthetic.load, describing.deal
    monkeypatch.setattr(Synthetic, "load", lambda self: loads.append(1) or load(self))
    monkeypatch.setattr(describing, "deal", lambda *given: deals.append(1) or deal(*given))
    rounds = {"rounds": [2, 3], "seeds": 2, "algorithm": ["fedavg", "local"]}
    iid = {**TINY, "split": {"name": "iid", "clients": 6}}
    planned = planned_rows(parse_space({"experiment": {"a": TINY, "b": iid}, "space": rounds}))
    assert (len(planned.steps), len(loads), len(deals)) == (16, 1, 2)
    timelines = [timeline for _, timeline in describing.dealt(planned.experiments)]
    for experiment, steps in zip(planned.experiments, planned.steps, strict=True):
        timeline = timelines[experiment.split.name == "iid"]
        assert steps == describing.predicted_steps(experiment, timeline)
