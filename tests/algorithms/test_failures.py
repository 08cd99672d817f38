"""`on_client_failure: drop` in a clustering: a client without a signature stays unplaced."""

from collections.abc import Callable

import numpy as np
import pytest

from flray.client.tasks import Train
from flray.errors import ExperimentError

from scenarios import fail_jobs, some_long, tiny_experiment

PCA = "signature: {name: pca_centres, components: 16, k: 2}"
ENCODER = "{dataset: {name: synthetic, num_train: 64, num_test: 32, size: 8}, model: conv_ae}"
IN_TURN = f"signature: {{name: encoder_centres, encoder: {ENCODER}, k: 2, epochs: 1}}"
FLT = f"algorithm={{name: flt, clustering: {{{PCA}, embed: none}}}}"
TWO = "algorithm.clustering.partition.number=2"
# By case: the overrides, and the round after which clients are clustered.
CASES = {
    "flhc": (["algorithm={name: flhc, rounds_before: 1}"], 1),
    "flhc before round 1": (["algorithm={name: flhc, rounds_before: 0}"], 0),
    "flt": ([FLT], 0),
    "flt, newcomers by fcr": ([FLT, "algorithm.newcomers=fcr"], 0),
    "flt, fine-tuned in turn": (
        [
            f"algorithm={{name: flt, clustering: {{{IN_TURN}, embed: none}}}}",
            "algorithm.clustering.signature.encoder.epochs=1",
        ],
        0,
    ),
    "repa": (["algorithm={name: repa, rounds_before: 1}", TWO], 1),
    "repa before round 1": (["algorithm={name: repa, rounds_before: 0}", TWO], 0),
    "wd": (["algorithm={name: wd, rounds_before: 1}", TWO], 1),
    "pca_km_hc": ([f"algorithm={{name: pca_km_hc, clustering: {{{PCA}}}}}"], 0),
    # With clusters to choose among: of a single one nobody is asked.
    "flis_hc": (["algorithm=flis_hc", "split.server=30"], 0),
}
BROKEN = 2
DROP = ["participation=1", "on_client_failure=drop"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_signature(monkeypatch):
    """Let clients fail to send a signature while `when(last round trained so far)` holds."""

    def break_clients(clients: list[int], when: Callable[[int], bool] = lambda _: True) -> None:
        last = [0]

        def fails(task, job) -> bool:
            is_training = isinstance(task, Train) and not task.is_probe
            if is_training:
                last[0] = task.t
            asks = not is_training and getattr(job, "clients", None) is not None
            return asks and np.isin(job.clients, clients).any() and when(last[0])

        fail_jobs(monkeypatch, fails)

    return break_clients


def losses_of(result, client: int) -> list[float]:
    scores = result.clients.query(f"part == 'test' and client == {client}")
    return scores.sort_values("round")["loss"].tolist()


@pytest.mark.parametrize("case", some_long(CASES, ["flhc", "flt, fine-tuned in turn", "flis_hc"]))
class TestDropped:
    def test_a_client_that_never_answers_keeps_its_model(
        self, case, tiny_run, no_signature
    ) -> None:
        overrides, clustered = CASES[case]
        no_signature([BROKEN])
        result = tiny_run(*overrides, *DROP, "rounds=4")
        sizes = [6] * clustered + [5] * (4 - clustered)
        assert result.rounds["cohort_size"].tolist() == sizes
        losses = losses_of(result, BROKEN)[max(clustered - 1, 0) :]
        assert len(losses) >= 3
        assert len(set(losses)) == 1
        assert len(set(losses_of(result, 0))) == 4  # others learn
        # Once in the clustering, which counts in round 1 where it comes before, then each round.
        expected = [1] * 4 if clustered else [2, 1, 1, 1]
        assert result.rounds["clients_dropped"].tolist() == expected
        assert result.summary["clients_dropped"] == sum(expected)

    def test_one_that_answers_later_is_placed_then(self, case, tiny_run, no_signature) -> None:
        overrides, clustered = CASES[case]
        no_signature([BROKEN], when=lambda last: last <= clustered)
        result = tiny_run(*overrides, *DROP, "rounds=4")
        sizes = [6] * 4
        sizes[clustered] = 5  # of the round after the clustering
        assert result.rounds["cohort_size"].tolist() == sizes
        assert result.summary["clients_dropped"] == 1
        assert len(set(losses_of(result, BROKEN)[clustered + 1 :])) == 3 - clustered

    def test_a_holdout_client_that_never_answers_ends_nothing(
        self, case, tiny_run, no_signature
    ) -> None:
        overrides, clustered = CASES[case]
        plain = tiny_experiment("split.holdout=1")
        split = plain.split.build().split(plain.dataset.build().load(), 0)
        no_signature(split.holdout.tolist())
        result = tiny_run(*overrides, *DROP, "split.holdout=1", "rounds=3")
        assert result.rounds["cohort_size"].tolist() == [5, 5, 5]
        asked_before = clustered == 0 and case != "flis_hc"  # where it chooses, after each round
        assert result.summary["clients_dropped"] == (4 if asked_before else 3)

    def test_a_clustering_without_any_answer_is_an_error(
        self, case, tiny_run, no_signature
    ) -> None:
        no_signature(list(range(6)))
        with pytest.raises(ExperimentError, match=r"no client answered .* on_client_failure=raise"):
            tiny_run(*CASES[case][0], *DROP)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("clove", ["train={lr: 1e20, batch_size: 1000}", "participation=0.1"]),
        ("{name: feddrift, every: 1}", ["train={lr: 1e38, batch_size: 1000}", "model=linear"]),
    ],
    ids=["clove", "feddrift"],
)
def test_losses_of_a_model_that_diverged_are_refused_with_a_message(
    tiny_run, algorithm, more
) -> None:
    """The weights are finite after one step, and so is the loss before it."""
    with pytest.raises(ExperimentError, match=r"must send finite numbers.* lower train\.lr"):
        tiny_run(f"algorithm={algorithm}", *more)


def test_a_client_that_fails_in_its_stage_is_heard_in_the_next(tiny_run, no_signature) -> None:
    """Three stages of two clients; one of the first two does not answer before round 1."""
    heard = tiny_run(FLT, *DROP, "algorithm.stages=3", "algorithm.clustering.relate.gamma=.inf")
    assert heard.rounds["cohort_size"].tolist() == [2, 4, 6, 6]
    first = heard.clients.query("part == 'test' and round == 1")
    one_of_them = int(first.loc[first["model"] == first["model"].max(), "client"].iloc[0])
    no_signature([one_of_them], when=lambda last: last == 0)
    late = tiny_run(FLT, *DROP, "algorithm.stages=3", "algorithm.clustering.relate.gamma=.inf")
    assert late.rounds["cohort_size"].tolist() == [1, 4, 6, 6]
    assert late.summary["clients_dropped"] == 1
