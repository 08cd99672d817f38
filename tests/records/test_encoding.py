import json
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from flray.errors import ExperimentError
from flray.records.encoding import decode, encode


@dataclass(frozen=True)
class Inner:
    w: torch.Tensor
    name: str


@dataclass(frozen=True)
class Outer:
    inner: Inner
    ids: np.ndarray
    doubled: int = field(init=False, default=0)

    @dataclass(frozen=True)
    class Nested:
        x: int


class NotData:
    pass


class Pair(NamedTuple):
    a: int
    b: int


def through_json(value):
    tree, arrays = encode(value)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), arrays)


PLAIN = [None, True, False, 0, -3, 2**80, 0.1, -0.0, 1e-310, "", "Größe \ud800", [], (), {}]
NESTED = [[1, (2, [3, ()])], {"a/b": {"~": 1}, "a": {"b": (2,)}}, {"dict": {"tensor": "x"}}]


@pytest.mark.parametrize("value", PLAIN + NESTED, ids=repr)
def test_plain_values_survive_with_their_type(value):
    back = through_json(value)
    assert back == value
    assert repr(back) == repr(value)


def test_float_nan_and_infinities_survive():
    nan, up, down = through_json([math.nan, math.inf, -math.inf])
    assert math.isnan(nan)
    assert (up, down) == (math.inf, -math.inf)


NUMPY_DTYPES = ["bool", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (3, 0)], ids=str)
def test_arrays_come_back_as_arrays(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = through_json({"x": array})["x"]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


TORCH_DTYPES = [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)], ids=str)
def test_tensors_come_back_as_tensors(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = through_json([tensor])[0]
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_numpy_scalars_come_back_as_numpy_scalars():
    for scalar in (np.float64(0.1), np.int64(3), np.bool_(True), np.float32("nan")):
        back = through_json(scalar)
        assert type(back) is type(scalar)
        assert back.tobytes() == scalar.tobytes()


def test_layout_in_memory_does_not_matter():
    tensor = torch.arange(6.0).reshape(2, 3)
    views = [tensor.T, tensor[:, ::2], tensor[:1].expand(4, 3), tensor.clone().requires_grad_()]
    for view, back in zip(views, through_json(views), strict=True):
        assert torch.equal(view, back)


def test_encoding_copies_no_contiguous_array():
    array, tensor = np.zeros((2, 3)), torch.zeros(2, 3)
    _, arrays = encode([array, tensor])
    array[0, 0], tensor[0, 0] = 1, 1
    assert [a[0, 0] for a in arrays.values()] == [1, 1]


def test_slashes_in_keys_do_not_mix_paths():
    state = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a~1b": torch.full((1,), 2.0)}
    _, arrays = encode(state)
    assert len(arrays) == 3
    back = through_json(state)
    assert [back["a/b"].item(), back["a"]["b"].item(), back["a~1b"].item()] == [0, 1, 2]


def test_dataclasses_are_rebuilt_by_name():
    outer = Outer(Inner(torch.ones(2), "x"), np.arange(3))
    object.__setattr__(outer, "doubled", 6)
    tree, arrays = encode({"here": outer, "nested": Outer.Nested(3)})
    assert tree["dict"]["here"]["dataclass"] == f"{__name__}:Outer"
    assert sorted(arrays) == ["state/here/ids", "state/here/inner/w"]
    back = decode(tree, arrays)
    assert (type(back["here"]), type(back["here"].inner)) == (Outer, Inner)
    assert (back["here"].inner.name, back["here"].doubled) == ("x", 6)
    assert back["nested"] == Outer.Nested(3)


def test_decode_refuses_what_is_not_a_dataclass():
    for name in (f"{__name__}:NotData", "os:system", "builtins:dict"):
        with pytest.raises(ExperimentError, match="is not a dataclass"):
            decode({"dataclass": name, "fields": {}}, {})
    for name in ("no_such_module:X", "os:no_such_name", "os"):
        with pytest.raises(ExperimentError, match="cannot be imported"):
            decode({"dataclass": name, "fields": {}}, {})


def test_decode_names_fields_that_changed_since():
    with pytest.raises(ExperimentError, match=r"has fields \['name', 'w'\], .* \['name', 'v'\]"):
        decode({"dataclass": f"{__name__}:Inner", "fields": {"name": "x", "v": 1}}, {})


def test_decode_refuses_an_unknown_tag():
    with pytest.raises(ValueError, match="unknown tag"):
        decode({"pickle": "x"}, {})


def test_int_keys_are_refused():
    with pytest.raises(TypeError, match=r"dict at state/c_i: its keys must be str, got 3 \(int\)"):
        encode({"c_i": {3: 1.0}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (NotData(), "NotData at state/x"),
        ({1, 2}, "a set at"),
        (Pair(1, 2), "a Pair at"),
        (Inner, "a type at"),
        (torch.nn.Parameter(torch.zeros(1)), "a Parameter at"),
        (torch.eye(2).to_sparse(), "make it dense"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([None]), "dtype object"),
        (np.zeros(1, dtype=">f4"), "dtype >f4"),
        (np.zeros(1, dtype=np.complex128), "dtype complex128 .*known: bool"),
        (np.ma.zeros(1), "MaskedArray at"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_survive_is_refused_with_its_path(value, message):
    with pytest.raises(TypeError, match=f"cannot checkpoint.*{message}"):
        encode({"x": value})


def test_a_dataclass_that_cannot_be_imported_is_refused_when_saved():
    @dataclass(frozen=True)
    class Local:
        x: int

    with pytest.raises(TypeError, match=r"Local at state/x: .*cannot be imported"):
        encode({"x": Local(1)})
