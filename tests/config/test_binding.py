import functools
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import yaml

from flray.config.binding import bind_component, bind_dataclass
from flray.config.overrides import override
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


@dataclass(frozen=True)
class Stack:
    layers: Mapping[str, int] | None = None


def test_a_mapping_of_values_is_checked_by_value() -> None:
    given = {"layers": {"top": 2}}
    assert bind_dataclass(Stack, given, "stack") == (Stack({"top": 2}), given)
    for wrong, message in (
        (3, "stack.layers must be a mapping, got 3"),
        ({"top": "x"}, "layers.top"),
    ):
        with pytest.raises(ExperimentError, match=message):
            bind_dataclass(Stack, {"layers": wrong}, "stack")


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
        (
            {"colour:red": None},
            r"unknown key 'drawing.colour:red' \(YAML needs a space after the colon",
        ),
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
        ({"shape": {"name": "circle", "radius": -1}}, r"circle \(.*\): radius must be > 0, got -1"),
        ({"shape": 7}, r"drawing.shape must be a name or a mapping with a `name`, got 7"),
        ({"shape": "my_shapes:Line"}, r"unknown shape 'my_shapes:Line'; known: circle, square$"),
    ],
)
def test_what_is_wrong_is_named(given, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        bound(**given)


def test_a_class_from_outside_is_found_in_the_current_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_shapes.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Line:\n    num_classes: int\n"
        "    length: float = 2.0\n    def __call__(self, points): return points\n"
    )
    monkeypatch.chdir(tmp_path)
    given = {"name": "my_shapes:Line", "length": 3}
    component = bind_component("distance", {}, given, "distance", ("num_classes",))
    assert component.plain == {"name": "my_shapes:Line", "length": 3.0}
    line = component.build(num_classes=4, image_shape=(1, 2, 3))  # asks for one of the two
    assert (line.length, line.num_classes) == (3.0, 4)


class Frame:
    """What a drawing hangs in; built when the size of the wall is known."""

    def __init__(self, wall: float, width: float = 1.0, wood: Literal["oak", "ash"] = "oak"):
        self.wall, self.width, self.wood = wall, width, wood


FRAMES = {"frame": Frame}


@dataclass(frozen=True)
class Hung:
    """Everything a component can have: components, dataclasses, a class that is built later."""

    frame: Annotated[Any, "frame", FRAMES, ("wall",)]
    drawing: Drawing = field(default_factory=lambda: Drawing(Circle(3.0), "blue", marks=(1.0,)))
    spare: Annotated[Any, "shape", SHAPES] = None
    more: tuple[Drawing, ...] = (Drawing(size=2),)


@dataclass(frozen=True)
class Blue(Drawing):
    colour: Literal["red", "blue"] = "blue"


@dataclass(frozen=True)
class Gallery:
    hung: Hung = field(default_factory=lambda: Hung(Frame, spare=Square(2.0)))
    first: Drawing = field(default_factory=Blue)  # a subclass of its hint, other defaults


GALLERIES = {"gallery": Gallery}


def gallery(**given: Any) -> tuple[Gallery, dict[str, Any]]:
    component = bind_component("gallery", GALLERIES, {"name": "gallery", **given}, "gallery")
    return component.build(), component.plain


def test_defaults_are_written_with_the_names_of_their_components() -> None:
    drawing = {"colour": "red", "size": None, "marks": [], "filled": False}
    square = {"name": "square", "side": 1.0}
    assert gallery()[1] == {
        "name": "gallery",
        "hung": {
            "frame": {"name": "frame", "width": 1.0, "wood": "oak"},
            "drawing": {
                "shape": {"name": "circle", "radius": 3.0},
                **drawing,
                "colour": "blue",
                "marks": [1.0],
            },
            "spare": {"name": "square", "side": 2.0},
            "more": [{"shape": square, **drawing, "size": 2}],
        },
        "first": {"shape": square, **drawing, "colour": "blue"},
    }


