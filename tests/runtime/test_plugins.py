"""Plug-ins: what their names lead to, and the errors for names that lead nowhere."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedstream.core.errors import ConfigError
from fedstream.runtime.config import Section, load, table_of
from fedstream.runtime.plugins import RECORDED, NotTrusted, OneOf, PluginRegistry, allowing

PROGRAM = """
from tests.runtime.test_plugins import Shape

class Triangle(Shape):
    height: float = 1.0

class Other:
    pass

number = 3
"""


UNFIT = """
from abc import abstractmethod
from tests.runtime.test_plugins import Shape

class Half(Shape):
    @abstractmethod
    def area(self): ...

class Vague(Shape):
    side: "Nowhere" = 3
"""


class Shape(Section):
    """Base of the tables in this test."""

    kind: str


class Circle(Shape):
    """A built-in one."""

    kind: Literal["circle"] = "circle"
    radius: Annotated[float, Field(gt=0)] = 1.0


class Square(Shape):
    """Another."""

    kind: Literal["square"] = "square"
    side: int = 1


def _accept(value: object) -> type[Shape] | None:
    return value if isinstance(value, type) and issubclass(value, Shape) else None


def registry() -> PluginRegistry[type[Shape]]:
    return PluginRegistry(
        "fedstream.shapes",
        "shape",
        {"circle": Circle, "square": Square},
        accept=_accept,
        expected="a class derived from Shape",
    )


SHAPES = registry()


class Drawing(Section):
    """What the configuration of this test looks like."""

    shape: Annotated[Shape, OneOf(SHAPES)] = Circle()
    more: tuple[Annotated[Shape, OneOf(SHAPES)], ...] = ()
    frame: Annotated[Shape, OneOf(SHAPES)] | None = None


def drawn(*sets: str) -> Drawing:
    return load(Drawing, path=None, environ={}, sets=sets)


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Write a program; afterwards it is forgotten."""
    before, path = set(sys.modules), list(sys.path)

    def written(name: str, text: str) -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    yield written
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def installed(write: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """A package is installed that announces the shape `triangle`."""
    file = write("some_shapes.py", PROGRAM)
    about = tmp_path / "some_shapes-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-shapes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[fedstream.shapes]\ntriangle = some_shapes:Triangle\nnumber = some_shapes:number\n"
        "gone = no_such_module:Gone\ncircle = some_shapes:Triangle\n"
    )
    sys.path.append(str(tmp_path))
    return file


def test_names_lead_to_built_in_classes_files_and_modules(
    write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert registry().find("square").value is Square
    file = write("own_shapes.py", PROGRAM)
    found = registry().find(f"{file}:Triangle")
    assert (found.value.__name__, found.origin, found.source) == ("Triangle", "file", file)
    assert found.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert registry().find("own_shapes:Triangle").value is found.value
    monkeypatch.chdir(tmp_path)
    assert registry().find("own_shapes.py:Triangle") == found  # the same from any folder


def test_name_is_resolved_once(write: Callable[[str, str], Path]) -> None:
    file, shapes = write("once.py", PROGRAM), registry()
    first = shapes.find(f"{file}:Triangle")
    file.unlink()
    assert shapes.find(f"{file}:Triangle") is first


def test_installed_package_announces_a_name_and_cannot_replace_a_built_in_one(
    installed: Path,
) -> None:
    found = registry().find("triangle")
    assert (found.value.__name__, found.origin) == ("Triangle", "entry point")
    assert found.digest == hashlib.sha256(installed.read_bytes()).hexdigest()
    assert registry().find("circle").value is Circle
    assert registry().names() == ["circle", "square", "gone", "number", "triangle"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sqare", r"there is no shape 'sqare'; did you mean 'square'\?"),
        ("trangle", r"there is no shape 'trangle'; did you mean 'triangle'\?"),
        ("zzz", "must be one of circle, square, gone, number, triangle, or your own, as path/to"),
        ("shapes.py", "is a file: also name the shape in it, as in shapes.py:Name"),
        ("{folder}/missing.py:Name", "there is no file .*/missing.py"),
        ("{folder}/some_shapes.py:Trangle", r"defines no 'Trangle'; did you mean 'Triangle'\?"),
        (
            "some_shapes:Other",
            "some_shapes:Other': is the class Other: expected a class derived from Shape",
        ),
        ("number", "'number': is of type int: expected a class derived from Shape"),
        ("gone", "no_such_module:Gone: importing it raised ModuleNotFoundError.*'no_such_module'$"),
        ("{folder}/raising.py:A", r"importing it raised ValueError: no luck at .*raising.py:1"),
        (
            "{folder}/calling.py:A",
            r"^shape '.*calling.py': 1 samples cannot be split .* at .*calling.py:2$",
        ),
        ("{folder}/broken.py:A", r"importing it raised SyntaxError: .* at .*broken.py:2$"),
        ("{folder}/unfit.py:Half", r"Half': the class does not define area\(\)$"),
        ("{folder}/unfit.py:Vague", "Vague': its keys cannot be read: name 'Nowhere'"),
    ],
)
def test_every_wrong_name_is_explained_in_one_line(
    installed: Path, write: Callable[[str, str], Path], name: str, words: str
) -> None:
    write("raising.py", "raise ValueError('no\\nluck')\n")
    write("broken.py", "\nclass A(:\n")
    write("calling.py", "from fedstream import iid\nparts = iid([0], 2, seed=0)\n")
    write("unfit.py", UNFIT)
    with pytest.raises(ConfigError, match=words) as said:
        registry().find(name.format(folder=installed.parent))
    assert "\n" not in str(said.value)


