"""Tables with owners: rows of a CSV or Parquet file, or of a data frame."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from flray.data.checks import check_literals, refuse_rows
from flray.data.dataset import Dataset
from flray.data.datasets.own_files import Columns, Names, read_table
from flray.data.owned import Rows, coded
from flray.errors import ExperimentError

if TYPE_CHECKING:
    import pandas as pd

Task = Literal["auto", "classes", "numbers"]
MOST_CATEGORIES = 100  # of a column that becomes one-hot


@dataclass(frozen=True)
class Table:
    """Rows of a CSV or Parquet file, one example each; the other columns are features.

    Columns of text become one-hot. Numbers are scaled to mean 0 and std 1 on the training rows.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"city": ["b", "a"], "sex": ["m", "f"], "age": [40, 50], "y": [0, 1]})
    >>> data = Table("visits.csv", client="city", target="y").of(frame, "visits")
    >>> data.client_names, data.images.tolist()  # age, sex_f, sex_m
    (('a', 'b'), [[50.0, 1.0, 0.0], [40.0, 0.0, 1.0]])
    """

    file: str  # Path or URL of a .csv or .parquet file
    client: Names  # Column with the owner of each row; several are joined
    target: str  # Column to predict
    group: str | None = None  # Column with the kind of each owner. None: not known
    time: str | None = None  # Column with the time of each row, numbers or dates. None: not known
    features: tuple[str, ...] | None = None  # Columns used as inputs. None: all others
    # What the target is. auto: text and whole numbers are classes, other numbers are predicted
    task: Task = "auto"

    def __post_init__(self) -> None:
        check_literals(self)

    def load(self) -> Dataset:
        return self.of(read_table(self.file), Path(self.file).stem)

    def of(self, frame: "pd.DataFrame", name: str) -> Dataset:
        """The dataset of a data frame; columns that it names by numbers have these as texts."""
        if not hasattr(frame, "set_axis"):
            raise ExperimentError(
                f"{name} must be a pandas DataFrame, got {type(frame).__name__}; pandas.DataFrame "
                "makes one of a mapping of columns, pandas.read_csv of a file"
            )
        frame = frame.set_axis(frame.columns.map(str), axis=1)
        columns = Columns.of_frame(name, frame)
        owners = (self.client,) if isinstance(self.client, str) else self.client
        special = {*owners, self.target, self.group, self.time}
        others = [column for column in frame.columns if column not in special]
        chosen = others if self.features is None else list(self.features)
        if self.target in chosen:
            raise ExperimentError(f"{self.target} is the target: leave it out of dataset.features")
        for column in (*filter(None, (*owners, self.group)), self.target, *chosen):
            columns[column]  # refuses one that is missing
            refuse_wrong_values(frame[column])
        time = columns.named(self.time)  # first: with a misspelt name its texts would be features
        features, is_number = features_of(frame[chosen])
        return Rows(
            inputs=features,
            targets=self._targets(frame[self.target]),
            client=columns.joined(self.client),
            group=columns.named(self.group),
            time=time,
            columns={k: a for k, a in columns.arrays.items() if k != self.target},
            scaled=is_number,
        ).dataset(name)

    def _targets(self, column: "pd.Series[Any]") -> NDArray[Any]:
        """Classes as numbers, or floats."""
        values = column.to_numpy()
        if self.task == "numbers" and values.dtype.kind not in "iuf":
            raise ExperimentError(f"task: numbers needs numbers, {self.target} is {column.dtype}")
        if self.task == "numbers" or (self.task == "auto" and values.dtype.kind == "f"):
            return values.astype(np.float32)
        return coded(self.target, values)[0]


def features_of(frame: "pd.DataFrame") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(N, F) numbers first, then one-hot columns of texts; and (F,) which are numbers."""
    import pandas as pd

    if frame.columns.empty:
        raise ExperimentError("the table has no column left to be a feature")
    numbers = frame.select_dtypes(include=["number", "bool"])
    texts = [name for name in frame.columns if name not in numbers]
    for name in texts:
        if frame[name].nunique() > MOST_CATEGORIES:
            raise ExperimentError(
                f"{name} has {frame[name].nunique()} different texts; at most {MOST_CATEGORIES} "
                "become one-hot features: name the columns to use in dataset.features"
            )
    one_hot = [pd.get_dummies(frame[name].astype(str), prefix=str(name)) for name in texts]
    features = pd.concat([numbers, *one_hot], axis=1).to_numpy(np.float64)
    return features, np.arange(features.shape[1]) < numbers.shape[1]


def refuse_wrong_values(column: "pd.Series[Any]") -> None:
    """Refuse missing and infinite values, and numbers that a text or a comma made text."""
    import pandas as pd

    name, advice = column.name, "correct them or leave the column out"
    refuse_rows(column.isna().to_numpy(), f"{name} has no value", "fill or remove them")
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    refuse_rows(np.isinf(numbers), f"{name} is infinite", advice)
    is_large = np.abs(numbers) > np.finfo(np.float32).max
    refuse_rows(
        is_large, f"{name} is too large for float32", "choose another unit, or its logarithm"
    )
    is_text = np.isnan(numbers)
    if 2 * is_text.sum() < len(column):
        text = column.iloc[is_text.argmax()]
        refuse_rows(is_text, f"{name} has the text {text!r} among its numbers", advice)
    with_points = pd.to_numeric(column.astype(str).str.replace(",", "."), errors="coerce")
    if is_text.any() and with_points.notna().all():
        text = column.iloc[is_text.argmax()]
        refuse_rows(is_text, f"{name} has a decimal comma, as {text!r}", "write decimal points")