def test_a_default_that_is_not_registered_is_written_as_it_would_be_imported() -> None:
    @dataclass(frozen=True)
    class Sheet:
        shape: Annotated[Any, "shape", {}] = field(default_factory=Square)

    plain = bind_dataclass(Sheet, {}, "sheet")[1]
    assert plain["shape"] == {"name": f"{Square.__module__}:Square", "side": 1.0}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"first": {"shape": {"name": "circle", "radius": 1}}},
        {"first": {"size": 4}, "hung": {"drawing": {"shape": {"radius": 5}, "filled": True}}},
        {"hung": {"frame": {"width": 2}, "spare": None, "more": [{"shape": "square"}, {}]}},
        {"hung": {"frame": "frame", "spare": {"side": 7}}},
    ],
)
def test_what_is_written_binds_to_the_same_again(given) -> None:
    built, plain = gallery(**given)
    written = yaml.safe_load(yaml.safe_dump(plain))
    again, plain_again = gallery(**{k: v for k, v in written.items() if k != "name"})
    assert again == built
    assert type(again.first) is type(built.first) is Blue
    assert plain_again == plain
    assert (again == Gallery()) == (given == {})


def test_a_mapping_without_a_name_changes_fields_of_the_default() -> None:
    built, plain = gallery(hung={"drawing": {"shape": {"radius": 4}}})
    assert built == Gallery(
        Hung(Frame, Drawing(Circle(4.0), "blue", marks=(1.0,)), spare=Square(2.0))
    )
    assert plain["hung"]["drawing"]["shape"] == {"name": "circle", "radius": 4.0}
    named, _ = gallery(hung={"drawing": {"shape": {"name": "square"}}})
    assert named.hung.drawing == Drawing(Square(), "blue", marks=(1.0,))


def test_a_field_of_a_default_is_set_from_the_command_line() -> None:
    plain = override({"gallery": "gallery"}, ["gallery.hung.drawing.shape.radius=6"])["gallery"]
    built = bind_component("gallery", GALLERIES, plain, "gallery").build()
    assert built.hung.drawing.shape == Circle(6.0)
    assert built.hung.spare == Square(2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hung": {"drawing": {"shape": {"side": 4}}}}, r"unknown key 'gallery.hung.drawing.shape"),
        ({"hung": {"drawing": {"shape": {"radius": 0}}}}, r"circle \(.*\): radius must be > 0"),
        (
            {"hung": {"frame": {"wall": 4}}},
            r"unknown key 'gallery.hung.frame.wall'; known here: wi",
        ),
        ({"hung": {"frame": {"wood": "elm"}}}, r"frame.wood must be one of oak, ash, got 'elm'"),
        ({"first": "red"}, r"gallery.first must be a mapping of keys, got 'red'"),
        ({"first": "no_such.yaml"}, r"gallery.first: there is no file no_such.yaml"),
    ],
)
def test_what_is_wrong_with_a_change_is_named(given, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        gallery(**given)


def test_a_class_that_is_built_later_waits_for_what_it_is_given() -> None:
    frame = gallery(hung={"frame": {"name": "frame", "width": 2}})[0].hung.frame
    built = frame(wall=5.0)
    assert (built.wall, built.width, built.wood) == (5.0, 2.0, "oak")
    assert frame == functools.partial(Frame, width=2.0, wood="oak")
    assert functools.partial(Frame, width=2.0) == frame
    assert frame != functools.partial(Frame, width=2.5)
    assert frame != Frame
    assert gallery(hung={"frame": "frame"})[0].hung.frame == Frame
    assert pickle.loads(pickle.dumps(frame)) == frame
    assert hash(frame) == hash(gallery(hung={"frame": {"width": 2}})[0].hung.frame)


def test_a_dataclass_is_read_from_a_file(tmp_path, monkeypatch) -> None:
    """As it stands there, not over the default; overrides go on top."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("shape: {name: circle, radius: 1e-1}\nsize: 3\n")
    built, plain = gallery(first="mine.yaml")
    assert built.first == Drawing(Circle(0.1), size=3)
    assert plain["first"]["shape"] == {"name": "circle", "radius": 0.1}
    given = override({"first": "mine.yaml"}, ["first.shape.radius=2", "first.filled=true"])
    assert gallery(**given)[0].first == Drawing(Circle(2.0), size=3, filled=True)
    (tmp_path / "odd.yml").write_text("- 1\n")
    with pytest.raises(ExperimentError, match=r"first: odd.yml must hold keys and values"):
        gallery(first="odd.yml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(ExperimentError, match=r"first: bad.yaml is not valid YAML"):
        gallery(first="bad.yaml")
    (tmp_path / "key.yaml").write_text("colur: red\n")
    with pytest.raises(ExperimentError, match=r"unknown key 'gallery.first.colur'"):
        gallery(first="key.yaml")
