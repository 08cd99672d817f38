"""The federation's own arithmetic, without anything to run on."""

import numpy as np

from flray.config.build import build_federation, prepare, start_executor
from flray.config.experiment import parse_experiment
from flray.data.datasets.synthetic import Synthetic
from flray.data.events import make_timeline, with_global_test
from flray.data.split import Split
from flray.execution.federation import Cohort, Federation, Oracle, nobody
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


def test_labels_that_only_the_global_test_set_has_are_counted_for_nobody() -> None:
    """One client with an image of label 0 and two of label 1; the dataset has ten labels."""
    dataset = Synthetic(num_train=20, num_test=20, size=2).load()
    ids = (np.array([0, 1, 2]),)
    split = Split(np.array([0, 1, 11]), np.array([0, 1, 1]), ids, ids, ids)
    whole = with_global_test(make_timeline(split, ()), dataset).at(1)
    assert whole.labels.max() == 9
    assert Oracle(whole).label_counts(np.array([0])).tolist() == [[1, 2]]
