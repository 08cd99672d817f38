"""What FL+HC's share of clients at 99 % is worth: `python docs/results/shares.py`.

A client tested on 100 images has 99 % if at most one is wrong. Were all clients alike, their share
would follow from the accuracy printed beside it: the chance of at most one error in 100 images.
For each table and for our numbers and the paper's: by how many points shares differ from that, in
the mean and at most; then by how many the differences of ours to the paper's do, and by how many
standard deviations at most, as the chance of each client leaves a share of 100 clients uncertain.
"""

import numpy as np
from count import found_tables
from numpy.typing import NDArray
from scipy.stats import binom

from flray.reports.published import Table
from flray.reports.sheets import Fields

CLIENTS, IMAGES, ERRORS = 100, 100, 1
SHARE, ACCURACY = "pct_clients_target", "acc"  # the columns of a round begin so


def expected_share(accuracy: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of clients in percent, if each is right with this probability in percent.

    >>> expected_share(np.array([98.9, 98.1])).round(1).tolist()
    [69.9, 43.1]
    """
    return np.asarray(100 * binom.cdf(ERRORS, IMAGES, 1 - accuracy / 100))


def standard_deviation(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """That of a share of clients in percent, where each reaches the target with this chance.

    >>> standard_deviation(np.array([50.0, 90.0])).round(1).tolist()
    [5.0, 3.0]
    """
    return np.asarray(np.sqrt(share * (100 - share) / CLIENTS))


def residuals(table: Table, ours: dict[tuple[int, str], Fields]) -> NDArray[np.float64]:
    """(cells, 2) shares less those expected by accuracy: ours, the paper's."""
    numbers = shares_and_accuracies(table, ours)
    return numbers[..., 0] - expected_share(numbers[..., 1])


def shares_and_accuracies(table: Table, ours: dict[tuple[int, str], Fields]) -> NDArray[np.float64]:
    """(cells, 2, 2): ours, the paper's, of each the share and the accuracy beside it."""
    rows = []
    for r, row in enumerate(table.rows):
        for column in (c.key for c in table.columns if c.key.startswith(SHARE)):
            accuracy = column.replace(SHARE, ACCURACY)
            printed = [row.cells[key].value for key in (column, accuracy)]
            if None not in printed and (r, column) in ours:
                measured = [ours[r, key]["value"] for key in (column, accuracy)]
                rows.append([measured, printed])
    return np.array(rows, np.float64)


def main() -> None:
    tables = found_tables()
    print("| table | cells | ours: mean, most | the paper's | differences | standard deviations |")
    print("| --- | --- | --- | --- | --- | --- |")
    for key in ("flhc.2", "flhc.5", "flhc.1", "flhc.4"):
        table, ours = tables[key]
        left = residuals(table, ours)
        columns = np.abs(np.column_stack([left, left[:, 0] - left[:, 1]]))
        texts = [f"{c.mean():.1f}, {c.max():.1f}" for c in columns.T]
        chances = expected_share(shares_and_accuracies(table, ours)[..., 1])
        spread = np.hypot(*standard_deviation(chances).T)  # of a difference
        texts.append(f"{(columns[:, 2] / spread).max():.1f}")
        print(f"| {table.number} | {len(left)} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
