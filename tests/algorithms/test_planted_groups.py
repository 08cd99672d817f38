"""Planted groups are found, and where a method cannot see them it does not."""

import pytest
from sklearn.metrics import adjusted_rand_score

from flray.config.experiment import parse_experiment
from flray.config.overrides import override
from flray.records.clusterings import read_clusterings

from scenarios import Result, run_experiment

BASE = {
    "dataset": "digits",
    "split": {"name": "label_groups", "clients": 10},
    "model": "mlp200",
    "algorithm": "flt",
    "train": {"lr": 0.1, "epochs": 1},
    "rounds": 1,
}
ENCODER = "algorithm.clustering.signature.encoder="
FOREIGN = ENCODER + "{dataset: {name: synthetic, num_train: 1000}, model: conv_ae, epochs: 10}"
KNOWN = ENCODER + "{dataset: {name: digits, size: 12}, model: conv_ae, epochs: 10}"
# Digits are few: 250 to 100 centres where MNIST has 500, so UMAP looks at fewer neighbours and γ is
# smaller. Chosen after looking at four seeds (all ARI 1.0); with the paper's 15 and 1.0 min pair
# links everybody on these data.
MIN_PAIR = [
    FOREIGN,
    "algorithm.clustering.signature.k=5",
    "algorithm.clustering.signature.fine_tune=independent",
    "algorithm.clustering.distance=min_pair",
    "algorithm.clustering.embed={name: umap, n_neighbors: 3}",
    "algorithm.clustering.relate.gamma=0.2",
]
# Seeds 0 to 3 had ARI 1.0, 0.95, 1.0 and 1.0.
MATCHING = [
    "dataset={name: digits, size: 12}",
    KNOWN,
    "split.clients=25",
    "algorithm.clustering.signature.k=2",
    "algorithm.clustering.signature.fine_tune=none",
    "algorithm.clustering.embed={name: umap, n_neighbors: 5}",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs with a cache of encoders for all tests here."""
    folder = tmp_path_factory.mktemp("planted")
    count = iter(range(1000))

    def run_one(*overrides: str) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLRAY_CACHE", str(folder / "cache"))
            experiment = parse_experiment(override(BASE, overrides))
            return run_experiment(experiment, folder / str(next(count)))

    return run_one


@pytest.fixture(scope="module")
def found(run):
    """The ARI of the last clustering's partition."""

    def ari(*overrides: str) -> float:
        last = list(read_clusterings(run(*overrides).path).values())[-1]
        return adjusted_rand_score(last.groups, last.labels)

    return ari


@pytest.mark.slow
class TestDigits:
    @pytest.mark.long
    def test_flt_finds_label_groups_by_min_pair(self, found) -> None:
        assert found(*MIN_PAIR) >= 0.95

    @pytest.mark.long
    def test_flt_finds_label_groups_by_matching(self, found) -> None:
        assert found(*MATCHING) >= 0.95

    @pytest.mark.long
    def test_flt_never_sees_labels(self, found) -> None:
        """Groups that call the same images by other names look alike to an encoder."""
        swapped = "split={name: label_swap, clients: 20, groups: 4}"
        assert abs(found(*MATCHING, swapped)) < 0.2

    @pytest.mark.long
    def test_flt_recovers_from_a_change_that_it_can_see(self, run) -> None:
        """As in test_flt.py, with its own eyes instead of ground truth: clients exchange data."""
        moves = [
            {"round": 4, "kind": "exchange", "clients": list(range(j, 25, 5))}
            for j in range(1, 5)
            for _ in range(j)
        ]
        change = [*MATCHING, f"events={moves}", "rounds=8", "algorithm.case=clusters"]
        change += ["train.epochs=2"]
        static, dynamic = run(*change), run(*change, "algorithm.dynamic={flags: events}")
        assert static.summary["ari"] < 0.2
        assert dynamic.summary["ari"] >= 0.95
        assert dynamic.summary["accuracy_mean"] > 0.95
        assert static.summary["accuracy_mean"] < dynamic.summary["accuracy_mean"] - 0.05


FLHC = ["algorithm={name: flhc, rounds_before: 2}", "rounds=2", "participation=0.2"]
ON_MNIST = ["dataset=mnist", "split.clients=40", "split.samples_per_client=300"]


@pytest.mark.data
class TestMnist:
    """FL+HC, FLIS and REPA with an MLP, FLT with a small encoder; the experiments' own files have
    more."""

    def test_flhc_finds_label_groups(self, found) -> None:
        auto = "algorithm.clustering.partition={name: hierarchical, number: auto}"
        assert found(*ON_MNIST, *FLHC, auto) >= 0.95

    @pytest.mark.long
    def test_flhc_finds_swapped_labels(self, found) -> None:
        split = "split={name: label_swap, clients: 40, groups: 4}"
        auto = "algorithm.clustering.partition={name: hierarchical, number: auto}"
        more = ["algorithm.rounds_before=5", "rounds=5", "train.epochs=3"]
        assert found(*ON_MNIST[:1], split, *FLHC, *more, auto) == 1.0

    # Seeds 0, 1, 2 had ARI 1.0 in all but the last, which had -0.04, 0.18 and 0.06.
    FLIS = ("dataset=mnist", "algorithm=flis_hc", "participation=0.1", "train.lr=0.05")
    REPA = ("dataset=mnist", "algorithm={name: repa, rounds_before: 3}", "rounds=3")

    @pytest.mark.long
    def test_flis_hc_finds_label_groups(self, found) -> None:
        split = "split={name: label_groups, clients: 40, samples_per_client: 300, server: 500}"
        assert found(*self.FLIS, split) >= 0.95

    @pytest.mark.long
    def test_flis_hc_finds_swapped_labels(self, found) -> None:
        """Clients that swap other labels agree on six digits of ten at most: β is 0.7."""
        split = "split={name: label_swap, clients: 20, groups: 4, server: 500}"
        beta = "algorithm.clustering.partition.threshold=0.3"
        assert found(*self.FLIS, split, beta) >= 0.95

    @pytest.mark.long
    def test_repa_finds_label_groups(self, found) -> None:
        number = "algorithm.clustering.partition.number=5"
        assert found(*self.REPA, *ON_MNIST[1:], number) >= 0.95

    @pytest.mark.long
    def test_repa_never_sees_labels(self, found) -> None:
        split = "split={name: label_swap, clients: 20, groups: 4}"
        number = "algorithm.clustering.partition.number=4"
        assert abs(found(*self.REPA, split, number)) < 0.2

    # FLT as it is set up, on a GPU: 40 epochs on Fashion-MNIST (all its training images, none of
    # them for validation), fine-tuning in turn, γ 1.0, 100 clients, seeds 0, 1, 2. Matching with
    # k = 2 finds label_groups with ARI 1.0, 1.0, 1.0; with k = 5 it over-splits into 9, 9 and 11
    # clusters; min pair with k = 5 finds 4, 5 and 4 components. Of label_swap all three seeds make
    # one component, ARI 0.0.
    FLT = (
        ENCODER + "{dataset: fashion_mnist, model: conv_ae, epochs: 1}",
        "algorithm.clustering.signature.k=2",
        "algorithm.clustering.signature.fine_tune=none",
        "dataset=mnist",
        "participation=0.1",
    )

    @pytest.mark.long
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_flt_finds_label_groups_by_matching(self, found, seed) -> None:
        split = "split={name: label_groups, clients: 100, samples_per_client: 300}"
        assert found(*self.FLT, split, f"seed={seed}") >= 0.95

    @pytest.mark.long
    def test_flt_never_sees_labels(self, found) -> None:
        split = "split={name: label_swap, clients: 100, groups: 4}"
        assert abs(found(*self.FLT, split)) < 0.1
