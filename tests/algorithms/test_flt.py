"""FLT and PCA+kM+HC: identities, groups found, stages, change and newcomers."""

import numpy as np
import pytest

from flray.algorithms.change import Dynamic, Flags
from flray.algorithms.flt import Flt
from flray.errors import ExperimentError
from flray.measures.scores import partition_scores
from flray.records.clusterings import read_clusterings

from scenarios import sha, some_long

# No encoder and no UMAP: PCA centres where only the relation and what follows are in question.
SIGNATURE = "signature: {name: pca_centres, components: 16, k: 2}"
LINEAR = f"algorithm={{name: flt, clustering: {{{SIGNATURE}, embed: none}}}}"


def gamma(value: str) -> list[str]:
    return [LINEAR, f"algorithm.clustering.relate={{name: threshold, gamma: {value}}}"]


@pytest.mark.parametrize(("case", "unheard"), [("rows", "stale"), ("clusters", "ignore")])
def test_an_infinite_gamma_is_fedavg(tiny_run, known_run, case, unheard) -> None:
    common = f"aggregate.unheard={unheard}"
    flt = tiny_run(*gamma(".inf"), f"algorithm.case={case}", common)
    assert sha(flt) == sha(known_run(common))


@pytest.mark.parametrize(("case", "unheard"), [("rows", "ignore"), ("clusters", "stale")])
def test_a_tiny_gamma_is_local(tiny_run, known_run, case, unheard) -> None:
    common = f"aggregate.unheard={unheard}"
    flt = tiny_run(*gamma("1.0e-12"), f"algorithm.case={case}", common)
    assert sha(flt) == sha(known_run("algorithm=local", common))
    assert sha(flt) != sha(known_run(common))


def test_pca_km_hc_is_flt_with_other_stages(tiny_run) -> None:
    baseline = f"algorithm={{name: pca_km_hc, clustering: {{{SIGNATURE}}}}}"
    assert sha(tiny_run(baseline)) == sha(tiny_run(*gamma("1.2")))


def test_rows_and_clusters_differ_where_the_relation_is_not_transitive(tiny_run) -> None:
    """Between all and nothing a γ exists at which somebody hears a part of its component."""
    found = read_clusterings(tiny_run(*gamma(".inf"), "rounds=1").path)[0]
    distances = np.unique(found.D)
    for value in distances[1:]:
        related = np.less(found.D, value)
        reached = np.linalg.matrix_power(related.astype(float), len(related)) > 0
        if (related != reached).any():
            break
    rows, clusters = (
        tiny_run(*gamma(str(value)), f"algorithm.case={c}") for c in ("rows", "clusters")
    )
    assert sha(rows) != sha(clusters)
    assert rows.clients["model"].nunique() > clusters.clients["model"].nunique()
    assert rows.summary["clusters"] == clusters.summary["clusters"]  # of one partition


def test_a_soft_kernel_mixes_everybody_a_little(tiny_run) -> None:
    """Six models, for every client hears the others in proportions of its own; one component."""
    soft = tiny_run(LINEAR, "algorithm.clustering.relate=kernel", "participation=1")
    assert soft.clients["model"].nunique() == 6
    assert soft.summary["clusters"] == 1
    assert sha(soft) != sha(tiny_run("algorithm=local", "participation=1"))


def test_the_summary_describes_the_partition_and_not_the_distinct_models(tiny_run) -> None:
    """With a soft relation every client has a model of its own, whatever the partition is."""
    result = tiny_run(
        "dataset={name: synthetic, num_train: 400, num_test: 100, num_groups: 2}",
        "split={name: iid, clients: 6, by_source: true}",
        "algorithm={name: pca_km_hc, clustering: {signature: {components: 8}, relate: kernel, "
        "partition: {name: hierarchical, linkage: average, number: 2}}}",
        "participation=1",
    )
    (clustering,) = read_clusterings(result.path).values()
    scores = partition_scores(clustering.labels, clustering.groups)
    assert result.clients["model"].nunique() == 6
    assert result.summary["clusters"] == 2
    assert result.summary["ari"] == scores["ari"]
    assert result.summary["nmi"] == scores["nmi"]


