"""Typing and refusing parameters: no kernel is started here."""

import ast
import enum
import json
import math
from datetime import date, datetime
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.notebooks import notebook
from workbench.batch.annotations import parse_annotation
from workbench.batch.notebook import write_notebook
from workbench.batch.parameters import inject, read_parameters, resolve
from workbench.batch.sources import from_file, from_mapping, from_options
from workbench.batch.values import Text, convert, jsonable, python_literal
from workbench.errors import Refused
from workbench.records.atomic import to_json

DEFAULTS = {
    "bool": "True",
    "int": "0",
    "float": "0.0",
    "str": '"a"',
    "bool | None": "None",
    "str | None": "None",
    "int | str": "0",
    "float | None": "None",
    "Path": 'Path("a")',
    "date": "date(2026, 1, 1)",
    "list[int]": "[]",
    "tuple[int, int]": "(0, 0)",
    "tuple[float, ...]": "()",
    "dict[str, float]": "{}",
    "dict[int, int]": "{}",
    "list": "[]",
    'Literal["fp32", "bf16", 8, None]': '"fp32"',
    "Optional[int]": "None",
    "list[str] | None": "None",
}


def typed(annotation: str, **sources: Any) -> Any:
    """The value of parameter ``x`` of this type after ``from_options(**sources)``."""
    cell = read_parameters(notebook(parameters=f"x: {annotation} = {DEFAULTS[annotation]}  # help"), "n")
    return resolve(cell, from_options(**sources), "n")["x"]


def python_value(annotation: str, value: Any) -> Any:
    cell = read_parameters(notebook(parameters=f"x: {annotation} = {DEFAULTS[annotation]}"), "n")
    return resolve(cell, from_mapping({"x": value}), "n")["x"]


@pytest.mark.parametrize(
    ("annotation", "text", "expected"),
    [
        ("bool", "false", False),
        ("bool", "TRUE", True),
        ("bool | None", "none", None),
        ("bool | None", "False", False),
        ("str", "none", "none"),
        ("str", "false", "false"),
        ("str", "0123", "0123"),
        ("str", "1_000", "1_000"),
        ("str", "", ""),
        ("str", "[1, 2", "[1, 2"),
        ("str | None", "null", None),
        ("str | None", "", ""),
        ("int", "0123", 123),
        ("int", "-7", -7),
        ("int", "0x1F", 31),
        ("int | str", "12", 12),
        ("int | str", "12a", "12a"),
        ("float", "1e-3", 1e-3),
        ("float", "1", 1.0),
        ("float", "-.inf", -math.inf),
        ("float", "inf", math.inf),
        ("float | None", "~", None),
        ("Path", "a b/#😀", Path("a b/#😀")),
        ("date", "2026-12-01", date(2026, 12, 1)),
        ("list[int]", "[1, 2]", [1, 2]),
        ("tuple[int, int]", "[1, 2]", (1, 2)),
        ("tuple[float, ...]", "[1, 2.5]", (1.0, 2.5)),
        ("dict[str, float]", "{a: 1, b: 1e3}", {"a": 1.0, "b": 1000.0}),
        ("dict[int, int]", "{1: 2}", {1: 2}),
        ("list", "[1, a, 1_000, 'true', true, null]", [1, "a", "1_000", "true", True, None]),
        ('Literal["fp32", "bf16", 8, None]', "bf16", "bf16"),
        ('Literal["fp32", "bf16", 8, None]', "8", 8),
        ('Literal["fp32", "bf16", 8, None]', "none", None),
        ("Optional[int]", "null", None),
        ("list[str] | None", "[a, 01]", ["a", "01"]),
    ],
)
def test_text_gets_the_declared_type(annotation: str, text: str, expected: Any) -> None:
    found = typed(annotation, typed=[("x", text)])
    assert found == expected
    assert type(found) is type(expected)
    if annotation not in ("str", "str | None") or text:
        inline = typed(annotation, inline=[f"x: {text}"]) if text != "[1, 2" else expected
        assert inline == expected


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        ("bool", "none"),
        ("bool", "yes"),
        ("bool", "1"),
        ("bool", "tRUE"),
        ("int", "1_000"),
        ("int", "1e3"),
        ("int", "4.0"),
        ("int", "nan"),
        ("int", "true"),
        ("int", "9" * 5000),
        ("int", "１２"),
        ("float", "1e999"),
        ("float", "1_0.5"),
        ("float", "fast"),
        ("float", "null"),
        ("Path", ""),
        ("date", "2026-02-30"),
        ("date", "20261201"),
        ("list[int]", "1, 2"),
        ("list[int]", "[1, a]"),
        ("list[int]", "[1, [2]"),
        ("tuple[int, int]", "[1, 2, 3]"),
        ("dict[str, float]", "[1]"),
        ("dict[int, int]", "{1: 2, 01: 3}"),
        ('Literal["fp32", "bf16", 8, None]', "fp16"),
        ("str", "\udcff"),
    ],
)
def test_text_of_another_type_is_refused_by_name(annotation: str, text: str) -> None:
    with pytest.raises(Refused, match="parameter 'x'"):
        typed(annotation, typed=[("x", text)])


