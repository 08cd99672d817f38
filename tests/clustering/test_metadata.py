"""What is known of clients beforehand: signature `metadata` and partition `given`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from flray.clustering.metadata import Metadata
from flray.data.events import make_timeline
from flray.errors import ExperimentError
from flray.execution.federation import Cohort

from scenarios import tiny_federation

FILE = str(Path(__file__).with_name("clients.csv"))
SWAPPED = ["split={name: label_swap, clients: 6, groups: 3}", "participation=1"]
GIVEN = "algorithm={name: %s, rounds_before: 1, clustering: {partition: given}}"
MARKED = "uses_ground_truth=true"


def vectors(signature: Metadata, fed, clients: list[int]) -> np.ndarray:
    points, _ = signature(fed, fed.initial_bank(), Cohort(1, np.array(clients)), {})
    assert points.clients.tolist() == clients
    return points.array()


def test_columns_are_scaled_and_one_hot_as_by_sklearn() -> None:
    frame = pd.read_csv(FILE)
    numbers = StandardScaler().fit_transform(frame[["beds", "emergency"]].astype(float))
    kinds = OneHotEncoder(sparse_output=False).fit_transform(frame[["region"]])
    found = vectors(Metadata(FILE), tiny_federation(), [0, 2, 5])
    assert found == pytest.approx(np.hstack([numbers, kinds])[[0, 2, 5]])


def test_the_order_of_rows_does_not_matter_where_clients_are_numbered(tmp_path) -> None:
    frame = pd.read_csv(FILE).assign(number=np.arange(6))
    frame.sample(frac=1, random_state=0).to_parquet(tmp_path / "mixed.parquet")
    columns = ("beds", "region")
    mixed = Metadata(str(tmp_path / "mixed.parquet"), client="number", columns=columns)
    fed = tiny_federation()
    ordered = Metadata(FILE, columns=columns)
    assert (vectors(mixed, fed, [1, 4]) == vectors(ordered, fed, [1, 4])).all()


def test_owners_are_found_by_their_names_whatever_other_rows_the_file_has(tmp_path) -> None:
    fed = tiny_federation()
    names = tuple("fedcba")
    split = replace(fed.timeline.at(1), client_names=names)
    fed = replace(fed, timeline=make_timeline(split, ()))
    frame = pd.read_csv(FILE).assign(hospital=list(names))
    others = frame.iloc[:2].assign(hospital=["x", "y"], beds=10**6)
    pd.concat([others, frame.sample(frac=1, random_state=0)]).to_csv(tmp_path / "h.csv")
    mixed = Metadata(str(tmp_path / "h.csv"), client="hospital")  # without pandas' index
    assert (vectors(mixed, fed, [1, 4]) == vectors(Metadata(FILE), fed, [1, 4])).all()
    frame.iloc[:5].to_csv(tmp_path / "h.csv")
    with pytest.raises(ExperimentError, match="are f to a; it has 5 rows and none of client a"):
        mixed.require(fed)


def test_groups_are_one_hot_and_counted_as_ground_truth() -> None:
    fed = tiny_federation(*SWAPPED, MARKED)
    groups = fed.timeline.at(1).groups
    assert (vectors(Metadata(), fed, [0, 3, 4]) == np.eye(3)[groups[[0, 3, 4]]]).all()
    assert fed.meter.counts["ground_truth_reads"] == 1


def test_groups_that_a_server_knows_are_no_ground_truth() -> None:
    fed = tiny_federation(*SWAPPED)
    with pytest.raises(ExperimentError, match="uses_ground_truth: true"):
        Metadata().require(fed)
    known = replace(fed.timeline.at(1), knows_groups=True)
    fed = replace(fed, timeline=make_timeline(known, ()))
    Metadata().require(fed)
    vectors(Metadata(), fed, [0, 1])
    assert fed.meter.counts["ground_truth_reads"] == 0


@pytest.mark.parametrize("method", ["flhc", "repa", pytest.param("wd", marks=pytest.mark.long)])
def test_given_clusters_are_the_groups_and_mark_the_run(method, tiny_run) -> None:
    result = tiny_run(*SWAPPED, GIVEN % method, MARKED)
    summary = result.summary
    assert (summary["ari"], summary["clusters"], summary["uses_ground_truth"]) == (1.0, 3, True)
    # Nobody trained for the clustering: the steps are those of FedAvg's rounds.
    assert summary["client_steps"] == tiny_run(*SWAPPED).summary["client_steps"]


def test_a_clustering_that_finds_the_groups_is_the_given_one(tiny_run) -> None:
    """FL+HC whose clusters are the groups trains on as with the groups given."""
    given = tiny_run(*SWAPPED, GIVEN % "flhc", MARKED, "rounds=3")
    rule = "{signature: metadata, partition: {name: hierarchical, number: 3}}"
    found = f"algorithm={{name: flhc, rounds_before: 1, clustering: {rule}}}"
    found = tiny_run(*SWAPPED, found, MARKED, "rounds=3")
    assert found.summary["ari"] == 1.0
    assert found.summary["params_sha256"] == given.summary["params_sha256"]


@pytest.mark.parametrize("method", ["flhc", "repa"])
def test_newcomers_join_their_group_without_training(method, tiny_run) -> None:
    later = "events=[{round: 3, kind: join, clients: [5]}]"
    split = "split={name: label_swap, clients: 9, groups: 3, holdout: 2}"
    result = tiny_run(split, "participation=1", GIVEN % method, MARKED, later, "rounds=4")
    last = result.clients[result.clients["round"] == 4]
    models = last[last["part"] == "test"].groupby("group")["model"].nunique()
    assert models.tolist() == [1, 1, 1]
    assert not result.summary["holdout_labels_read"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*SWAPPED, GIVEN % "flhc"], "uses_ground_truth: true"),
        ([GIVEN % "flhc", MARKED], "have no groups|have none"),
        (["file: nowhere.csv"], "there is no file nowhere.csv"),
        ([f"file: {FILE}, columns: [beds, floors]"], "has no column 'floors'"),
        ([f"file: {FILE}, client: beds"], "whose names in 'beds' are 0 to 5; .* none of client 0"),
        (["columns: [beds]"], "give file"),
    ],
)
def test_what_is_not_known_is_refused(overrides, message, tiny_run) -> None:
    if len(overrides) == 1:
        signature = f"{{name: metadata, {overrides[0]}}}"
        overrides = [f"algorithm={{name: flhc, clustering: {{signature: {signature}}}}}"]
    with pytest.raises(ExperimentError, match=message):
        tiny_run(*overrides)


def test_an_empty_cell_and_a_missing_row_are_named(tmp_path) -> None:
    for text, message in (
        ("beds\n1\n\n3\n4\n5\n6\n", "one row for each of the 6 clients, in their order; it has 5"),
        ("beds,x\n1,1\n,2\n3,3\n4,4\n5,5\n6,6\n", "beds has no value in row 1"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(ExperimentError, match=message):
            Metadata(str(tmp_path / "bad.csv")).require(tiny_federation())