class TestStages:
    def test_all_are_heard_after_the_last_stage(self, tiny_run) -> None:
        result = tiny_run(*gamma(".inf"), "algorithm.stages=3", "participation=1")
        assert result.rounds["cohort_size"].tolist() == [2, 4, 6, 6]
        found = read_clusterings(result.path)
        assert {t: len(c.clients) for t, c in found.items()} == {0: 2, 1: 4, 2: 6}

    @pytest.mark.parametrize("leaving", [[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 2, 3, 4]])
    def test_a_stage_without_clients_is_skipped(self, tiny_run, leaving) -> None:
        """Three stages, of which the last, after round 2, finds two clients or one."""
        leave = f"{{round: 2, kind: leave, clients: {leaving}}}"
        back = f"{{round: 4, kind: join, clients: {leaving}}}"
        result = tiny_run(
            *gamma(".inf"),
            "algorithm.stages=3",
            "participation=1",
            f"events=[{leave}, {back}]",
            "rounds=5",
        )
        staying, sizes = 6 - len(leaving), result.rounds["cohort_size"].tolist()
        assert (sizes[2], sizes[4]) == (staying, 6)
        all_placed = sizes[1] == staying
        assert list(read_clusterings(result.path)) == ([0, 1] if all_placed else [0, 1, 2])

    def test_more_stages_than_clients_is_refused(self, tiny_run) -> None:
        with pytest.raises(ExperimentError, match="stages"):
            tiny_run(*gamma(".inf"), "algorithm.stages=7")


# In round 3 all clients leave, and others come.
ALL_NEW = [
    "events=[{round: 3, kind: leave, clients: [0, 1, 2]},"
    " {round: 3, kind: join, clients: [3, 4, 5]}]",
    "participation=1",
    "rounds=5",
]


@pytest.mark.parametrize("dynamic", some_long(["{}", "{every: 2}"], ["{every: 2}"]))
def test_steps_count_fine_tuning_in_the_round_it_happens_in(
    tiny_run, tmp_path, monkeypatch, dynamic
) -> None:
    """6 clients of 20 examples, 18 to train on: 5 batches of 4 in each of 2 epochs."""
    monkeypatch.setenv("FLRAY_CACHE", str(tmp_path / "cache"))
    equal = ["split={name: iid, clients: 6, samples_per_client: 20}", "participation=1"]
    encoder = "{dataset: {name: synthetic, num_train: 64, size: 8}, model: conv_ae, epochs: 1}"
    signature = f"{{name: encoder_centres, encoder: {encoder}, k: 2, epochs: 2}}"
    result = tiny_run(
        *equal,
        f"algorithm={{name: flt, clustering: {{signature: {signature}, embed: none}}}}",
        "algorithm.clustering.signature.encoder.batch_size=4",
        f"algorithm.dynamic={dynamic}",
        "rounds=3",
    )
    pass_of_all = 6 * 2 * 5
    fine_tuning = [pass_of_all, 0 if dynamic == "{}" else pass_of_all, 0]
    training = tiny_run(*equal, "rounds=3").rounds["client_steps"]
    found = result.rounds
    assert found["client_steps_fine_tuning"].fillna(0).tolist() == fine_tuning
    assert (found["client_steps"] - training).tolist() == fine_tuning
    assert result.summary["client_steps"] == found["client_steps"].sum()
    assert "client_steps_fine_tuning" not in result.summary


GROUPS = [
    "dataset={name: digits, size: 8}",
    "split={name: label_groups, clients: 20, groups: 5}",
    "train={lr: 0.1, epochs: 2}",
    "participation=1",
    LINEAR,
]
# A reference that reads ground truth finds the groups in any round: what is tested is what happens
# then, not the encoder.
ORACLE = [
    "uses_ground_truth=true",
    "algorithm.clustering.partition=label_counts",
    "algorithm.case=clusters",
]
# From round 4 a cluster holds clients of all groups: client 4g + j gets the data of group g + j.
EXCHANGES = ", ".join(
    f"{{round: 4, kind: exchange, clients: {[4 * g + j for g in range(5)]}}}"
    for j in range(1, 4)
    for _ in range(j)
)
MIXED = f"events=[{EXCHANGES}]"