def test_raw_and_quoted_values_stay_strings() -> None:
    assert typed("str | None", raw=[("x", "none")]) == "none"
    assert typed("int | str", raw=[("x", "12")]) == "12"
    assert typed("str | None", inline=["x: 'null'"]) == "null"
    for annotation in ("int", "bool | None"):
        with pytest.raises(Refused):
            typed(annotation, inline=['x: "1"'])


class Color(enum.Enum):
    RED = "fp32"
    BLUE = 3


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("int", np.int64(5), 5),
        ("bool", np.bool_(False), False),
        ("float", np.float32(0.5), 0.5),
        ("float", 3, 3.0),
        ("str", np.str_("a"), "a"),
        ("Path", Path("a/b"), Path("a/b")),
        ("Path", "a/b", Path("a/b")),
        ("date", date(2026, 12, 1), date(2026, 12, 1)),
        ("list[int]", (1, 2), [1, 2]),
        ("list[int]", np.arange(3), [0, 1, 2]),
        ("tuple[int, int]", [1, np.int8(2)], (1, 2)),
        ("dict[int, int]", {1: 2}, {1: 2}),
        ("dict[int, int]", {"1": 2}, {1: 2}),
        ("int", Color.BLUE, 3),
        ('Literal["fp32", "bf16", 8, None]', Color.RED, "fp32"),
        ("float", -math.inf, -math.inf),
        ("float", "-Infinity", -math.inf),
    ],
)
def test_python_values_become_the_declared_type(annotation: str, value: Any, expected: Any) -> None:
    found = python_value(annotation, value)
    assert found == expected
    assert type(found) is type(expected)
    json.loads(to_json(jsonable(found)))


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("str", Path("a")),
        ("str", 5),
        ("str", None),
        ("int", True),
        ("int", 4.0),
        ("int", "5"),
        ("bool", 1),
        ("bool", "false"),
        ("float", "0.1"),
        ("float", 10**400),
        ("date", datetime(2026, 12, 1)),
        ("list[int]", {1, 2}),
        ("dict[str, float]", {1: 2.0}),
        ("list", [object()]),
        ("Path", b"a"),
        ("int", Color.RED),
    ],
)
def test_python_values_of_another_type_are_refused_by_name(annotation: str, value: Any) -> None:
    with pytest.raises(Refused, match="parameter 'x'"):
        python_value(annotation, value)


