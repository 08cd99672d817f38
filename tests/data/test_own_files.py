"""Files of the user's own: what is read, and that bad rows are refused by their number."""

from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch

from flray.data.datasets.own_files import Arrays, Series, Text
from flray.data.datasets.tables import Table
from flray.data.owned import Rows, join_clients
from flray.data.split import Split
from flray.data.splits.natural import Natural
from flray.errors import ExperimentError

from scenarios import place

VISITS = pd.DataFrame(
    {
        "hospital": ["north", "south", "north", "south", "north"],
        "kind": ["city", "farm", "city", "farm", "city"],
        "date": ["2016-01-01", "2016-01-01", "2016-01-03", "2016-01-04", "2016-01-05T12:00"],
        "age": [40, 50, 60, 70, 80],
        "sex": ["f", "m", "f", "f", "m"],
        "outcome": ["well", "ill", "ill", "well", "well"],
    }
)
COLUMNS = {"client": "hospital", "target": "outcome", "group": "kind", "time": "date"}


def table(frame: pd.DataFrame, **changed):
    return Table(file="visits.csv", **(COLUMNS | changed)).of(frame, "visits")


def test_a_table_is_ordered_by_client_and_texts_become_one_hot() -> None:
    data = table(VISITS)
    assert data.client_names == ("north", "south")
    assert data.source.tolist() == [0, 0, 0, 1, 1]
    assert data.images.tolist() == [[40, 1, 0], [60, 1, 0], [80, 0, 1], [50, 0, 1], [70, 1, 0]]
    assert data.labels.tolist() == [1, 0, 1, 0, 1]  # ill, well
    assert (data.group_names, data.groups.tolist()) == (("city", "farm"), [0, 1])
    days = data.columns["time"][:, 0] / 86_400
    assert (days - days[0]).tolist() == [0, 2, 4.5, 0, 3]
    assert data.scaled.tolist() == [True, False, False]


STAMPS = 1.6e9 + np.array([0.0, 1.0, 2.0, 3.0])  # float32 has steps of 128 here


@pytest.mark.parametrize("kind", [float, int])
def test_numbers_far_from_zero_are_scaled_before_they_become_float32(kind, tmp_path) -> None:
    """Rows 0 and 2 are trained on: mean 1 and standard deviation 1 above 1.6e9."""
    x = STAMPS.astype(kind)[:, None]
    np.savez(tmp_path / "x.npz", x=x, y=np.zeros(4), client=np.zeros(4))
    frame = pd.DataFrame({"owner": 0, "seen": x[:, 0], "y": 0.5})
    for data in (
        Arrays(str(tmp_path / "x.npz"), standardise=True).load(),
        Table("x.csv", client="owner", target="y").of(frame, "x"),
    ):
        data = data.standardised(np.array([0, 2]))
        ids = np.arange(4)
        examples = place(data, Split(ids, data.labels, [ids], [ids], [ids]), torch.float32)
        x, _ = examples.batch(torch.arange(4))
        assert x.dtype == examples.images.dtype == torch.float32
        assert x.flatten().tolist() == [-1, 0, 1, 2]


def test_named_features_are_the_only_ones_and_numbers_may_be_predicted() -> None:
    data = table(VISITS, target="age", features=("sex",), task="numbers")
    assert data.images.shape == (5, 2)
    assert (data.num_classes, data.num_outputs, data.labels.dtype) == (0, 1, np.float32)


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_a_file_is_read_from_a_path_the_data_folder_or_a_url(ending, tmp_path, monkeypatch) -> None:
    file = tmp_path / f"visits.{ending}"
    VISITS.to_parquet(file) if ending == "parquet" else VISITS.to_csv(file, index=False)
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    expected = table(VISITS)
    for where in (str(file), file.name, *urls_of(file)):
        data = Table(file=where, **COLUMNS).load()
        assert np.array_equal(data.images, expected.images), where
        assert np.array_equal(data.columns["time"], expected.columns["time"]), where


def urls_of(file: Path) -> tuple[str, str]:
    """Of a copy in memory, and of the file itself."""
    with fsspec.open(f"memory://{file.name}", "wb") as stream:
        stream.write(file.read_bytes())
    return f"memory://{file.name}", f"file://{file}"


def test_arrays_series_and_texts_are_read_from_urls(tmp_path) -> None:
    value = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez(tmp_path / "x.npz", x=value, y=np.zeros(2), client=np.arange(2), value=value)
    (tmp_path / "play.txt").write_text("ROMEO:\nabcabcabc\n")
    for url in urls_of(tmp_path / "x.npz"):
        assert Arrays(url).load().images.tolist() == value.tolist()
        assert len(Series(url, window=2, horizon=1).load().labels) == 4
    for url in urls_of(tmp_path / "play.txt"):
        assert len(Text(url, length=3).load().labels) == 3
    with pytest.raises(ExperimentError, match=r"memory://gone.csv cannot be read \(FileNotFound"):
        Table("memory://gone.csv", client="a", target="b").load()