class TestChange:
    def run(self, known_run, *overrides: str):
        return known_run(*GROUPS, *ORACLE, MIXED, "rounds=8", *overrides)

    def test_without_dynamic_clustering_it_does_not_recover(self, known_run) -> None:
        result = self.run(known_run)
        before, after = result.rounds["accuracy_mean"].iloc[[2, -1]]
        assert before > 0.95
        assert after < before - 0.05
        assert result.summary["ari"] < 0.2
        assert list(read_clusterings(result.path)) == [0]

    @pytest.mark.parametrize(
        "dynamic",
        [
            "{flags: events}",
            pytest.param("{flags: events, more_than: 10}", marks=pytest.mark.long),
            pytest.param("{flags: loss, more_than: 5}", marks=pytest.mark.long),
            "{flags: update, more_than: 5, jump: 2.0}",
            pytest.param("{every: 4}", marks=pytest.mark.long),
        ],
    )
    def test_with_it_the_groups_are_found_again(self, known_run, dynamic) -> None:
        result = self.run(known_run, f"algorithm.dynamic={dynamic}")
        assert result.summary["ari"] == 1.0
        assert result.rounds["accuracy_mean"].iloc[-1] > 0.95
        assert 4 in read_clusterings(result.path)

    def test_too_few_flags_change_nothing(self, known_run) -> None:
        """15 of the 20 clients got other data."""
        result = self.run(known_run, "algorithm.dynamic={flags: events, more_than: 15}")
        assert list(read_clusterings(result.path)) == [0]
        assert sha(result) == sha(self.run(known_run))

    def test_flags_come_down_after_a_clustering(self, known_run) -> None:
        result = self.run(known_run, "algorithm.dynamic={flags: events}")
        assert list(read_clusterings(result.path)) == [0, 4]

    @pytest.mark.long
    def test_resume_keeps_flags_and_centres(self, tiny_run, known_run, tmp_path) -> None:
        common = ("algorithm.dynamic={flags: loss, more_than: 5}",)
        whole = self.run(known_run, *common)
        for stopped_after in (3, 4, 5):
            out, seen = tmp_path / f"stopped_{stopped_after}", []
            command = (*GROUPS, *ORACLE, MIXED, "rounds=8", *common)
            tiny_run(
                *command,
                out=out,
                on_round=seen.append,
                should_stop=lambda n=stopped_after, seen=seen: len(seen) >= n,
            )
            assert sha(tiny_run(*command, out=out, resume=True)) == sha(whole)


class TestNewcomers:
    JOIN = "events=[{round: 3, kind: join, clients: [0, 9, 19]}]"

    @pytest.mark.parametrize("way", ["fcr", "mean_embedding"])
    def test_they_train_from_the_round_after(self, known_run, way) -> None:
        result = known_run(*GROUPS, *ORACLE, self.JOIN, f"algorithm.newcomers={way}", "rounds=5")
        assert result.rounds["cohort_size"].tolist() == [17] * 3 + [20] * 2
        again = [3] if way == "fcr" else []
        assert list(read_clusterings(result.path)) == [0, *again]
        assert result.rounds.set_index("round")["bytes_up_signature"][3] > 0

    @pytest.mark.parametrize("way", ["fcr", "mean_embedding"])
    def test_they_may_come_when_everybody_else_leaves(self, tiny_run, way) -> None:
        """In round 3 nobody who is there has a cluster: nobody trains, and they are placed."""
        result = tiny_run(*gamma(".inf"), f"algorithm.newcomers={way}", *ALL_NEW)
        assert result.rounds["cohort_size"].tolist() == [3, 3, 0, 3, 3]
        assert result.rounds["train_loss"].isna().tolist() == [False, False, True, False, False]
        assert result.rounds["client_steps"][2] == 0
        assert result.rounds["bytes_up_model"][2] == 0
        assert result.rounds["accuracy_mean"].notna().all()
        assert sorted(read_clusterings(result.path)) == ([0, 3] if way == "fcr" else [0])

    def test_they_go_on_with_the_models_of_those_who_left(self, tiny_run) -> None:
        """Placed by mean embedding; a new FCR relates them alone, so they begin anew."""
        joined, anew = (
            tiny_run(*gamma(".inf"), f"algorithm.newcomers={way}", *ALL_NEW, "rounds=3")
            for way in ("mean_embedding", "fcr")
        )
        before = tiny_run(*ALL_NEW, "rounds=2")
        assert sha(joined) == sha(before)  # one model, of everybody
        assert sha(anew) != sha(joined)

    def test_a_new_fcr_puts_them_where_they_belong(self, known_run) -> None:
        result = known_run(*GROUPS, *ORACLE, self.JOIN, "algorithm.newcomers=fcr", "rounds=5")
        assert result.summary["ari"] == 1.0

    def test_holdout_clients_get_the_model_of_their_group(self, tiny_run) -> None:
        """Updates tell the groups apart, so the nearest mean is that of the client's own group."""
        split = "split={name: label_groups, clients: 20, groups: 5, holdout: 5}"
        update = "algorithm.clustering.signature=update"
        result = tiny_run(*GROUPS, split, *ORACLE, update, "rounds=3")
        assert result.rounds["cohort_size"].tolist() == [15] * 3
        for t in (1, 2, 3):
            scores = result.clients.query(f"part == 'test' and round == {t}")
            assert len(scores) == 20
            assert (scores.groupby("group")["model"].nunique() == 1).all()
            assert scores["model"].nunique() == 5
        assert result.summary["holdout_accuracy_mean"] > 0.9


