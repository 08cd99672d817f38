"""The global test set: all test images of the dataset, for `evaluate.on: global`."""

from dataclasses import replace

import numpy as np

from flray.data.dataset import Dataset
from flray.data.events import Timeline, grown_table


def with_global_test(timeline: Timeline, dataset: Dataset) -> Timeline:
    """The timeline whose phases have all test images of the dataset as their global test set.

    Test images that nobody holds with the dataset's own label are added at the end of the table of
    examples, so all other examples keep their ids. There is no such set where clients train on test
    images (`split.pool: all`).
    """
    split = timeline.at(1)
    trained = split.original_rows(len(dataset.labels))[np.concatenate(split.train)]
    if not len(dataset.test_ids) or (trained >= dataset.num_train).any():
        return timeline
    base = int(max(split.labels.max(), dataset.labels.max())) + 1
    old = split.image_ids * base + split.labels
    tested = dataset.test_ids * base + dataset.labels[dataset.test_ids]
    table = grown_table(old, tested)
    order = np.argsort(table)
    image_ids, labels = np.divmod(table, base)
    global_test = np.sort(order[np.searchsorted(table, tested, sorter=order)])
    phases = (
        replace(
            phase,
            image_ids=image_ids,
            labels=labels,
            global_test=global_test,
            num_global_only=len(table) - len(old),
        )
        for _, phase in timeline.phases
    )
    rounds = (first for first, _ in timeline.phases)
    return Timeline(tuple(zip(rounds, phases, strict=True)))