@pytest.mark.parametrize(
    ("separator", "encoding"), [(";", "utf-8"), ("\t", "utf-8"), (",", "utf-8-sig")]
)
def test_other_separators_a_mark_and_an_index_change_nothing(separator, encoding, tmp_path) -> None:
    file = tmp_path / "visits.csv"
    VISITS.to_csv(file, sep=separator, encoding=encoding)  # the index is a column without a name
    assert np.array_equal(Table(str(file), **COLUMNS).load().images, table(VISITS).images)


LINES = VISITS.assign(sex=["f", "m", "é", "f", "m"]).to_csv(index=False)
BAD_FILES = [
    (b"", r"visits.csv cannot be read \(EmptyDataError"),
    (LINES.splitlines()[0].encode(), "visits has no rows"),
    (LINES.encode("latin-1"), "no text in UTF-8, first in line 4; save it as UTF-8"),
    (LINES.encode("utf-16"), "no text in UTF-8, first in line 1"),
    (LINES.replace("age", "kind", 1).encode(), "visits has two columns 'kind'; rename"),
    (LINES.replace("40", "40,41", 1).encode(), "rows have more values than the header has names"),
    (LINES.replace("60", "60,61", 1).encode(), "Expected 6 fields in line 4, saw 7"),
    (LINES.replace("70", "inf", 1).encode(), r"age is infinite in row 3 \(1 such row\)"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(content, message, tmp_path) -> None:
    (tmp_path / "visits.csv").write_bytes(content)
    with pytest.raises(ExperimentError, match=message) as caught:
        Table(str(tmp_path / "visits.csv"), **COLUMNS).load()
    assert "\n" not in str(caught.value)


def changed(row: int, column: str, value: object) -> pd.DataFrame:
    frame = VISITS.astype(object) if column == "age" else VISITS.copy()
    frame.loc[row, column] = value
    return frame


BAD = [
    (VISITS, {"target": "result"}, "visits has no column 'result'; it has age, date, hospital"),
    (VISITS, {"group": "region"}, "visits has no column 'region'"),
    (
        VISITS.sample(101, replace=True).assign(date=range(101)).astype({"date": str}),
        {"time": "day"},
        "no column 'day'",
    ),
    (VISITS, {"features": ("age", "weight")}, "visits has no column 'weight'"),
    (changed(3, "outcome", None), {}, r"outcome has no value in row 3 \(1 such row\); fill"),
    (changed(2, "hospital", None), {}, r"hospital has no value in row 2 \(1 such row\)"),
    (changed(1, "kind", None), {}, "kind has no value in row 1"),
    (changed(1, "age", "old"), {}, "age has the text 'old' among its numbers in row 1"),
    (changed(4, "age", None), {}, "age has no value in row 4"),
    (changed(2, "date", "someday"), {}, "time is neither a number nor a date in row 2 .* as 2016-"),
    (changed(2, "date", "2015-01-01"), {}, "time of client north goes back in row 2 .* sort"),
    (
        changed(3, "kind", "city"),
        {},
        r"client south, farm in row 1, has another group in row 3 \(1 such row\); .* one group",
    ),
    (changed(2, "date", None), {}, "time is neither a number nor a date in row 2"),
    (
        VISITS.astype({"age": "Float64"}).replace({"age": 60}, pd.NA),
        {},
        "age has no value in row 2",
    ),
    (VISITS.assign(age=["4,5", "5,5", "60", "7,5", "80"]), {}, "age has a decimal comma, as '4,5'"),
    (VISITS, {"features": ("age", "outcome")}, "outcome is the target: leave it out"),
    (VISITS.iloc[:0], {}, "visits has no rows"),
    (VISITS.set_axis(["hospital", "kind", "date", "age", "age", "outcome"], axis=1), {}, "two col"),
    (changed(1, "age", 1e39), {}, "age is too large for float32 in row 1 .*; choose another unit"),
    (VISITS, {"task": "numbers"}, "task: numbers needs numbers, outcome is"),
    (VISITS[["hospital", "outcome"]], {"group": None, "time": None}, "no column left to be a feat"),
]


@pytest.mark.parametrize(("frame", "keys", "message"), BAD)
def test_a_bad_table_is_refused_in_one_line(frame, keys, message) -> None:
    with pytest.raises(ExperimentError, match=message) as caught:
        table(frame, **keys)
    assert "\n" not in str(caught.value)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown task 'regression'; known: auto, classes, numbers"
    ):
        table(VISITS, task="regression")


def test_too_many_texts_are_no_feature() -> None:
    names = pd.DataFrame({"hospital": "a", "name": [f"n{k}" for k in range(101)], "outcome": 0})
    with pytest.raises(ExperimentError, match="name has 101 different texts; at most 100"):
        table(names, group=None, time=None)


def test_columns_may_have_numbers_as_names() -> None:
    features = pd.DataFrame([[1.0, 2.0], [3.0, 4.0]])  # whose columns pandas names 0 and 1
    frame = features.assign(hospital=["b", "a"], outcome=[1, 0])
    data = table(frame, group=None, time=None)
    assert data.images.tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert table(frame, group=None, time=None, features=("1",)).images.tolist() == [[4.0], [2.0]]
    assert list(frame.columns) == [0, 1, "hospital", "outcome"]  # as the caller has it
    with pytest.raises(ExperimentError, match="visits has two columns '0'; rename or remove one"):
        table(frame.assign(**{"0": 5.0}), group=None, time=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": np.array([1.0, np.nan, 2.0])}, "inputs must be finite .* got nan in row 1"),
        ({"targets": np.array([0.5, np.inf, 1])}, "targets must be finite .* got inf in row 1"),
        (
            {"targets": np.array([1, 0, -2])},
            "targets that are whole .* from 0, got -2 in row 2 .*floats",
        ),
        ({"inputs": np.array(["a", "b", "c"])}, "inputs must be numbers.*got <U1"),
        ({"client": np.array([0, 1])}, "mine: client has 2 rows and inputs 3"),
    ],
)
def test_bad_arrays_are_refused(fields, message) -> None:
    rows = Rows(np.zeros(3), np.zeros(3), np.array([0, 0, 1]))
    with pytest.raises(ExperimentError, match=message):
        replace(rows, **fields).dataset("mine")