class TestSignaturesOfModels:
    """They are computed with the initial model whenever a client is heard, as the first ones."""

    JOIN = "events=[{round: 3, kind: join, clients: [3, 4, 5]}]"

    def runs(self, tiny_run, signature: str, *overrides: str) -> list:
        """Newcomers are placed in one run, and related anew in the other."""
        relate = "relate: {name: threshold, gamma: 0.01}"
        stages = f"signature: {signature}, embed: none, distance: l2, {relate}"
        algorithm = f"algorithm={{name: flt, clustering: {{{stages}}}}}"
        ways = ("mean_embedding", "fcr")
        return [tiny_run(algorithm, *overrides, f"algorithm.newcomers={way}") for way in ways]

    @pytest.mark.parametrize("signature", ["losses", "update"])
    def test_newcomers_are_compared_with_those_that_were_clustered(
        self, tiny_run, signature
    ) -> None:
        one_batch = "train={lr: 0.1, epochs: 5, batch_size: 300}"  # updates have no order
        placed, anew = self.runs(tiny_run, signature, self.JOIN, one_batch)
        first, again = read_clusterings(anew.path).values()
        assert first.labels.max() > 0  # clients have used different models since
        np.testing.assert_allclose(again.points[:3], first.points, 0, 1e-6)
        means = np.stack([first.points[first.labels == c].mean(0) for c in set(first.labels)])
        distances = np.linalg.norm(again.points[3:, None] - means, axis=2)  # (3, C)
        last = placed.clients.query("part == 'test' and round == 4").set_index("client")["model"]
        founders = [np.flatnonzero(first.labels == c)[0] for c in distances.argmin(1)]
        assert last[[3, 4, 5]].tolist() == last[founders].tolist()

    @pytest.mark.parametrize(
        "key", ["split.holdout=2", "algorithm.stages=2", "algorithm.dynamic={every: 2}"]
    )
    def test_losses_are_of_as_many_models_in_every_round(self, tiny_run, key) -> None:
        for result in self.runs(tiny_run, "losses", key):
            found = read_clusterings(result.path)
            assert {c.points.shape[1] for c in found.values()} == {1}
            assert result.clients["model"].nunique() > 1


def test_flags_by_hand() -> None:
    """jump 3, floor 0.1: 0.05 counts as 0.1, so 0.31 is a change and 0.29 is not."""

    class Heard:
        clients = np.array([0, 1, 2])
        loss = np.array([0.31, 0.29, 5.0])

    last = np.array([0.05, 0.05, np.nan, np.nan])
    flags = Flags(np.zeros(4, np.bool_), last)
    dynamic = Dynamic(flags="loss")
    new = dynamic.updated(flags, Heard, None, None)
    assert new.raised.tolist() == [True, False, False, False]
    assert new.last[:3].tolist() == [0.31, 0.29, 5.0]
    assert dynamic.is_due(new, 7)
    assert not Dynamic(flags="loss", more_than=1).is_due(new, 7)
    assert Dynamic(every=7).is_due(flags, 7)
    assert not Dynamic(every=7).is_due(flags, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"more_than": -1}, "more_than must be >= 0, got -1"),
        ({"every": 0}, "every must be >= 1 or null, got 0"),
        ({"jump": 1.0}, "jump must be > 1, got 1.0"),
        ({"floor": -0.1}, "floor must be >= 0, got -0.1"),
    ],
)
def test_bad_dynamic_fields(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        Dynamic(**fields)


def test_bad_stages() -> None:
    with pytest.raises(ValueError, match="stages must be >= 1, got 0"):
        Flt(stages=0)


def test_ground_truth_must_be_asked_for(tiny_run) -> None:
    with pytest.raises(ExperimentError, match="uses_ground_truth: true"):
        tiny_run(*GROUPS, "algorithm.clustering.partition=label_counts", "rounds=1")
