"""The options that all splits share, and how a deal becomes a split."""

from dataclasses import dataclass, field, replace
from typing import Literal

from flray.data.checks import check_literals
from flray.data.dataset import Dataset
from flray.data.dealing import require_classes
from flray.data.parts import Deal, cut_parts
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.values import require_at_least, require_share

TestRule = Literal["own_split", "proportional", "all_of_labels"]
Pool = Literal["train", "all"]
ServerSource = Literal["train", "test", "synthetic"]


@dataclass(frozen=True)
class PartOptions:
    """Options of all splits: how what each client was dealt is cut into parts.

    A split is a frozen dataclass that inherits from this class, or from `SplitOptions`, and defines
    `deal`; its fields are its keys in YAML.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> @dataclass(frozen=True)
    ... class OddAndEven(PartOptions):
    ...     def deal(self, dataset, seed):
    ...         return Deal(owned=[dataset.train_ids[::2], dataset.train_ids[1::2]])
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()
    >>> OddAndEven(validation=0.2).split(dataset, seed=0).num_train_examples
    array([80, 80])
    """

    validation: float = 0.1  # Share of a client's data that is its validation part
    # Images that are dealt to clients. train: the training part of the dataset; all: training and
    # test part together, as PFLlib does, with test: own_split
    pool: Pool = "train"
    # Test examples of a client. own_split: cut from its own data; proportional: test images with
    # the labels it trains on, in the same proportions; all_of_labels: all test images of these
    # labels
    test: TestRule = "proportional"
    # Share of a client's data that is its test part, with test: own_split
    test_fraction: float = 0.2
    # Test images per client with test: proportional, shared between clients. None: every test image
    # belongs to one client
    test_size: int | None = None
    server: int = 0  # Number of public images held by the server, balanced over classes if possible
    # Source of the public images. train: drawn at random, held by no client. test: the last ones of
    # each class, as FLIS's code takes them; they stay in the test sets, so whatever uses them has
    # seen test images. synthetic: made by the server from random numbers, without any image of the
    # dataset
    server_from: ServerSource = "train"
    holdout: int = 0  # Number of clients, drawn at random, that hold data but never train

    def __post_init__(self) -> None:
        check_literals(self)
        require_share(self, "validation", "test_fraction")
        require_at_least(self, server=0, holdout=0, test_size=1)
        if self.test == "own_split" and self.validation + self.test_fraction >= 1:
            raise ValueError(
                f"validation + test_fraction must be below 1, or nothing is left to train on; "
                f"got {self.validation} + {self.test_fraction}"
            )
        if self.pool == "all" and self.test != "own_split":
            raise ValueError(
                f"pool: all deals the test images too, so none are left to test on: set "
                f"test: own_split, got test: {self.test}"
            )
        if self.test_size is not None and self.test != "proportional":
            raise ValueError(
                f"test_size only means something with test: proportional, got test: {self.test}; "
                f"leave test_size out"
            )

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """The images of each client by dataset and seed; what every split has to define.

        Use `flray.randomness.generator(seed, purpose)` for random numbers, so that equal seeds give
        equal deals on every machine. Must not change the dataset.

        Raises:
            ExperimentError: The dataset does not fit; the message says what to change.
        """
        raise ExperimentError(f"split {type(self).__name__} must define deal(dataset, seed)")

    def split(self, dataset: Dataset, seed: int) -> Split:
        """Deal the images of a dataset to clients, and cut what each was dealt into parts.

        The one method that others call. Equal arguments give equal splits.
        """
        require_classes(dataset)
        if self.pool == "all":
            dataset = replace(dataset, num_train=len(dataset.labels))
        return cut_parts(self.deal(dataset, seed), dataset, self, seed)

    def check_somebody_trains(self, num_clients: int) -> None:
        """Refuse a split in which all clients are held out.

        Args:
            num_clients: All clients, holdout clients included.
        """
        if self.holdout >= num_clients:
            raise ExperimentError(
                f"holdout must be smaller than clients, or nobody trains; "
                f"got holdout {self.holdout} of {num_clients} clients"
            )


@dataclass(frozen=True)
class SplitOptions(PartOptions):
    """Options of splits with a given number of clients.

    >>> from flray.data.splits.iid import Iid
    >>> Iid(clients=0)
    Traceback (most recent call last):
    ValueError: clients must be >= 1, got 0
    """

    clients: int = field(kw_only=True)  # Number of clients M

    def __post_init__(self) -> None:
        require_at_least(self, clients=1)
        super().__post_init__()
        self.check_somebody_trains(self.clients)