def test_times_are_numbers_or_dates_of_any_kind() -> None:
    days = pd.date_range("2024-01-01", periods=3)
    for when in (days, [day.to_pydatetime() for day in days], [str(day) for day in days]):
        data = Rows(np.zeros(3), np.zeros(3), np.zeros(3), time=when).dataset("mine")
        assert np.diff(data.columns["time"][:, 0]).tolist() == [86_400, 86_400]
    with pytest.raises(ExperimentError, match=r"neither a number nor a date in row 1 \(1 such"):
        Rows(np.zeros(2), np.zeros(2), np.zeros(2), time=["2024-01-01", "soon"]).dataset("mine")


def test_how_clients_take_turns_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    owner = np.repeat(["c", "a", "b"], [5, 9, 7])
    rows = Rows(rng.random((21, 4)), rng.random(21), owner, owner, np.arange(21), {"day": owner})
    turns, order = rng.permutation(owner), np.empty(21, np.int64)
    for name in "abc":  # each client's rows keep their order
        order[turns == name] = np.flatnonzero(owner == name)
    fields = ("inputs", "targets", "client", "group", "time")
    other = Rows(*(getattr(rows, name)[order] for name in fields))
    first, second = rows.dataset("x"), other.dataset("x")
    assert (other.client != rows.client).any()
    for name in ("images", "labels", "source", "groups"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    digests = [Natural().split(data, 0).digest() for data in (first, second)]
    assert digests[0] == digests[1]


def test_arrays_of_a_file_have_clients_of_two_columns(tmp_path) -> None:
    file = tmp_path / "x.npz"
    x = np.arange(24, dtype=np.float16).reshape(4, 3, 2)
    np.savez(
        file,
        **{"x": x, "y": np.arange(4, dtype=np.uint8), "who": np.array([2, 1, 2, 1])},
        device=np.array([1, 0, 1, 1]),
        device_names=np.array(["phone", "watch"]),
    )
    data = Arrays(str(file), client=("who", "device"), group="device", standardise=True).load()
    assert data.client_names == ("1/phone", "1/watch", "2/watch")
    assert (data.group_names, data.groups.tolist()) == (("phone", "watch"), [0, 1, 1])
    assert data.labels.dtype == np.int64
    assert data.input_shape == (3, 2)
    scale = data.standardised(np.array([0, 2])).normalization  # of the rows 1 and 0 of the file
    assert scale.mean == (3.5, 5.5, 7.5)
    assert scale.std == pytest.approx([np.std(x[:2, 0].astype(float))] * 3)
    with pytest.raises(
        ExperimentError, match="has no column 'client'; it has device, device_names"
    ):
        Arrays(str(file)).load()


def test_a_missing_file_says_where_it_was_looked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLRAY_DATA", str(tmp_path))
    with pytest.raises(ExperimentError, match=f"no file loads.npz; .* {tmp_path}/loads.npz"):
        Series("loads.npz").load()
    Path(tmp_path / "loads.npz").write_bytes(b"PK")
    with pytest.raises(ExperimentError, match=r"loads\.npz cannot be read"):
        Series("loads.npz").load()


LOADS = pd.DataFrame(
    {
        "hour": [0, 0, 1, 1, 2, 2, 3, 3, 4],
        "meter": ["b", "a"] * 4 + ["b"],
        "kw": [0.0, 10, 1, 11, 2, 12, 3, 13, 4],
    }
)


def series(frame: pd.DataFrame, tmp_path: Path, **keys: int):
    frame.to_parquet(tmp_path / "loads.parquet")
    names = {"value": "kw", "client": "meter", "time": "hour"}
    return Series(str(tmp_path / "loads.parquet"), **names, **keys).load()


def test_a_series_is_cut_into_windows_of_one_client(tmp_path) -> None:
    data = series(LOADS, tmp_path, window=2, horizon=1)
    assert data.images[..., 0].tolist() == [[10, 11], [11, 12], [0, 1], [1, 2], [2, 3]]
    assert data.labels.tolist() == [[12], [13], [2], [3], [4]]
    assert data.source.tolist() == [0, 0, 1, 1, 1]
    assert data.columns["time"].tolist() == [[0, 2], [1, 3], [0, 2], [1, 3], [2, 4]]
    assert len(series(LOADS, tmp_path, window=2, horizon=1, every=3).labels) == 2


def test_a_series_in_rows_is_the_one_in_a_table(tmp_path) -> None:
    value = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez(tmp_path / "loads.npz", value=value, client=np.array(["b", "a"]))
    data = Series(str(tmp_path / "loads.npz"), window=2, horizon=1).load()
    assert data.images[..., 0].tolist() == [[4, 5], [5, 6], [0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (LOADS.drop(4), "the time of client b jumps in row 5 .* as the first one, 1"),
        (LOADS.assign(kw=[0, 1, 2, np.nan, *range(5)]), "inputs must be finite .* nan in row 3"),
        (LOADS.assign(kw=["0", "1", "low", *"345678"]), "finite numbers, got nan in row 2"),
        (LOADS.iloc[:1], "client b has 1 values"),
        (LOADS.iloc[[0, 1, 3, 5, 7]], "client b has 1 values; a window of 2 and a horizon of 1"),
    ],
)
def test_a_bad_series_is_refused(frame, message, tmp_path) -> None:
    frame = frame.reset_index(drop=True)
    with pytest.raises(ExperimentError, match=message):
        series(frame, tmp_path, window=2, horizon=1)


def test_the_next_character_is_the_target(tmp_path) -> None:
    file = tmp_path / "play.txt"
    file.write_text("ROMEO:\nabcab\n\nJULIET:\nba\n\nROMEO:\ncc\n")
    data = Text(str(file), length=3).load()
    letters = np.array(sorted("\nabc"))
    said = ["".join(letters[row]) for row in data.images]
    assert (data.client_names, said) == (("JULIET", "ROMEO"), ["abc", "ab\n"])
    assert ["".join(letters[row]) for row in data.labels] == ["bca", "b\nc"]
    assert (data.num_classes, data.num_outputs, data.has_classes) == (4, 4, False)
    assert data.groups is None
    kinds = Text(str(file), length=1, group={"ROMEO": "hero"}).load()
    assert (kinds.group_names, kinds.groups.tolist()) == (("hero", "other"), [1, 0])
    file.write_text("nobody speaks")
    with pytest.raises(ExperimentError, match=r"play\.txt names no role"):
        Text(str(file)).load()


def test_clients_may_be_pairs_or_torch_datasets() -> None:
    import torch
    from torch.utils.data import TensorDataset

    x, y = torch.arange(6.0).view(3, 2), torch.tensor([0.5, 1.5, 2.5])
    pairs = join_clients([(x[:2], y[:2]), (x[2:], y[2:])])
    sets = join_clients([TensorDataset(x[:2], y[:2]), TensorDataset(x[2:], y[2:])])
    assert np.array_equal(pairs.images, sets.images)
    assert np.array_equal(pairs.labels, sets.labels)
    with pytest.raises(ExperimentError, match=r"client 1 has inputs \(1, 3\) and targets \(1,\)"):
        join_clients([(x, y), (torch.zeros(1, 3), y[:1])])
    with pytest.raises(
        ExperimentError, match="expected at least one client, got none; give a pair"
    ):
        join_clients([])
    with pytest.raises(ExperimentError, match=r"got a mapping; give list\(clients\.values\(\)\)"):
        join_clients({"north": (x, y)})
    with pytest.raises(ExperimentError, match=r"expected a pair .*, got 3 values of tuple"):
        join_clients([list(zip(x, y, strict=True))])
