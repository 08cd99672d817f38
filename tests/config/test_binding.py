from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from flray.config.binding import bind_component, bind_dataclass
from flray.errors import ExperimentError


@dataclass(frozen=True)
class Square:
    side: float = 1.0


@dataclass(frozen=True)
class Circle:
    radius: float

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ValueError(f"radius must be > 0, got {self.radius}")


SHAPES = {"square": Square, "circle": Circle}


@dataclass(frozen=True)
class Drawing:
    shape: Annotated[Any, "shape", SHAPES] = field(default_factory=Square)
    colour: Literal["red", "blue"] = "red"
    size: int | None = None
    marks: tuple[float, ...] = ()
    filled: bool = False


def bound(**given: Any) -> tuple[Drawing, dict[str, Any]]:
    return bind_dataclass(Drawing, given, "drawing")


def test_a_nested_component_is_built_from_a_name_or_a_mapping() -> None:
    assert bound(shape="square")[0].shape == Square()
    drawing, plain = bound(shape={"name": "circle", "radius": 2}, marks=[1, 2.5], size=None)
    assert drawing == Drawing(Circle(2.0), marks=(1.0, 2.5))
    assert plain == {
        "shape": {"name": "circle", "radius": 2.0},
        "colour": "red",
        "size": None,
        "marks": [1.0, 2.5],
        "filled": False,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colur": "red"}, r"unknown key 'drawing.colur' \(did you mean 'colour'\?\); known here"),
        ({"colour": "green"}, r"drawing.colour must be one of red, blue, got 'green'"),
        ({"size": "big"}, r"drawing.size must be a whole number, got 'big' \(str\)"),
        ({"size": 1.5}, r"drawing.size must be a whole number, got 1.5 \(float\)"),
        ({"size": True}, r"drawing.size must be a whole number, got True \(bool\)"),
        ({"filled": 1}, r"drawing.filled must be true or false, got 1 \(int\)"),
        ({"marks": 3}, r"drawing.marks must be a list, got 3"),
        ({"marks": [1, "x"]}, r"drawing.marks\[1\] must be a number, got 'x'"),
        (
            {"shape": "sqare"},
            r"unknown shape 'sqare' \(did you mean 'square'\?\); known: circle, sq",
        ),
        ({"shape": {"name": "circle"}}, r"missing key 'drawing.shape.radius'"),
        ({"shape": {"name": "circle", "radius": -1}}, r"shape circle: radius must be > 0, got -1"),
        ({"shape": 7}, r"drawing.shape must be a name or a mapping with a `name`, got 7"),
        ({"shape": "no_such_module:Thing"}, r"shape 'no_such_module:Thing' cannot be imported"),
        ({"shape": "math:nothing"}, r"shape 'math:nothing' cannot be imported"),
    ],
)
def test_what_is_wrong_is_named(given, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        bound(**given)


def test_a_class_from_outside_is_found_in_the_current_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_shapes.py").write_text(
        "class Line:\n    def __init__(self, num_classes: int, length: float = 2.0):\n"
        "        self.length, self.num_classes = length, num_classes\n"
    )
    monkeypatch.chdir(tmp_path)
    given = {"name": "my_shapes:Line", "length": 3}
    component = bind_component("shape", SHAPES, given, "shape", injected=("num_classes",))
    assert component.plain == {"name": "my_shapes:Line", "length": 3.0}
    line = component.build(num_classes=4, image_shape=(1, 2, 3))  # asks for one of the two
    assert (line.length, line.num_classes) == (3.0, 4)
