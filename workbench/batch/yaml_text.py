"""YAML whose scalars stay text, so that annotations and not spellings decide their types."""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from workbench.batch.values import Text

MAX_DEPTH = 20
CORE = "tag:yaml.org,2002:"
PLAIN_TAGS = frozenset(CORE + t for t in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge"))


class YamlError(ValueError):
    """What is wrong, and in which line (from 1; 0 where that is not known)."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def parse_yaml(text: str) -> Any:
    """One document as lists, dicts with string keys, and ``Text``; ``None`` for an empty one.

    Raises:
        YamlError: not YAML, a key twice, or more than plain data.
    """
    value, _ = parse_yaml_lines(text)
    return value


def parse_yaml_lines(text: str) -> tuple[Any, dict[str, int]]:
    """The document, and the line in which each key of its top-level mapping stands."""
    try:
        node = YAML(typ="base", pure=True).compose(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise YamlError(f"not valid YAML: {error.problem or error.context}", line) from None
    except (YAMLError, ValueError) as error:
        raise YamlError(f"not valid YAML: {str(error).splitlines()[0]}") from None
    if node is None:
        return None, {}
    lines = {}
    if isinstance(node, MappingNode):
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key, ScalarNode)}
    return _data(node, 0), lines


def _data(node: Node, depth: int) -> Any:
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH:
        raise YamlError("nested too deeply", line)
    if str(node.tag) not in PLAIN_TAGS:
        raise YamlError(f"tag {node.tag} is not plain data", line)
    if isinstance(node, ScalarNode):
        return Text(node.value, quoted=node.style in ("'", '"', "|", ">"))
    if isinstance(node, SequenceNode):
        return [_data(item, depth + 1) for item in node.value]
    done: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise YamlError("a key is not a scalar", key.start_mark.line + 1)
        if key.value in done:
            raise YamlError(f"the key {key.value!r} stands twice", key.start_mark.line + 1)
        done[key.value] = _data(value, depth + 1)
    return done
