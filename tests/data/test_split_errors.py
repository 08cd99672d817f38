"""What cannot be dealt is refused, and the message names the field and the numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import flray
from flray.data import SPLITS
from flray.data.dataset import Dataset, Normalization
from flray.data.datasets.synthetic import Synthetic
from flray.data.parts import Deal
from flray.data.splits.by_writer import ByWriter
from flray.data.splits.dirichlet import Dirichlet
from flray.data.splits.iid import Iid
from flray.data.splits.image_shift import ImageShift
from flray.data.splits.label_groups import LabelGroups
from flray.data.splits.label_skew import LabelSkew
from flray.data.splits.label_swap import LabelSwap
from flray.data.splits.options import SplitOptions
from flray.data.splits.pathological import Pathological
from flray.data.splits.power_law_groups import PowerLawGroups
from flray.data.splits.rotation import Rotation
from flray.data.tensors import from_tensors
from flray.errors import ExperimentError

from scenarios import TINY

GREY = Synthetic(num_train=100, num_test=50, size=2).load()
DEALING = sorted(set(SPLITS) - {"natural"})
DATASET = replace(GREY, images=np.repeat(GREY.images, 3, axis=1), source=np.arange(150) // 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clients": 0}, r"clients must be >= 1( or null)?, got 0"),
        ({"validation": 1.0}, r"validation must be in \[0, 1\), got 1.0"),
        ({"validation": -0.1}, r"validation must be in \[0, 1\), got -0.1"),
        ({"validation": float("nan")}, "validation .* got nan"),
        ({"test_fraction": 1.5}, r"test_fraction must be in \[0, 1\), got 1.5"),
        ({"test": "own"}, "unknown test 'own'; known: own_split, proportional, all_of_labels"),
        (
            {"test": "own_split", "validation": 0.5, "test_fraction": 0.5},
            r"validation \+ test_fraction must be below 1.* got 0.5 \+ 0.5",
        ),
        ({"test": "proportional", "test_size": 0}, "test_size must be >= 1 or null, got 0"),
        ({"test": "own_split", "test_size": 5}, "test_size .* test: proportional, got .*own_split"),
        (
            {"pool": "all", "test": "all_of_labels"},
            "pool: all deals the test images too.* own_split, got test: all_of_labels",
        ),
        ({"server": -1}, "server must be >= 0, got -1"),
        ({"holdout": -1}, "holdout must be >= 0, got -1"),
        ({"holdout": 10}, "holdout must be smaller than clients.* got holdout 10 of 10"),
    ],
)
def test_shared_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    for name in DEALING:
        with pytest.raises(ValueError, match=message):
            SPLITS[name](**{"clients": 10, **fields})


@pytest.mark.parametrize("name", sorted(set(DEALING) - {"by_writer"}))
def test_more_clients_than_images_is_refused(name: str) -> None:
    with pytest.raises(ExperimentError, match="101 clients for 100 training images of synthetic"):
        SPLITS[name](clients=101).split(DATASET, 0)


@pytest.mark.parametrize("name", DEALING)
def test_server_larger_than_a_class_is_refused(name: str) -> None:
    with pytest.raises(ExperimentError, match=r"server 101 needs 11 .* class 0, .* has 10; lower"):
        SPLITS[name](clients=10, server=101).split(DATASET, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Iid(clients=5, samples_per_client=0), "samples_per_client must be >= 1"),
        (lambda: Pathological(clients=5, labels_per_client=0), "labels_per_client must be >="),
        (lambda: Pathological(clients=5, variant="shard"), "unknown variant .* exact, shards"),
        (lambda: LabelGroups(clients=5, scenario="rings"), "unknown scenario .* disjoint, ring"),
        (lambda: LabelGroups(clients=5, groups=0), "groups must be >= 1, got 0"),
        (
            lambda: LabelGroups(clients=5, scenario="ring", groups=2),
            "groups must be >= 3, got 2",
        ),
        (lambda: LabelGroups(clients=5, overlap=True), "overlap needs scenario: ring"),
        (lambda: LabelGroups(clients=5, drawn=True), "drawn needs samples_per_client.* got None"),
        (
            lambda: LabelGroups(
                clients=5, scenario="ring", overlap=True, drawn=True, samples_per_client=9
            ),
            "no overlap.* got 9 and overlap true",
        ),
        (lambda: LabelSwap(clients=5, groups=0), "groups must be >= 1, got 0"),
        (lambda: Dirichlet(clients=5, alpha=0.0), "alpha must be > 0, got 0.0"),
        (lambda: Dirichlet(clients=5, min_samples=0), "min_samples must be >= 1, got 0"),
        (lambda: Dirichlet(clients=5, max_tries=0), "max_tries must be >= 1, got 0"),
        (lambda: LabelSkew(clients=5, share=0.0), r"share must be in \(0, 1\], got 0.0"),
        (lambda: LabelSkew(clients=5, share=1.1), r"share must be in \(0, 1\], got 1.1"),
        (lambda: PowerLawGroups(clients=5, groups=0), "groups must be >= 1, got 0"),
        (lambda: Rotation(clients=5, degrees=(0, 45)), "degrees .* multiples of 90, got 45"),
        (lambda: Rotation(clients=5, degrees=(0, 360)), r"different angles.* got \[0, 360\]"),
        (lambda: Rotation(clients=5, degrees=()), r"different angles.* got \[\]"),
        (lambda: ImageShift(clients=5, form="all"), "unknown form 'all'; known: shared, own"),
        (lambda: ImageShift(clients=5, labels="x"), "unknown labels 'x'; known: iid, skew, dir"),
        (lambda: ImageShift(clients=5, pipelines=("blurr",)), "unknown pipelines 'blurr'; known: "),
        (lambda: ImageShift(clients=5, pipelines=("blur",)), "own needs at least 2 pipelines"),
        (
            lambda: ImageShift(clients=5, form="shared", pipelines=("blur", "blur")),
            r"shared needs at least 1 pipelines, all different; got \['blur', 'blur'\]",
        ),
        (lambda: ImageShift(clients=5, samples_per_client=0), "samples_per_client must be >="),
        (lambda: ImageShift(clients=5, major_classes=0), "major_classes must be >= 1"),
        (
            lambda: ImageShift(clients=5, major_share=1.0),
            r"major_share must be in \[0, 1\), got 1.0",
        ),
        (lambda: ImageShift(clients=5, alpha=0.0), "alpha must be > 0, got 0.0"),
        (lambda: ImageShift(clients=5, max_tries=0), "max_tries must be >= 1, got 0"),
        (lambda: ByWriter(min_samples=0), "min_samples must be >= 1, got 0"),
    ],
)
def test_own_fields_are_checked(build: Callable[[], object], message: str) -> None:
    """A plain ValueError, before which whoever builds the split puts its name."""
    with pytest.raises(ValueError, match=message) as raised:
        build()
    assert not isinstance(raised.value, ExperimentError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            Iid(clients=5, samples_per_client=21),
            "samples_per_client 21 needs 105 images for 5 clients, there are 100",
        ),
        (
            Pathological(clients=5, labels_per_client=11),
            "labels_per_client must be at most the 10 classes of synthetic, got 11",
        ),
        (
            Pathological(clients=11, labels_per_client=10),
            "label 0 has 10 training images for the 11 clients",
        ),
        (
            LabelGroups(clients=5, groups=3),
            "groups must divide the 10 classes, got 3.* 1, 2, 5, 10",
        ),
        (LabelGroups(clients=4, groups=5), r"groups must be between 1 and clients \(4\), got 5"),
        (
            LabelGroups(clients=55, groups=5),
            "label 0 has 10 training images for the 11 clients",
        ),
        (
            LabelGroups(clients=5, samples_per_client=1),
            "samples_per_client must be >= 2 or null, got 1",
        ),
        (LabelSwap(clients=10, groups=6), "groups must be at most 5, .* got 6"),
        (LabelSwap(clients=3, groups=4), r"groups must be between 1 and clients \(3\), got 4"),
        (Dirichlet(clients=20), "min_samples 10 for 20 clients needs 200 images, there are 100"),
        (
            Dirichlet(clients=10, max_tries=3),
            r"no Dirichlet draw of 3 \(max_tries\) gave .* min_samples 10 .*raise alpha",
        ),
        (LabelSkew(clients=11, share=1.0), "label 0 has 10 training images for the 11 cli"),
        (
            PowerLawGroups(clients=20, groups=8),
            "groups of 2 consecutive classes use up the 10 classes before the last of 8 groups",
        ),
        (PowerLawGroups(clients=9), r"groups must be between 1 and clients \(9\), got 10"),
        (
            PowerLawGroups(clients=60),
            "group 0 has 10 images for 6 clients, the power law needs at least 2 a client",
        ),
        (Rotation(clients=3), r"groups must be between 1 and clients \(3\), got 4"),
        (
            ImageShift(clients=5),
            "samples_per_client 400 needs 2000 images for 5 clients, there are 100; lower",
        ),
        (
            ImageShift(clients=5, samples_per_client=20),
            r"each of 100 draws \(max_tries\) with labels: skew .* 10 to 10 .*client \(20\)",
        ),
        (
            ImageShift(clients=5, samples_per_client=18, labels="dirichlet", max_tries=3),
            r"each of 3 draws \(max_tries\) with labels: dirichlet",
        ),
        (
            ImageShift(clients=5, samples_per_client=10, major_classes=11),
            "major_classes must be at most the 10 classes, got 11",
        ),
        (
            ByWriter(clients=11),
            r"synthetic has 10 writers with at least 1 .* \(min_samples\), 11 are needed; lower",
        ),
        (ByWriter(min_samples=11), "synthetic has 0 writers with at least 11 .* 1 are needed"),
        (ByWriter(holdout=10), "holdout must be smaller than clients.* got holdout 10 of 10"),
        (
            Pathological(clients=5, test_size=11, labels_per_client=2),
            "test_size 11 needs 6 test images of one label, there are 5; lower test_size",
        ),
    ],
)
def test_deals_that_cannot_be_made_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.split(DATASET, 0)


def test_client_dealt_nothing_is_named() -> None:
    # Source 1 has one image for two clients.
    source = np.array([0] * 9 + [1])
    labels = np.zeros(10, np.int64)
    blank = np.zeros((10, 1, 2, 2), np.uint8)
    unit = Normalization((0.0,), (1.0,))
    dataset = Dataset("tiny", blank, labels, 10, 1, unit, source=source)
    with pytest.raises(ExperimentError, match=r"client 3 was dealt no data \(1 of 4 clients\)"):
        Iid(clients=4, by_source=True, test="own_split").split(dataset, 0)


def test_client_without_test_images_is_named() -> None:
    dataset = Synthetic(num_train=100, num_test=0, size=2).load()
    with pytest.raises(
        ExperimentError, match=r"client 0 would have no test data.*set split\.test="
    ):
        Iid(clients=5).split(dataset, 0)
    assert min(map(len, Iid(clients=5, test="own_split").split(dataset, 0).test)) == 4


@pytest.mark.parametrize(
    ("options", "asker"), [(Iid(clients=5, by_source=True), "by_source"), (ByWriter(), "by_writer")]
)
def test_source_that_is_not_known_is_asked_for_in_vain(options: Any, asker: str) -> None:
    with pytest.raises(ExperimentError, match=f"{asker} needs a dataset that .* synthetic does no"):
        options.split(GREY, 0)


def test_writer_without_test_images_among_others_who_have_some_is_named() -> None:
    source = np.concatenate([np.arange(100) // 10, np.arange(50) // 10])  # 5 to 9 are not tested
    with pytest.raises(ExperimentError, match="writer 5 has no images in the test part, 5 other"):
        ByWriter().split(replace(GREY, source=source), 0)


def test_pipelines_that_need_colour_are_refused_without() -> None:
    message = (
        r"pipelines grayscale, hue need images with 3 channels, those of synthetic have 1; say"
    )
    with pytest.raises(ExperimentError, match=message) as caught:
        ImageShift(clients=5, samples_per_client=10).split(GREY, 0)
    named = str(caught.value).split("split.pipelines=[")[1].rstrip("]").split(", ")
    ImageShift(clients=5, samples_per_client=10, pipelines=tuple(named)).split(GREY, 0)


@pytest.mark.parametrize(
    "options",
    [Rotation(clients=4), ImageShift(clients=10, form="shared", samples_per_client=5)],
)
def test_images_that_are_not_square_are_not_rotated(options: Any) -> None:
    wide = replace(DATASET, images=np.repeat(DATASET.images, 2, axis=3))
    with pytest.raises(ExperimentError, match=r"only square images can be rotated, got \(2, 4\)"):
        options.split(wide, 0)


@pytest.mark.parametrize("name", DEALING)
def test_splits_made_of_labels_refuse_a_regression(name: str) -> None:
    numbers = replace(DATASET, labels=np.linspace(0, 1, 150, dtype=np.float32), num_classes=0)
    with pytest.raises(ExperimentError, match="targets of synthetic are numbers: set split: nat"):
        SPLITS[name](clients=10).split(numbers, 0)


@pytest.mark.parametrize("name", ["rotation", "image_shift"])
def test_splits_of_pixels_refuse_a_table(name: str) -> None:
    table = replace(DATASET, images=np.zeros((150, 7), np.float32))
    with pytest.raises(ExperimentError, match=r"examples of synthetic have the shape \(7,\)"):
        SPLITS[name](clients=4).split(table, 0)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (ImageShift(clients=2, pipelines=("identity", "invert")), "split image_shift"),
        (Iid(clients=2, server=3, server_from="synthetic"), "split.server_from=synthetic"),
    ],
)
def test_images_of_floats_are_refused_where_others_are_made_of_bytes(
    options: Any, what: str
) -> None:
    images = Synthetic(num_train=40, num_test=20, size=8).load()
    floats = replace(images, images=(images.images / 255).astype(np.float32))
    with pytest.raises(ExperimentError, match=f"{what} needs images of bytes.*float32"):
        options.split(floats, seed=0)


def test_a_label_without_images_is_named() -> None:
    images = Synthetic(num_train=40, num_test=20, size=8).load()
    without = replace(images, labels=np.where(images.labels == 0, 1, images.labels))
    with pytest.raises(ExperimentError, match="label 0 has no training images"):
        LabelGroups(clients=5, groups=5).split(without, seed=0)


def test_training_and_test_images_of_two_kinds_are_refused() -> None:
    x, y = np.zeros((4, 5, 5), np.uint8), np.array([0, 1, 0, 1])
    with pytest.raises(ExperimentError, match="training images are uint8 and test images float32"):
        from_tensors(x, y, x / 255, y)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((20, 18, 6, 8), "each of 20 training images, got 18 labels; x_train and y_train"),
        ((20, 20, 6, 8), "each of 6 test images, got 8 labels; x_test and y_test"),
        ((20, 18), "each of 20 training images, got 18 labels"),
    ],
)
def test_each_part_has_as_many_labels_as_images(sizes: tuple[int, ...], message: str) -> None:
    """20 + 6 images and 18 + 8 labels are as many in all, shifted by two."""
    arrays = [np.zeros((n, 5, 5)) if k % 2 == 0 else np.arange(n) for k, n in enumerate(sizes)]
    with pytest.raises(ExperimentError, match=message):
        from_tensors(*arrays)


@pytest.mark.parametrize(("given", "missing"), [("x_test", "y_test"), ("y_test", "x_test")])
def test_half_a_test_part_is_refused(given: str, missing: str) -> None:
    parts = {"x_test": np.zeros((4, 5, 5)), "y_test": np.array([0, 1, 0, 1])}
    with pytest.raises(ExperimentError, match=f"x_test and y_test, got no {missing}; give both or"):
        from_tensors(parts["x_test"], parts["y_test"], **{given: parts[given]})


@pytest.mark.parametrize(("part", "value"), [("training", NAN), ("test", INF), ("test", -INF)])
def test_images_that_are_not_finite_are_refused_by_row(part: str, value: float) -> None:
    clean, wrong, y = np.zeros((4, 5, 5)), np.zeros((4, 5, 5)), np.array([0, 1, 0, 1])
    wrong[2:, 3, 4] = value
    x, x_test = (wrong, clean) if part == "training" else (clean, wrong)
    message = rf"{part} images must be finite numbers, got {value} in row 2 \(2 such rows\)"
    with pytest.raises(ExperimentError, match=message):
        from_tensors(x, y, x_test, y)


WRONG_DEALS = {
    "nothing": (None, r"deal must return a Deal\(owned\), got NoneType"),
    "lists": ([[0, 1], [2]], r"client 0 was dealt list \(2,\); expected a NumPy array of whole"),
    "floats": ([np.arange(3.0)], "expected a NumPy array of whole numbers"),
    "test rows": (
        [np.arange(9), np.arange(99, 101)],
        "dealt the rows 0 to 100; expected rows of the training part, 0 to 99",
    ),
    "groups of others": (
        Deal([np.arange(9), np.arange(9, 50)], groups=np.zeros(3, int)),
        "groups of a deal must have a row for each of 2 clients, got 3",
    ),
}


@pytest.mark.parametrize(("dealt", "message"), WRONG_DEALS.values(), ids=WRONG_DEALS.keys())
def test_a_split_of_ones_own_that_deals_no_training_part_is_refused(dealt, message) -> None:
    class Mine(SplitOptions):
        def deal(self, dataset, seed):
            return Deal(dealt) if isinstance(dealt, list) else dealt

    with pytest.raises(ExperimentError, match=message):
        Mine(clients=2).split(DATASET, 0)


def test_a_split_of_ones_own_without_deal_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"split SplitOptions must define deal\(dataset, se"):
        SplitOptions(clients=2).split(DATASET, 0)


@dataclass(frozen=True)
class Returning:
    """A dataset and a split that return text."""

    def load(self) -> str:
        return "x"

    def split(self, dataset: Dataset, seed: int) -> str:
        return "x"


@pytest.mark.parametrize(("kind", "result"), [("dataset", "Dataset"), ("split", "Split")])
def test_what_is_no_dataset_or_split_is_refused(kind, result) -> None:
    with pytest.raises(ExperimentError, match=rf"{kind} .*Returning: .* a {result}, got str"):
        flray.run(TINY | {kind: Returning()})
