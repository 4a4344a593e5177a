"""Typing a parameter's value by its annotation: text by the rules of YAML 1.2, Python values strictly.

Text that comes from a command line or a YAML file has no type of its own: ``0123`` is the integer 123 for an ``int`` and
the string ``0123`` for a ``str``. A quoted string stays a string.
"""

import enum
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path, PurePath
from typing import Any

from workbench.batch.annotations import ANY, Type

# The core schema of YAML 1.2.2, section 10.3.2. "none" is added, as Python's word for null.
NULL = frozenset({"null", "Null", "NULL", "~", "", "none", "None"})
BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INT = re.compile(r"[-+]?[0-9]+")
BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
INFINITE = re.compile(r"([-+]?)(\.inf|\.Inf|\.INF|inf|Infinity)")
NAN = frozenset({".nan", ".NaN", ".NAN", "nan", "NaN"})
JSON_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How run records write the floats that JSON has no number for."""
UNION_ORDER = ("none", "bool", "int", "float", "literal", "date", "dict", "tuple", "list", "Path", "any", "str")


@dataclass(frozen=True)
class Text:
    """A scalar whose type the annotation decides."""

    text: str
    quoted: bool = False


class Mismatch(ValueError):
    """A value that is not of the type asked for."""


def convert(value: Any, wanted: Type) -> Any:
    """``value`` as the type that ``wanted`` describes; never an approximation of it.

    Raises:
        Mismatch: it is not of that type.
    """
    return _CONVERT[wanted.name](value if isinstance(value, Text) else _plain(value), wanted)


def jsonable(value: Any) -> Any:
    """The value as JSON can hold it: paths and dates as text, tuples as lists."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return str(value) if isinstance(value, PurePath | date) else value


def python_literal(value: Any) -> str:
    """Source code whose value this is; ``Path`` and ``date`` must be in scope for theirs."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, PurePath):
        return f"Path({str(value)!r})"
    if isinstance(value, date):
        return f"date({value.year}, {value.month}, {value.day})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_literal(k)}: {python_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{python_literal(v)}, " for v in value).rstrip() + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return repr(value)


def _plain(value: Any) -> Any:
    """NumPy's (or torch's) scalars and arrays as Python's, an enumeration's member as its value."""
    if isinstance(value, enum.Enum):
        value = value.value
    return value.tolist() if hasattr(value, "tolist") else value


def _none(value: Any, wanted: Type) -> None:
    if value is None or (isinstance(value, Text) and not value.quoted and value.text in NULL):
        return
    raise Mismatch("not null")


def _bool(value: Any, wanted: Type) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Text) and not value.quoted and value.text in BOOL:
        return BOOL[value.text]
    raise Mismatch("not true or false")


def _int(value: Any, wanted: Type) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Text) and not value.quoted:
        try:
            if INT.fullmatch(value.text):
                return int(value.text)
            if BASED.fullmatch(value.text):
                return int(value.text, 0)
        except ValueError:  # beyond the number of digits that Python converts
            raise Mismatch("too many digits") from None
    raise Mismatch("not an integer")


def _float(value: Any, wanted: Type) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _finite_or_meant(value)
    if isinstance(value, str) and value in JSON_NUMBERS:
        return JSON_NUMBERS[value]
    if isinstance(value, Text) and not value.quoted:
        if infinite := INFINITE.fullmatch(value.text):
            return -math.inf if infinite[1] == "-" else math.inf
        if value.text in NAN:
            return math.nan
        if FLOAT.fullmatch(value.text):
            number = float(value.text)
            if math.isinf(number):
                raise Mismatch("too large for a float")
            return number
    raise Mismatch("not a number")


def _finite_or_meant(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise Mismatch("too large for a float") from None


def _str(value: Any, wanted: Type) -> str:
    text = value.text if isinstance(value, Text) else value
    if not isinstance(text, str):
        raise Mismatch("not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Mismatch("not valid Unicode") from None
    return str(text)


def _path(value: Any, wanted: Type) -> Path:
    text = _str(os.fspath(value) if isinstance(value, PurePath) else value, wanted)
    if not text or "\0" in text:
        raise Mismatch("not a path")
    return Path(text)


def _date(value: Any, wanted: Type) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    text = value.text if isinstance(value, Text) else value
    if isinstance(text, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        try:
            return date.fromisoformat(text)
        except ValueError as error:
            raise Mismatch(str(error)) from None
    raise Mismatch("not a date such as 2026-12-01")


def _literal(value: Any, wanted: Type) -> Any:
    for allowed in wanted.args:
        name = "none" if allowed is None else type(allowed).__name__
        try:
            if convert(value, Type(name)) == allowed:
                return allowed
        except Mismatch:
            continue
    raise Mismatch("not one of them")


def _union(value: Any, wanted: Type) -> Any:
    said = []
    for member in sorted(wanted.args, key=lambda t: UNION_ORDER.index(t.name)):
        try:
            return convert(value, member)
        except Mismatch as mismatch:
            said.append(str(mismatch))
    raise Mismatch("; ".join(dict.fromkeys(said)))


def _any(value: Any, wanted: Type) -> Any:
    if isinstance(value, list | tuple):
        return [convert(item, ANY) for item in value]
    if isinstance(value, dict):
        return _dict(value, Type("dict", (Type("str"), ANY)))
    return _union(value, Type("union", tuple(Type(n) for n in ("none", "bool", "int", "float", "str"))))


def _list(value: Any, wanted: Type) -> list[Any]:
    return [_item(i, v, wanted.args[0]) for i, v in enumerate(_sequence(value))]


def _tuple(value: Any, wanted: Type) -> tuple[Any, ...]:
    items = _sequence(value)
    types = wanted.args * len(items) if wanted.variadic else wanted.args
    if len(items) != len(types):
        raise Mismatch(f"{len(items)} elements instead of {len(types)}")
    return tuple(_item(i, v, t) for i, (v, t) in enumerate(zip(items, types, strict=True)))


def _sequence(value: Any) -> list[Any] | tuple[Any, ...]:
    value = _structure(value)
    if not isinstance(value, list | tuple):
        raise Mismatch("not a list")
    return value


def _dict(value: Any, wanted: Type) -> dict[Any, Any]:
    value = _structure(value)
    if not isinstance(value, dict):
        raise Mismatch("not a mapping")
    keys, values = wanted.args
    # JSON writes integer keys as text; the annotation turns them back.
    integers = keys.name == "int"
    done = {
        _item(repr(k), Text(k) if integers and isinstance(k, str) else k, keys): _item(repr(k), v, values)
        for k, v in value.items()
    }
    if len(done) != len(value):
        raise Mismatch("two keys are the same")
    return done


def _structure(value: Any) -> Any:
    """A list or mapping written as text, such as ``-p sizes "[1, 2]"``."""
    if not isinstance(value, Text) or value.quoted:
        return value
    from workbench.batch.yaml_text import parse_yaml

    try:
        return parse_yaml(value.text)
    except ValueError as error:
        raise Mismatch(str(error)) from None


def _item(where: object, value: Any, wanted: Type) -> Any:
    try:
        return convert(value, wanted)
    except Mismatch as mismatch:
        raise Mismatch(f"at {where}: {mismatch}") from None


_CONVERT: dict[str, Callable[[Any, Type], Any]] = {
    "none": _none,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": _str,
    "Path": _path,
    "date": _date,
    "literal": _literal,
    "union": _union,
    "any": _any,
    "list": _list,
    "tuple": _tuple,
    "dict": _dict,
}