def test_program_that_only_a_recording_names_needs_consent(
    write: Callable[[str, str], Path],
) -> None:
    file, shapes = (
        write("recorded.py", PROGRAM + "open(__file__ + '.ran', 'w').close()\n"),
        registry(),
    )
    name = f"{file}:Triangle"
    with pytest.raises(NotTrusted, match=r"loading the shape '.*recorded.py:Triangle' runs its"):
        shapes.find(name, recorded=True)
    assert not Path(f"{file}.ran").exists()
    with allowing(recorded=True):
        assert shapes.find(name, recorded=True).value.__name__ == "Triangle"
    assert shapes.find(name, recorded=True)  # nothing new runs any more
    with pytest.raises(NotTrusted):
        registry().find(name, recorded=True)


# in the configuration


def test_table_is_read_by_the_class_that_its_tag_names(write: Callable[[str, str], Path]) -> None:
    file = write("configured.py", PROGRAM)
    name = f"{file}:Triangle"
    found = drawn(f"shape.kind={name}", "shape.height=2", f"more=[{{kind='{name}'}}]").shape
    assert (found.kind, getattr(found, "height", None)) == (name, 2.0)
    assert drawn("shape.radius=2").shape == Circle(radius=2)  # of the default's kind
    assert drawn("frame.kind=square").frame == Square()
    dumped = Drawing.model_validate({"shape": {"kind": name}}).model_dump()
    assert dumped["shape"] == {"kind": name, "height": 1.0}
    with pytest.raises(ConfigError, match="runs its code"):
        _recorded(write("never_loaded.py", PROGRAM))


def _recorded(file: Path) -> Drawing:
    try:
        return Drawing.model_validate({"shape": {"kind": f"{file}:Triangle"}}, context=RECORDED)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def test_changing_the_kind_drops_the_other_kinds_keys() -> None:
    environ = {"FEDSTREAM_SHAPE__KIND": "circle", "FEDSTREAM_SHAPE__RADIUS": "3"}
    found = load(Drawing, path=None, environ=environ, sets=["shape.kind=square"])
    assert found.shape == Square()
    same = load(Drawing, path=None, environ=environ, sets=["shape.kind=circle"])
    assert same.shape == Circle(radius=3)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("shape.kind=sqare",),
            (
                "shape.kind = \"sqare\" (from --set): there is no shape 'sqare'; did you mean "
                "'square'?"
            ),
        ),
        (("shape.kind=3",), "shape.kind = 3 (from --set): must be a name, as text"),
        (
            ("shape.kind=square", "shape.sid=2"),
            "shape.sid = 2 (from --set): unknown key; did you mean shape.side?",
        ),
        (("shape.side=2",), "shape.kind: required with shape.side, which only square has"),
        (("shape=3",), "shape = 3 (from --set): must be a table"),
        (
            ("more=[{kind='square', side='x'}]",),
            'more[0].side = "x" (from --set): must be a valid integer',
        ),
        (
            ("shape.kind={file}:Triangle", "shape.heigt=2"),
            "shape.heigt = 2 (from --set): unknown key; did you mean shape.height?",
        ),
    ],
)
def test_error_names_key_value_source_and_what_is_allowed(
    write: Callable[[str, str], Path], sets: tuple[str, ...], message: str
) -> None:
    file = write("explained.py", PROGRAM)
    with pytest.raises(ConfigError) as said:
        drawn(*(item.format(file=file) if "{file}" in item else item for item in sets))
    assert str(said.value) == message


# a function as a table


def test_functions_parameters_become_keys() -> None:
    def area(scale: float, width: float = 2.0, n: Annotated[int, Field(ge=1)] = 1) -> float:
        """The area."""
        return scale * width * n

    table = table_of(area, Shape, ["scale"])
    made = table.model_validate({"kind": "own", "width": 3})
    assert made.model_dump() == {"kind": "own", "width": 3.0, "n": 1}
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        table.model_validate({"kind": "own", "n": 0})


class Strange:
    """A type that no configuration can hold."""


def strange(d: int, a: Strange) -> float:
    """It can't be a table."""
    return 0.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 0.0, r"\(\) must take d, then its own parameters"),
        (lambda d, a: 0.0, "parameter a needs a type, as in `a: float`"),
        (strange, "parameters can't be configured: Unable to generate pydantic-core schema"),
        (lambda d, *a: 0.0, r"parameter \*a can't be a key: name each parameter"),
    ],
)
def test_function_that_cannot_be_a_table_is_explained(
    function: Callable[..., float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        table_of(function, Shape, ["d"])