@pytest.mark.parametrize("name", ["lrr", 'import os; os.system("id"); y', "learning-rate", "lambda", "", "x\n", "X"])
def test_name_that_is_no_parameter_is_refused_with_the_nearest(name: str) -> None:
    cell = read_parameters(notebook(parameters="lr: float = 1e-3\nx: int = 1"), "n")
    with pytest.raises(Refused) as refused:
        resolve(cell, from_options(typed=[(name, "1")]), "n")
    assert "is not a parameter of n" in str(refused.value)
    assert name != "lrr" or "did you mean 'lr'?" in str(refused.value)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (None, "has none"),
        ("lr: float = 1e-3\nlr2: float = lr * 2", "computed"),
        ("lr = 1e-3", "not an annotated literal"),
        ("lr: float", "no default"),
        ("import os", "not an annotated literal"),
        ("lr: float = open('x').read()", "computed"),
        ("lr: float = f'{1}'", "computed"),
        ("n: int = '3'", "is not int"),
        ("n: set = {1}", "is not accepted"),
        ("n: Literal[1.5] = 1.5", "is not accepted"),
        ("n: int = 1\nn: int = 2", "declared twice"),
        ("n: int = 1\nif n: pass", "not an annotated literal"),
        ("%matplotlib inline\nn: int = 1", "not Python"),
        ("a.b: int = 1", "not an annotated literal"),
        ("x: int = " + "-" * 3000 + "1", "parameters cell"),
    ],
)
def test_parameters_cell_that_is_not_annotated_literals_is_refused(parameters: str | None, said: str) -> None:
    with pytest.raises(Refused, match=said):
        read_parameters(notebook("1", parameters=parameters), "n")


def test_two_parameters_cells_are_refused() -> None:
    twice = notebook(parameters="a: int = 1")
    twice.cells.append(twice.cells[0].copy())
    with pytest.raises(Refused, match=r"has 2 \(cells 1, 2\)"):
        read_parameters(twice, "n")


def test_parameters_cell_is_read_with_types_defaults_and_help() -> None:
    source = (
        '"""All of them."""\nfrom pathlib import Path\nimport datetime\n'
        'precision: Literal["fp32", "bf16"] = "bf16"  # numbers\nout: Path = Path("x")\n'
        'day: "datetime.date | None" = None\nlimits: tuple[float, ...] = (1, float("inf"))  # both ends'
    )
    found = read_parameters(notebook(parameters=source), "n").parameters
    assert {p.name: p.help for p in found.values()} == {
        "precision": "numbers",
        "out": "",
        "day": "",
        "limits": "both ends",
    }
    assert str(found["day"].type) == "date | None"
    assert found["limits"].default == (1.0, math.inf)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "- 1\n- 2\n", "a.yaml, line 1: a list"),
        ("a.yaml", "", "a.yaml, line 1: empty"),
        ("a.yaml", "# nothing\n", "empty"),
        ("a.yaml", "x: 1\ny: 2\nx: 3\n", "a.yaml, line 3: the key 'x' stands twice"),
        ("a.yaml", "x: 1\ny: [1,\n", r"a.yaml, line \d: not valid YAML"),
        ("a.yaml", "x: !!python/object/apply:os.system [id]\n", "line 1: tag .* is not plain data"),
        ("a.yaml", "x: 1\n---\nx: 2\n", "not valid YAML"),
        ("a.yaml", "x: &a [*a]\n", "a.yaml"),
        ("a.yaml", "x: " + "[" * 50 + "]" * 50, "nested too deeply"),
        ("a.yaml", "5", "a single value"),
        ("a.json", "[1]", "a list"),
        ("a.json", "", "empty"),
        ("a.json", '{"x": 1,\n "y": 2,\n "x": 3}', "a.json, line 3: the key 'x' stands twice"),
        ("a.json", '{"x": 1,\n "y": }', "a.json, line 2: not valid JSON"),
        ("a.toml", "x = 1\nx = 2\n", "a.toml: not valid TOML: .*line 2"),
        ("a.toml", "", "empty"),
        ("a.txt", "x: 1", ".yaml .yml .json .toml"),
    ],
)
def test_broken_file_is_refused_with_file_and_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Refused, match=said):
        from_file(tmp_path / name)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"x: \xff")
    for name in ("a.yaml", "missing.yaml"):
        with pytest.raises(Refused, match=name):
            from_file(tmp_path / name)


