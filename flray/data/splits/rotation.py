"""Groups that hold their images at different angles (Ghosh et al., "An Efficient Framework for
Clustered Federated Learning", NeurIPS 2020, arXiv 2006.04088: "rotated MNIST")."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flray.data.dataset import Dataset, Ids
from flray.data.dealing import consecutive_groups, deal_evenly, images_to_deal
from flray.data.parts import Deal
from flray.data.pipelines import quarter_turns
from flray.data.splits.options import SplitOptions
from flray.randomness import generator


@dataclass(frozen=True)
class Rotation(SplitOptions):
    """An iid deal; group g sees its images, test images too, turned left by degrees[g].

    >>> from flray.data.datasets.synthetic import Synthetic
    >>> dataset = Synthetic(num_train=200, num_test=100, size=4).load()  # 10 labels
    >>> split = Rotation(clients=4, degrees=(0, 180)).split(dataset, seed=0)
    >>> split.groups, split.new_images.shape  # clients 2 and 3 see 150 images turned
    (array([0, 0, 1, 1]), (150, 1, 4, 4))
    """

    # Rotation of each group to the left, in multiples of 90 degrees
    degrees: tuple[int, ...] = (0, 90, 180, 270)

    def __post_init__(self) -> None:
        super().__post_init__()
        for angle in self.degrees:
            if angle % 90:
                raise ValueError(f"degrees must be multiples of 90, got {angle}")
        if not self.degrees or len({angle % 360 for angle in self.degrees}) < len(self.degrees):
            raise ValueError(
                f"degrees must be different angles, one a group; got {list(self.degrees)}"
            )

    def deal(self, dataset: Dataset, seed: int) -> Deal:
        """The images of each client, and the view in which its group sees them."""
        groups = consecutive_groups(self.clients, len(self.degrees))
        turns = np.array([angle // 90 % 4 for angle in self.degrees])

        def render(view: int, rows: Ids) -> NDArray[np.uint8]:
            return quarter_turns(dataset.images[rows].reshape(-1, *dataset.image_shape), view)

        pool = images_to_deal(dataset, self, seed)
        owned = deal_evenly(pool, self.clients, generator(seed, "split.deal"))
        return Deal(owned, groups=groups, views=turns[groups], render=render)
