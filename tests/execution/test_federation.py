"""The federation's own arithmetic, without anything to run on."""

import numpy as np

from flray.config.build import build_federation, prepare, start_executor
from flray.config.experiment import parse_experiment
from flray.execution.federation import Cohort, Federation, nobody
from flray.models.mixing import Relation

from scenarios import TINY


def federation() -> Federation:
    experiment = parse_experiment(TINY)
    parts = prepare(experiment)
    return build_federation(experiment, parts, start_executor(parts))


def test_of_no_members_nobody_is_sampled() -> None:
    assert federation().sample(1, nobody()).tolist() == []
    assert len(federation().sample(1, np.array([3]))) == 1


def test_an_empty_cohort_trains_nobody_and_changes_no_model() -> None:
    fed = federation()
    bank = fed.initial_bank()
    trained = fed.train(bank, Cohort(1, nobody()), lambda *_: {})
    assert trained.metrics() == {}
    assert fed.meter.counts["client_steps"] == 0
    mixed = fed.mix(Relation.joint(fed.num_clients), trained, bank)
    assert mixed.sha256() == bank.sha256()
