"""A parameter's type and default, read from their syntax without running any of the notebook's code."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

SCALARS = ("int", "float", "str", "bool", "Path", "date")
CONTAINERS = ("list", "tuple", "dict")
KEYS = ("str", "int")
ALLOWED = "int, float, str, bool, Path, date, list[…], tuple[…], dict[str, …], Literal[…], Optional[…] and … | None"


@dataclass(frozen=True)
class Type:
    """``name`` is a scalar's or container's, or ``none``, ``any``, ``literal``, ``union``; ``str()`` gives Python's spelling.

    ``args`` are the member types of a union, the element types of a container (``tuple`` with one and ``variadic`` for
    ``tuple[int, ...]``), or a literal's values.
    """

    name: str
    args: tuple[Any, ...] = ()
    variadic: bool = False

    def __str__(self) -> str:
        if self.name in ("none", "any"):
            return "None" if self.name == "none" else "any value"
        if self.name == "union":
            return " | ".join(map(str, self.args))
        if self.name == "literal":
            return "one of " + ", ".join(map(repr, self.args))
        if not self.args or self.args[-1] == ANY:
            return self.name
        inner = [str(a) for a in self.args] + ["..."] * self.variadic
        return f"{self.name}[{', '.join(inner)}]"


ANY = Type("any")
NONE = Type("none")


class Unsupported(ValueError):
    """An annotation that parameters do not know."""


def parse_annotation(node: ast.expr) -> Type:
    """The type that an annotation's syntax tree stands for.

    Raises:
        Unsupported: anything but the types in ``ALLOWED``.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return parse_annotation(_expression(node.value))
    if isinstance(node, ast.Constant) and node.value is None:
        return NONE
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([parse_annotation(node.left), parse_annotation(node.right)])
    if isinstance(node, ast.Subscript):
        elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _subscripted(_name(node.value), elements)
    name = _name(node)
    if name in SCALARS:
        return Type(name)
    if name in CONTAINERS:
        return Type(name, (Type("str"), ANY) if name == "dict" else (ANY,), variadic=name == "tuple")
    raise Unsupported(ast.unparse(node))


def _subscripted(name: str, elements: list[ast.expr]) -> Type:
    if name == "Literal":
        return Type("literal", tuple(_literal(e) for e in elements))
    if name in ("tuple", "Tuple") and len(elements) == 2 and _is_ellipsis(elements[1]):
        return Type("tuple", (parse_annotation(elements[0]),), variadic=True)
    types = tuple(parse_annotation(e) for e in elements)
    if name == "Optional" and len(types) == 1:
        return _union([*types, NONE])
    if name == "Union":
        return _union(list(types))
    if name in ("list", "List") and len(types) == 1:
        return Type("list", types)
    if name in ("tuple", "Tuple"):
        return Type("tuple", types)
    if name in ("dict", "Dict") and len(types) == 2 and types[0].name in KEYS:
        return Type("dict", types)
    raise Unsupported(f"{name}[{', '.join(map(ast.unparse, elements))}]")


def _union(members: list[Type]) -> Type:
    flat = [m for t in members for m in (t.args if t.name == "union" else (t,))]
    return Type("union", tuple(dict.fromkeys(flat)))


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = ...
    if not isinstance(value, str | int | bool | None):
        raise Unsupported(f"Literal[{ast.unparse(node)}]")
    return value


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _name(node: ast.expr) -> str:
    """``Path`` of both ``Path`` and ``pathlib.Path``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    raise Unsupported(ast.unparse(node))


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise Unsupported(repr(text)) from None


def constant(node: ast.expr) -> Any:
    """The value of a literal, ``Path("…")``, ``date(y, m, d)`` or ``float("nan")`` in a parameters cell.

    Raises:
        ValueError: the expression would have to be run.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        build = {"Path": Path, "date": date, "float": float}.get(node.func.id)
        if build is not None:
            return build(*_constants(node.args))
    if isinstance(node, ast.List):
        return _constants(node.elts)
    if isinstance(node, ast.Tuple):
        return tuple(_constants(node.elts))
    if isinstance(node, ast.Dict) and None not in node.keys:
        return dict(zip(_constants(k for k in node.keys if k), _constants(node.values), strict=True))
    return ast.literal_eval(node)


def _constants(nodes: Iterable[ast.expr]) -> list[Any]:
    return [constant(node) for node in nodes]
