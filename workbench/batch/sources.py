"""Where parameters' values come from: ``-p`` and ``-r``, ``-y``, ``-f``, or a Python mapping."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.batch.values import Text
from workbench.batch.yaml_text import YamlError, parse_yaml_lines
from workbench.errors import Refused

FORMATS = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True)
class Given:
    """A value not yet typed, and where it was given."""

    value: Any
    origin: str = ""


def from_mapping(values: Mapping[Any, Any], origin: str = "") -> dict[str, Given]:
    """Values from Python, or from a profile."""
    for key in values:
        if not isinstance(key, str):
            raise Refused("parameter name", key, allowed="a string")
    return {key: Given(value, origin) for key, value in values.items()}


def from_options(
    typed: Iterable[tuple[str, str]] = (),
    raw: Iterable[tuple[str, str]] = (),
    inline: Iterable[str] = (),
    files: Iterable[Path] = (),
) -> dict[str, Given]:
    """What the command line's ``-p``, ``-r``, ``-y`` and ``-f`` say; single values win over ``-y``, and that over files.

    Raises:
        Refused: a name given twice at one of these levels, a file that cannot be read.
    """
    # An empty text on the command line is an empty string, not YAML's null.
    single = [(name, Given(Text(text, quoted=not text), "-p")) for name, text in typed]
    single += [(name, Given(Text(text, quoted=True), "-r")) for name, text in raw]
    levels = [
        [item for path in files for item in from_file(Path(path)).items()],
        [item for text in inline for item in from_yaml(text).items()],
        single,
    ]
    return {name: given for level in levels for name, given in _once(level).items()}


def from_yaml(text: str, source: str = "-y") -> dict[str, Given]:
    try:
        values, lines = parse_yaml_lines(text)
    except YamlError as error:
        raise Refused(f"{_place(source, error.line)}: {error}", fix="correct it") from None
    _require_mapping(values, source)
    return {key: Given(value, _place(source, lines.get(key, 0))) for key, value in values.items()}


def from_file(path: Path) -> dict[str, Given]:
    """A mapping of parameters from YAML, JSON or TOML, by the file's ending.

    Raises:
        Refused: not there, not readable, not such a mapping; with the line where one is known.
    """
    if path.suffix.lower() not in FORMATS:
        raise Refused("parameter file", str(path), allowed=" ".join(FORMATS), fix="rename it to what it holds")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Refused("parameter file", str(path), allowed=f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Refused("parameter file", str(path), allowed=f"UTF-8 text (byte {error.start} is not)") from None
    if path.suffix.lower() == ".json":
        values = _json(text, path)
    elif path.suffix.lower() == ".toml":
        values = read_toml(text, path)
    else:
        return from_yaml(text, str(path))
    _require_mapping(values, str(path))
    return {key: Given(value, _place(str(path), _line_of(key, text))) for key, value in values.items()}


def read_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its message names the line
        raise Refused(f"{path}: not valid TOML: {error}", fix="correct it") from None


def _json(text: str, path: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, _ in pairs:
            if sum(key == other for other, _ in pairs) > 1:
                line = _line_of(key, text, occurrence=2)
                raise Refused(f"{_place(str(path), line)}: the key {key!r} stands twice", fix="remove one of the two")
        return dict(pairs)

    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise Refused(f"{_place(str(path), error.lineno)}: not valid JSON: {error.msg}", fix="correct it") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: not valid JSON: {error}", fix="correct it") from None


def _require_mapping(values: Any, source: str) -> None:
    if values is None or values == {} or (isinstance(values, Text) and not values.quoted and not values.text):
        raise Refused(f"{_place(source, 1)}: empty", allowed="a mapping of parameter names to values")
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise Refused(f"{_place(source, 1)}: {kind}", allowed="a mapping of parameter names to values")


def _once(items: Iterable[tuple[str, Given]]) -> dict[str, Given]:
    done: dict[str, Given] = {}
    for name, given in items:
        if name in done:
            raise Refused(
                f"parameter {name!r} is given twice ({done[name].origin}; {given.origin})", fix="give it once"
            )
        done[name] = given
    return done


def _place(source: str, line: int) -> str:
    return f"{source}, line {line}" if line else source


def _line_of(key: str, text: str, occurrence: int = 1) -> int:
    """Line of a key in JSON or TOML, 0 where it is spelt with escapes."""
    pattern = re.compile(rf'(?<![\w-])"?{re.escape(key)}"?\s*[:=]')
    found = [match.end() for match in pattern.finditer(text)]
    return text.count("\n", 0, found[occurrence - 1]) + 1 if len(found) >= occurrence else 0
