"""Label shares drawn from a Dirichlet distribution (Li et al., "Federated Learning on Non-IID Data
Silos", ICDE 2022, arXiv 2102.02079), by the rule of its code, NIID-Bench."""

from dataclasses import dataclass

import numpy as np

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import gather_pieces, images_by_label, images_to_deal
from flray.data.parts import Deal
from flray.data.splits.options import SplitOptions, TestRule
from flray.errors import ExperimentError
from flray.randomness import generator
from flray.values import require_above_zero, require_at_least


@dataclass(frozen=True)
class Dirichlet(SplitOptions):
    """The images of each label are divided among clients in shares p ~ Dir(alpha).

    A client that holds its fair share N/M gets nothing of later labels. All is drawn again until
    every client has `min_samples` images, at most `max_tries` times.

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> split = Dirichlet(clients=4, alpha=0.5).split(dataset, seed=0)
    >>> bool((split.num_train_examples >= 9).all())  # 10, less one for validation
    True
    """

    test: TestRule = "all_of_labels"
    # Concentration α of Dir(α), drawn over the clients for each label; small is skewed
    alpha: float = 0.1
    min_samples: int = 10  # Fewest images per client; smaller draws are repeated
    max_tries: int = 100  # Number of draws before the split is refused

    def __post_init__(self) -> None:
        super().__post_init__()
        require_above_zero(self, "alpha")
        require_at_least(self, min_samples=1, max_tries=1)

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """Draw until every client has `min_samples` images; refused after `max_tries` draws."""
        pool = images_to_deal(dataset, self, seed)
        if self.min_samples * self.clients > len(pool):
            raise ExperimentError(
                f"min_samples {self.min_samples} for {self.clients} clients needs "
                f"{self.min_samples * self.clients} images, there are {len(pool)}; "
                f"lower min_samples or clients"
            )
        by_label = images_by_label(dataset, pool)
        for attempt in range(self.max_tries):
            rng = generator(seed, "split.deal", attempt)
            owned = deal_by_dirichlet(by_label, self.clients, self.alpha, rng)
            if min(len(ids) for ids in owned) >= self.min_samples:
                return Deal(owned)
        raise ExperimentError(
            f"no Dirichlet draw of {self.max_tries} (max_tries) gave every client min_samples "
            f"{self.min_samples} images (alpha {self.alpha}, {self.clients} clients, "
            f"{len(pool)} images); raise alpha or max_tries, or lower min_samples or clients"
        )


def deal_by_dirichlet(
    by_label: list[Ids], num_clients: int, alpha: float, rng: np.random.Generator
) -> list[Ids]:
    """One draw: clients that already hold their fair share N/M get nothing of the next label.

    Args:
        by_label: The images of each label.
        num_clients: M; a client may end with no images.
        alpha: Concentration of the shares.
        rng: Drawn from once for shares and once for the order of each label that has images.
    """
    fair = sum(len(images) for images in by_label) / num_clients
    pieces: list[tuple[int, Ids]] = []
    sizes = np.zeros(num_clients, np.int64)
    for images in by_label:
        if len(images) == 0:
            continue
        # Shares over all clients, those of full ones set to 0, renormalised: that is a Dirichlet
        # over the others, drawn here as such because the sum to divide by may be 0.
        takers = np.flatnonzero(sizes < fair)
        p = rng.dirichlet(np.full(len(takers), alpha))
        cuts = (np.cumsum(p)[:-1] * len(images)).astype(np.int64)
        slices = np.split(rng.permutation(images), cuts)
        sizes[takers] += [len(ids) for ids in slices]
        pieces += zip(takers.tolist(), slices, strict=True)
    return gather_pieces(num_clients, pieces)
