"""A notebook's parameters: what its ``parameters`` cell declares, what the user gave, and the two brought together.

The cell is read, never run. It holds annotated literals, ``name: type = value  # help``, and imports of the types.
"""

import ast
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.batch.annotations import ALLOWED, Type, Unsupported, constant, parse_annotation
from workbench.batch.notebook import Cell, Notebook, tags
from workbench.batch.sources import Given
from workbench.batch.values import Mismatch, Text, convert, python_literal
from workbench.errors import Refused, nearest

TAG = "parameters"
INJECTED_TAG = "injected-parameters"
TYPE_MODULES = ("typing", "pathlib", "datetime", "__future__")
EXAMPLE = "write `name: type = literal  # help`, such as `steps: int = 40  # steps per arm`"


@dataclass(frozen=True)
class Parameter:
    name: str
    type: Type
    default: Any
    help: str = ""


@dataclass(frozen=True)
class ParametersCell:
    """The parameters in the order of the cell, which is number ``index`` of the notebook."""

    index: int
    parameters: dict[str, Parameter]


def read_parameters(notebook: Notebook, name: str) -> ParametersCell:
    """The one cell tagged ``parameters``, checked without running it.

    Raises:
        Refused: no such cell or several, or a statement that is not an annotated literal.
    """
    cells = [i for i, c in enumerate(notebook["cells"]) if c["cell_type"] == "code" and TAG in tags(c)]
    if len(cells) != 1:
        found = "none" if not cells else f"{len(cells)} (cells {', '.join(str(i + 1) for i in cells)})"
        raise Refused(
            f"notebook {name} must have exactly one code cell tagged 'parameters' and has {found}",
            fix="tag one cell `parameters` in JupyterLab's property inspector",
        )
    source = notebook["cells"][cells[0]]["source"]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise Refused(f"the parameters cell of {name} is not Python (line {line}: {error})", fix=EXAMPLE) from None
    comments = _comments(source)
    parameters: dict[str, Parameter] = {}
    for statement in tree.body:
        if _is_harmless(statement):
            continue
        parameter = _parameter(statement, comments, f"line {statement.lineno} of the parameters cell of {name}")
        if parameter.name in parameters:
            raise Refused(f"parameter {parameter.name!r} is declared twice in {name}", fix="remove one of the two")
        parameters[parameter.name] = parameter
    return ParametersCell(cells[0], parameters)


def resolve(cell: ParametersCell, given: Mapping[str, Given], name: str) -> dict[str, Any]:
    """The typed value of every parameter: the default unless one was given.

    Raises:
        Refused: a name that is no parameter of this notebook, or a value that is not of the declared type.
    """
    for key, item in given.items():
        if key not in cell.parameters:
            fix = nearest(key, cell.parameters) if cell.parameters else "it has none"
            raise Refused(f"{_where(key, item)} is not a parameter of {name}", fix=fix)
    values = {}
    for parameter in cell.parameters.values():
        known = given.get(parameter.name)
        values[parameter.name] = parameter.default if known is None else _typed(parameter, known)
    return values


def inject(notebook: Notebook, cell: ParametersCell, values: Mapping[str, Any]) -> None:
    """Put ``values`` into a cell of their own behind the parameters cell, tagged as papermill tags it."""
    imports = [
        line
        for call, line in (("Path(", "from pathlib import Path"), ("date(", "from datetime import date"))
        if any(call in python_literal(v) for v in values.values())
    ]
    lines = [f"{key} = {python_literal(value)}" for key, value in values.items()]
    injected: Cell = {
        "cell_type": "code",
        "metadata": {"tags": [INJECTED_TAG]},
        "source": "\n".join(["# Parameters", *imports, *lines]),
        "outputs": [],
        "execution_count": None,
    }
    if notebook.get("nbformat_minor", 0) >= 5:
        injected["id"] = INJECTED_TAG
    notebook["cells"].insert(cell.index + 1, injected)


def remove_injected(notebook: Notebook) -> None:
    """Drop what an earlier run put behind the parameters cell."""
    notebook["cells"] = [c for c in notebook["cells"] if INJECTED_TAG not in tags(c)]


def _typed(parameter: Parameter, item: Given) -> Any:
    try:
        return convert(item.value, parameter.type)
    except Mismatch as mismatch:
        value = item.value.text if isinstance(item.value, Text) else item.value
        raise Refused(
            _where(parameter.name, item),
            value,
            allowed=f"{parameter.type} ({mismatch})",
            fix=f"the default is {parameter.default!r}" + (f"; {parameter.help}" if parameter.help else ""),
        ) from None


def _where(key: str, item: Given) -> str:
    return f"parameter {key!r}" + (f" ({item.origin})" if item.origin else "")


def _is_harmless(statement: ast.stmt) -> bool:
    """Imports of the types that annotations name, and a docstring."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module in TYPE_MODULES
    if isinstance(statement, ast.Import):
        return all(alias.name in TYPE_MODULES for alias in statement.names)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _parameter(statement: ast.stmt, comments: Mapping[int, str], where: str) -> Parameter:
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        raise Refused(f"{where} is not an annotated literal: {ast.unparse(statement)[:80]}", fix=EXAMPLE)
    name = statement.target.id
    if statement.value is None:
        raise Refused(f"{where}: parameter {name!r} has no default", fix=EXAMPLE)
    try:
        annotation = parse_annotation(statement.annotation)
    except Unsupported as error:
        raise Refused(f"{where}: the type of parameter {name!r}", str(error), allowed=ALLOWED) from None
    try:
        default = convert(constant(statement.value), annotation)
    except Mismatch as mismatch:
        raise Refused(f"{where}: the default of {name!r} is not {annotation} ({mismatch})", fix="correct one") from None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise Refused(
            f"{where}: the default of {name!r} is computed, so it would not follow an injected value: "
            + ast.unparse(statement.value)[:80],
            fix="write a literal here and derive from it in a later cell",
        ) from None
    return Parameter(name, annotation, default, comments.get(statement.end_lineno or statement.lineno, ""))


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens if t.type == tokenize.COMMENT}
