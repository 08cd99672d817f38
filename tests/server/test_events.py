"""Clients that join, leave and change their data while a run goes on."""

from dataclasses import dataclass, field, replace

import pytest

from flray.algorithms.fedavg import FedAvg
from flray.errors import ExperimentError
from flray.records.run_directory import RunDirectory
from flray.runs.assemble import build_server
from flray.runs.preparing import prepare

from scenarios import tiny_experiment

EVENTS = (
    "events=[{round: 3, kind: join, clients: [5]}, {round: 3, kind: leave, clients: [0, 1]},"
    " {round: 4, kind: relabel, clients: [2, 3], labels: [[0, 1]]}]"
)


def test_absent_clients_neither_train_nor_are_scored(tiny_run) -> None:
    result = tiny_run(EVENTS, "participation=1", "rounds=4")
    assert result.rounds["cohort_size"].tolist() == [5, 5, 4, 4]
    scored = result.clients.query("part == 'test'").groupby("round")["client"].apply(list)
    assert scored.to_dict() == {
        1: [0, 1, 2, 3, 4],
        2: [0, 1, 2, 3, 4],
        3: [2, 3, 4, 5],
        4: [2, 3, 4, 5],
    }
    assert result.summary["clients"] == 4


@dataclass(frozen=True)
class Noting(FedAvg):
    """Notes who is there when models are deployed."""

    seen: list[list[int]] = field(default_factory=list)

    def deploy(self, state, clients, fed):
        self.seen.append(fed.clients.tolist())
        return state.bank


def test_a_state_is_deployed_in_the_federation_of_its_own_round(tmp_path) -> None:
    experiment = tiny_experiment(EVENTS, "rounds=4")
    server = build_server(experiment, prepare(experiment), RunDirectory(tmp_path / "run"))
    noting = Noting()
    assert replace(server, algorithm=noting).run()
    before, after = [0, 1, 2, 3, 4], [2, 3, 4, 5]
    assert noting.seen == [before, before, after, after]


def test_relabelled_clients_are_trained_and_tested_on_the_new_labels(tiny_run) -> None:
    """All clients swap 0 and 1 at the start: the same as a data set with those names swapped."""
    everyone = "events=[{round: 2, kind: relabel, clients: [0, 1, 2, 3, 4, 5], labels: [[0, 1]]}]"
    swapped, plain = tiny_run(everyone, "rounds=2"), tiny_run("rounds=2")
    assert swapped.summary["split_sha256"] != plain.summary["split_sha256"]
    before = [r.rounds["loss_mean"].tolist() for r in (swapped, plain)]
    assert before[0][0] == before[1][0]
    assert before[0][1] > before[1][1]  # it has to learn anew


def test_a_run_with_events_resumes(tiny_run, tmp_path) -> None:
    whole = tiny_run(EVENTS, "algorithm=local")
    for part in range(2):
        tiny_run(
            EVENTS, "algorithm=local", out=tmp_path / "p", resume=part > 0, should_stop=lambda: True
        )
    rest = tiny_run(EVENTS, "algorithm=local", out=tmp_path / "p", resume=True)
    assert rest.summary["params_sha256"] == whole.summary["params_sha256"]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ("[{round: 0, kind: leave, clients: [1]}]", "round"),
        ("[{round: 2, kind: vanish, clients: [1]}]", r"events\[0\].kind must be one of"),
        ("[{round: 2, kind: leave, clients: [99]}]", "99"),
        ("[{round: 2, kind: leave, clients: [0, 1, 2, 3, 4, 5]}]", "nobody|no client|everybody"),
    ],
)
def test_wrong_events_are_refused(tiny_run, events, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny_run(f"events={events}")


@pytest.mark.parametrize("split", ["rotation", "image_shift"])
def test_splits_that_bring_new_images_run(tiny_run, split) -> None:
    fields = {
        "rotation": "clients: 8",
        "image_shift": "clients: 6, form: shared, samples_per_client: 20, labels: iid,"
        " pipelines: [identity, invert, rotate]",
    }[split]
    result = tiny_run(f"split={{name: {split}, {fields}}}", "rounds=2", "participation=1")
    assert result.summary["rounds"] == 2
    assert result.summary["ari"] == 0