def test_wrong_value_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    cell = read_parameters(notebook(parameters="steps: int = 1\nlr: float = 1.0"), "n")
    for name, content in [
        ("a.yaml", "lr: 2\nsteps: x\n"),
        ("a.json", '{"lr": 2,\n"steps": "x"}'),
        ("a.toml", "lr = 2\nsteps = true"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(Refused, match=f"{name}, line 2"):
            resolve(cell, from_file(tmp_path / name), "n")


def test_all_formats_give_the_same_values(tmp_path: Path) -> None:
    cell = read_parameters(
        notebook(parameters='lr: float = 1.0\namp: bool = True\ntags: list[str] = []\nout: str = ""'), "n"
    )
    (tmp_path / "a.yaml").write_bytes("\ufefflr: 1e-3\namp: false\ntags: [a, '1']\nout: 0123\n".encode())
    (tmp_path / "a.json").write_text('{"lr": 1e-3, "amp": false, "tags": ["a", "1"], "out": "0123"}')
    (tmp_path / "a.toml").write_text('lr = 1e-3\namp = false\ntags = ["a", "1"]\nout = "0123"\n')
    expected = {"lr": 1e-3, "amp": False, "tags": ["a", "1"], "out": "0123"}
    for name in ("a.yaml", "a.json", "a.toml"):
        assert resolve(cell, from_file(tmp_path / name), "n") == expected


def test_single_values_win_over_inline_yaml_and_that_over_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: 1\n")
    assert typed("int", files=[tmp_path / "a.yaml"]) == 1
    assert typed("int", files=[tmp_path / "a.yaml"], inline=["x: 2"]) == 2
    assert typed("int", files=[tmp_path / "a.yaml"], inline=["x: 2"], typed=[("x", "3")]) == 3


def test_name_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: 1\n")
    for twice in (
        {"typed": [("x", "1"), ("x", "1")]},
        {"typed": [("x", "1")], "raw": [("x", "1")]},
        {"inline": ["x: 1", "x: 2"]},
        {"files": [tmp_path / "a.yaml", tmp_path / "a.yaml"]},
    ):
        with pytest.raises(Refused, match="parameter 'x' is given twice"):
            typed("int", **twice)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_injected_source_gives_the_value_back(value: Any) -> None:
    # repr() tells NaN from NaN no more than it tells lists apart, and == tells NaN from itself.
    assert repr(eval(python_literal(value), {"date": date, "Path": Path})) == repr(value)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_text_into_str_is_kept_character_by_character(text: str) -> None:
    assert convert(Text(text), parse_annotation(ast.parse("str", mode="eval").body)) == text


def test_injection_sets_every_kind_of_value_and_the_file_stays_valid_json(tmp_path: Path) -> None:
    source = (
        "from pathlib import Path\nfrom datetime import date\na: float = 1.0\nb: float = 0.0\nc: Path = Path('p')\n"
        "d: date = date(2026, 1, 1)\ne: dict[int, tuple[int, ...]] = {}\nf: str = ''\ng: list[float | None] = []"
    )
    given_values = {
        "a": math.nan, "b": -math.inf, "c": Path("x y"), "d": date(2026, 12, 1), "e": {1: (2,)},
        "f": 'q"\'\n\\ \u2028 😀', "g": [math.inf, None],
    }  # fmt: skip
    book = notebook("1", parameters=source)
    cell = read_parameters(book, "n")
    values = resolve(cell, from_mapping(given_values), "n")
    inject(book, cell, values)
    write_notebook(tmp_path / "n.ipynb", book)
    json.loads((tmp_path / "n.ipynb").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    scope: dict[str, Any] = {}
    exec(nbformat.read(tmp_path / "n.ipynb", as_version=4).cells[1].source, scope)
    assert math.isnan(scope["a"])
    assert {k: scope[k] for k in given_values if k != "a"} == {k: v for k, v in values.items() if k != "a"}
