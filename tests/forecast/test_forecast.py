"""A forecast counts what the run itself will count."""

import ctypes
import gc
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from flray.clustering.encoder import Encoder
from flray.config.experiment import parse_experiment
from flray.data.dataset import Dataset
from flray.data.datasets.synthetic import Synthetic
from flray.data.events import make_timeline
from flray.engines.engine import Block
from flray.engines.plan import IndexPlan
from flray.errors import ExperimentError
from flray.forecast.evaluating import Evaluated, evaluation_time
from flray.forecast.forecast import Forecast, Rehearsal, forecast
from flray.forecast.sampling import Rate, Sampling, Seconds, some_steps
from flray.measures.settings import Evaluation
from flray.runs.preparing import deal
from flray.runs.remarks import missing_encoders
from flray.sweeps.describing import predicted_steps

from scenarios import TINY, tiny_experiment, typed

pytestmark = pytest.mark.slow


def forecast_of(*overrides: str, **keywords) -> Forecast:
    return forecast(tiny_experiment(*overrides), **keywords)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """What `flray plan` prints, in a folder with tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(json.dumps(TINY))
    return partial(typed, "plan")


ENCODER = "{dataset: {name: synthetic, num_train: 200, size: 8}, model: conv_ae, epochs: 2}"
FLT = "algorithm={name: flt, clustering: {signature: {encoder: %s, epochs: 3}, embed: none}}"


@pytest.fixture
def no_encoder(tmp_path, monkeypatch):
    """A cache without encoders, and a failure if one is trained."""
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Encoder, "load_or_train", pytest.fail)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=fedavg",),
        ("algorithm=scaffold", "evaluate.every=3"),
        ("algorithm={name: ifca, number: 2}",),
        # All clients train for the clustering; one cluster is what a rehearsal finds.
        ("algorithm={name: flhc, rounds_before: 2}", "algorithm.clustering.partition.threshold=99"),
        (FLT % ENCODER,),  # clients fine-tune an encoder in turn
    ],
    ids=["fedavg", "scaffold", "ifca", "flhc", "flt"],
)
def test_steps_and_bytes_are_those_of_the_run(tiny_run, tmp_path, monkeypatch, overrides) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    found, ran = forecast_of(*overrides), tiny_run(*overrides).rounds
    assert found.client_steps == ran["client_steps"].sum()
    assert found.bytes_up == ran.filter(like="bytes_up_").fillna(0).sum().sum()
    assert found.bytes_down == ran.filter(like="bytes_down_").fillna(0).sum().sum()
    assert found.is_rehearsed


SWAPPED = ("split={name: label_swap, clients: 6, groups: 3}", "participation=0.2")
FLHC = "algorithm={name: flhc, rounds_before: 2, clustering: {partition: {%s}}}"


@pytest.mark.parametrize(
    ("clusters", "stage", "num_drawn"),
    [(None, "number: 3", 3), (2, "number: 2", 2), (1, "threshold: 99", 1)],
    ids=["groups", "two", "one"],
)
def test_every_assumed_cluster_draws_its_own_cohort(tiny_run, clusters, stage, num_drawn) -> None:
    """One of six clients trains in rounds 1 and 2, then one of each cluster; all are equal."""
    found = forecast_of(*SWAPPED, FLHC % "threshold: 99", clusters=clusters)
    ran = tiny_run(*SWAPPED, FLHC % stage).rounds
    assert found.clusters == num_drawn
    assert ran["cohort_size"].tolist() == [1, 1, num_drawn, num_drawn]
    assert found.client_steps == ran["client_steps"].sum()


def test_clusters_are_assumed_to_be_the_groups_unless_data_alone_decide_them() -> None:
    assert forecast_of(*SWAPPED, FLHC % "threshold: 99").clusters == 3
    assert forecast_of(FLHC % "threshold: 99").clusters == 1  # a split without groups
    before_training = "algorithm={name: pacfl, clustering: {partition: {threshold: 999}}}"
    assert forecast_of(*SWAPPED, before_training).clusters is None
    assert forecast_of(*SWAPPED, "algorithm=fedavg", clusters=2).clusters is None
    with pytest.raises(ExperimentError, match="clusters must be at most the 6 clients, got 7"):
        forecast_of(*SWAPPED, FLHC % "threshold: 99", clusters=7)


def test_a_plan_says_which_clusters_it_assumes(plan) -> None:
    given = ("tiny.yaml", *SWAPPED, FLHC % "threshold: 99")
    assert "assumes that training leads to 3 clusters; where you expect others, add" in plan(*given)
    assert "assumes that training leads to 2 clusters" in plan(*given, "--clusters", "2")


@pytest.mark.usefixtures("no_encoder")
def test_an_encoder_is_timed_and_not_trained(monkeypatch) -> None:
    """0.5 s a step: 2 epochs of 4 batches of at most 64 of 200 images, then 3 of each client."""
    monkeypatch.setattr("flray.forecast.encoders._measured", lambda _: Rate(0.0, 0.5))
    found = forecast_of(FLT % ENCODER, "rounds=2")
    assert found.seconds["encoder"] == pytest.approx(0.5 * 2 * 4)
    assert found.seconds["fine-tuning"] == pytest.approx(0.5 * 3 * 6)  # a batch of six clients each
    drift = ("split={name: rotation, clients: 4}", f"evaluate.drift.encoder={ENCODER}")
    found = forecast_of(FLHC % "threshold: 99", *drift, "rounds=3")
    assert found.seconds["encoder"] == pytest.approx(0.5 * 2 * 4)
    assert "fine-tuning" not in found.seconds


@pytest.mark.usefixtures("no_encoder")
@pytest.mark.parametrize(
    "given",
    [
        (FLT % ENCODER,),
        ("split={name: rotation, clients: 4}", f"evaluate.drift.encoder={ENCODER}"),
    ],
)
def test_the_images_of_an_encoder_are_loaded_once(given, monkeypatch) -> None:
    load, sizes = Synthetic.load, []

    def counted(dataset: Synthetic) -> Dataset:
        sizes.append(dataset.num_train)
        return load(dataset)

    monkeypatch.setattr(Synthetic, "load", counted)
    assert forecast_of(*given, "rounds=1").seconds["encoder"] > 0
    assert sizes.count(200) == 1


def test_an_encoder_in_the_cache_takes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    given = ("rounds=2", FLT % ENCODER, "algorithm.clustering.signature.fine_tune=none")
    assert forecast_of(*given).seconds["encoder"] > 0
    (encoder,) = missing_encoders(tiny_experiment(*given))
    encoder.load_or_train("cpu")
    assert "encoder" not in forecast_of(*given).seconds


@pytest.mark.usefixtures("no_encoder")
def test_a_plan_names_an_encoder_that_is_trained_once_for_all(plan) -> None:
    first = r"an encoder is trained first, once: 2 epochs of synthetic; kept in .* about 0\.\d s"
    assert re.search(first, plan("tiny.yaml", FLT % ENCODER))
    methods = {
        "fedavg": {"algorithm": "fedavg"},
        "flt": yaml.safe_load((FLT % ENCODER).replace("=", ": ", 1)),
    }
    Path("space.yaml").write_text(
        yaml.safe_dump({"experiment": {**TINY, "rounds": 2}, "methods": methods})
    )
    shown = plan("space.yaml")
    assert len(re.findall(first, shown)) == 1


def test_rounds_that_are_left_are_like_later_ones_of_the_rehearsal(monkeypatch) -> None:
    """Out of time after two rounds."""
    monkeypatch.setattr("flray.forecast.forecast.REHEARSED_S", 0.0)
    found = forecast_of("rounds=50", "participation=1")
    one = forecast_of("rounds=1", "participation=1")
    assert not found.is_rehearsed
    assert found.client_steps == 50 * one.client_steps
    assert found.bytes_up == 50 * one.bytes_up


def test_training_is_the_rate_times_the_steps_over_the_processes() -> None:
    kind, _ = forecast_of("participation=1", "execution.block=3").rates.popitem()
    rates = {kind: Rate(seconds=1.0, seconds_per_step=0.5)}
    given = ("participation=1", "execution.block=3", "rounds=2")
    found = forecast_of(*given, rates=rates)
    # Two blocks of three clients in each of two rounds; what hosts do beside it takes little.
    expected = 4 * 1.0 + 0.5 * found.client_steps
    assert found.seconds["training"] == pytest.approx(expected, rel=0.02)
    both = forecast_of(*given, rates=rates, processes=2)
    assert both.seconds["training"] == pytest.approx(expected / 2, rel=0.02)
    more = forecast_of(*given, rates=rates, processes=9)  # there is no third block
    assert more.seconds["training"] == pytest.approx(expected / 2, rel=0.02)


ROWS = pd.DataFrame(
    {
        "round": [1, 2, 3, 4],
        "client_steps": [10, 90, 10, 10],
        "seconds": [2.0, 30.0, 2.0, 9.0],
        "seconds_train": [1.0, 1.0, 1.0, 1.0],
        "seconds_probe": [np.nan, 20.0, np.nan, np.nan],
        "seconds_evaluate": [0.5, 0.5, np.nan, 7.0],
    }
)
BLOCKS = [[Seconds(5.0, 1.0)], [Seconds(5.0, 1.0)] + [Seconds(25.0, 9.0)] * 2]
BLOCKS += [[Seconds(5.0, 1.0)]] * 2


def test_a_pass_over_all_clients_is_counted_once() -> None:
    """Clustered in round 2 of 14: ten further rounds are like 3 and 4, not like 2."""
    rehearsal = Rehearsal(ROWS, BLOCKS, clusterings=[2], num_rounds=14, seconds=50.0)
    assert rehearsal.total("client_steps") == 120 + 10 * 10
    # Rounds of 5 s and a pass of 50 s, in which hosts spent 21 - 19 s beside the training.
    assert rehearsal.training_seconds(1) == pytest.approx(14 * 5 + 50 + 2)
    # One block of three is the most that one of three processes trains in the pass.
    assert rehearsal.training_seconds(3) == pytest.approx(13 * 5 + (55 + 2) / 3)
    # 50 s without training, pass and evaluation; 1 s of every later round.
    assert rehearsal.server_seconds == pytest.approx(50 - 4 - 20 - 8 + 10 * 1)
    just_after = replace(rehearsal, rounds=ROWS.iloc[:3])
    assert just_after.total("client_steps") == 110 + 11 * 10
    often = replace(just_after, clusterings=[1, 2])  # later rounds may cluster too
    assert often.total("client_steps") == 110 + 11 * 50


def test_samples_cost_less_than_the_last_evaluation() -> None:
    """Rounds 5, 10 and 14 are evaluated; in rounds 1, 2 and 4 of those rehearsed models were scored
    as they were trained, 2 s a round on average."""
    rows = ROWS.assign(seconds_evaluate=[0.0, 4.0, 0.0, 4.0])
    rehearsal = Rehearsal(rows, BLOCKS, clusterings=[], num_rounds=14, seconds=50.0)
    measured = replace(rehearsal, usual_evaluation_s=0.5, last_evaluation_s=7.0)
    found = measured.evaluation_seconds(Evaluation(every=5, clients=100))
    assert found == pytest.approx(14 * 2 + 2 * 0.5 + 7)


def test_fine_tuning_counts_in_every_evaluation() -> None:
    """A second for each step of fine-tuning, five epochs of all clients; one evaluation or four."""
    tuned = ("evaluate.fine_tune.epochs=5", "participation=1", "train.batch_size=10")
    experiment = tiny_experiment(*tuned)
    split = deal(experiment, experiment.dataset.build().load())
    num_steps = sum(-(-len(ids) // 10) for ids in split.train)  # of one epoch
    rates = {kind: Rate(0.0, 1.0) for kind in forecast(experiment).rates}
    for every, num_evaluations in ((4, 1), (1, 4)):
        seconds = forecast_of(*tuned, f"evaluate.every={every}", rates=rates).seconds
        assert seconds["evaluation"] == pytest.approx(num_evaluations * 5 * num_steps, rel=0.02)
        assert seconds["training"] == pytest.approx(4 * 2 * num_steps, rel=0.02)


def test_dear_evaluations_ask_few_clients() -> None:
    """A second per client: ten clients take as long as there is time, so nobody else is asked."""
    asked: list[int] = []

    def evaluate(size: int) -> Evaluated:
        asked.append(size)
        return Evaluated(size, 1.0 * size)

    assert evaluation_time(evaluate, 100, budget_s=9.0).of(100) == pytest.approx(100.0)
    assert asked == [10]
    assert evaluation_time(evaluate, 7, budget_s=90.0).of(7) == pytest.approx(7.0)
    assert evaluation_time(evaluate, 50, budget_s=90.0).of(50) == pytest.approx(50.0)
    assert asked == [10, 7, 7, 10, 10, 40]  # another fourfold would take too long


def test_memory_is_what_the_rehearsal_took() -> None:
    """Libraries alone take more than 0.1 GB; a large dataset adds its own."""

    def memory(num_train: int) -> int:
        gc.collect()
        if sys.platform == "linux":  # what other tests freed would be used again, unseen
            ctypes.CDLL(None).malloc_trim(0)
        return forecast_of(f"dataset.num_train={num_train}", "rounds=1").memory_per_process

    small, large = memory(2000), memory(400_000)
    assert small > 10**8
    assert large - small > 400_000 * 16  # bytes of the images


def test_a_rate_is_the_slope_of_the_time_over_the_steps(monkeypatch) -> None:
    """A clock that adds 2 s for a block and 0.25 s for a step; clients of 40 and 20 steps."""
    clock = [0.0]

    class Steady:
        def train(self, block, training, gradient):
            clock[0] += 2.0 + 0.25 * sum(plan.num_steps for plan in block.plans)

    monkeypatch.setattr("flray.forecast.sampling.perf_counter", lambda: clock[0])
    monkeypatch.setattr("flray.forecast.sampling.MEASURED_S", 1e9)
    ids = np.zeros((40, 1, 2), np.int64)
    plans = [IndexPlan(i, ids[:n], ids[:n] == 0, ids[:n, :, 0]) for i, n in enumerate((40, 20))]
    rate = Sampling(Steady())._measured(Block(tuple(plans), {}, {}), None, None)
    assert rate.seconds_per_step == pytest.approx(0.25)
    assert rate.seconds == pytest.approx(2.0)
    assert [p.num_steps for p in some_steps(Block(tuple(plans), {}, {}), 0.26).plans] == [11, 6]


def test_a_profile_serves_where_nothing_is_measured(plan, monkeypatch) -> None:
    shown = plan("tiny.yaml", "--save-profile", "rates.json")
    assert "client steps" in shown
    assert "takes most" in shown
    monkeypatch.setattr(Sampling, "_measured", pytest.fail)
    assert "takes most" in plan("tiny.yaml", "--profile", "rates.json")


def test_a_space_is_planned_by_a_typical_row(plan) -> None:
    """The time of all rows follows from client steps and from the row with the median of them."""
    space = {"experiment": TINY, "space": {"rounds": [2, 3, 4], "train.lr": [0.1, 0.2]}}
    Path("space.yaml").write_text(yaml.safe_dump(space))
    shown = plan("space.yaml", "concurrency=3")
    assert "space: 6 rows; one by one they would take about" in shown
    steps = {n: planned_steps(n) for n in (2, 3, 4)}
    assert f"at most {2 * sum(steps.values()):,} client steps" in shown
    assert f"a typical row (fedavg, {steps[3]:,} client steps): about" in shown
    row, all_rows = (float(s) for s in re.findall(r"about ([\d.]+) s", shown))
    assert all_rows == pytest.approx(row * 2 * sum(steps.values()) / steps[3] / 3, abs=0.2)
    with pytest.raises(ExperimentError, match=r"--gpus is for experiments, .* concurrency=4"):
        plan("space.yaml", "--gpus", "1")


def test_a_part_of_a_space_is_planned(plan) -> None:
    methods = {"fedavg": {"algorithm": "fedavg"}, "scaffold": {"algorithm": "scaffold"}}
    space = {"experiment": {"first": TINY, "second": {**TINY, "rounds": 2}}, "methods": methods}
    Path("space.yaml").write_text(yaml.safe_dump(space))
    part = ("--methods", "fed*", "--splits", "second")
    shown = plan("space.yaml", *part)
    assert "space: 1 row;" in shown
    assert f"a typical row (fedavg, {planned_steps(2):,} client steps)" in shown
    with pytest.raises(ExperimentError, match="choose rows of a space, and no space was given"):
        plan("demo/flhc", *part)


def planned_steps(rounds: int) -> int:
    experiment = parse_experiment({**TINY, "rounds": rounds})
    split = deal(experiment, experiment.dataset.build().load())
    return predicted_steps(experiment, make_timeline(split, ()))


def test_what_cannot_be_foretold_is_said(plan) -> None:
    with pytest.raises(ExperimentError, match="has no blocks of this kind, it knows: other"):
        forecast_of(rates={"other": Rate(0.0, 1.0)})
    Path("rates.json").write_text("[]")
    with pytest.raises(ExperimentError, match="is no profile of `flray plan"):
        plan("tiny.yaml", "--profile", "rates.json")
    with pytest.raises(ExperimentError, match=r"they use no GPU: set execution\.executor=ray"):
        plan("tiny.yaml", "--gpus", "1")


def test_gpus_limit_the_actors_at_work(plan) -> None:
    """0.25 of a GPU each: eight fit on two, and five were asked for."""
    actors = "execution={executor: ray, device: cpu, actors: {count: 5, num_gpus: 0.25}}"
    for gpus, expected in (("2", 5), ("0.5", 2)):
        assert f"{expected} training at a time" in plan("tiny.yaml", actors, "--gpus", gpus)
