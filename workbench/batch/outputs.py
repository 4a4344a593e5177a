"""Keeping what a cell prints within bounds: the head and the tail stay, and what was cut between is said."""

from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output

KEPT_CHARS = 65_536
"""Characters kept at each end of one stream or text."""
MAX_OUTPUTS = 200
"""Outputs kept of one cell: all up to here, then the latest."""


class CappedText:
    """Growing text of which the middle is cut once it is long. What a carriage return overwrites is gone, as on a terminal."""

    def __init__(self, text: str = "") -> None:
        self._head, self._tail = "", ""
        self._cut_lines = self._cut_chars = 0
        self.append(text)

    def append(self, text: str) -> None:
        start = self._tail.rfind("\n") + 1
        self._tail = self._tail[:start] + _as_on_a_terminal(self._tail[start:] + text)
        if len(self._tail) > 2 * KEPT_CHARS:
            if not self._head:
                end = _line_end(self._tail, KEPT_CHARS)
                self._head, self._tail = self._tail[:end], self._tail[end:]
            if len(self._tail) > 2 * KEPT_CHARS:
                start = _line_end(self._tail, len(self._tail) - KEPT_CHARS)
                self._cut_lines += self._tail.count("\n", 0, start)
                self._cut_chars += start
                self._tail = self._tail[start:]

    def __str__(self) -> str:
        if not self._cut_chars:
            return self._head + self._tail
        return f"{self._head}\n… {self._cut_lines:,} lines ({self._cut_chars:,} characters) cut here …\n\n{self._tail}"


def _as_on_a_terminal(text: str) -> str:
    if "\r" not in text:
        return text
    lines = text.split("\n")
    shown = [line.rstrip("\r") for line in lines]
    return "\n".join(s[s.rfind("\r") + 1 :] + line[len(s) :] for s, line in zip(shown, lines, strict=True))


def _line_end(text: str, near: int) -> int:
    """The end of the line around ``near``, or ``near`` itself within a very long line."""
    end = text.find("\n", near, near + KEPT_CHARS // 4) + 1
    return end or near


class CappedOutputs:
    """The outputs of one cell. Streams of one name that follow each other become one."""

    def __init__(self) -> None:
        self._streams: list[tuple[NotebookNode, CappedText]] = []
        self._dropped = 0

    @staticmethod
    def may_be_updated(outs: list[NotebookNode]) -> bool:
        """Whether the next output keeps its place, so that a later update of the display finds it."""
        return len(outs) < MAX_OUTPUTS - 2

    def extends_last(self, outs: list[NotebookNode], content: dict[str, Any]) -> bool:
        """Append a stream message to the last output if it continues that."""
        if not outs or outs[-1].output_type != "stream" or outs[-1].name != content["name"]:
            return False
        for node, text in reversed(self._streams):
            if node is outs[-1]:
                text.append(content["text"])
                return True
        return False

    def added(self, outs: list[NotebookNode]) -> None:
        """Cap the output that was just appended, and their number."""
        last = outs[-1]
        if last.output_type == "stream":
            self._streams.append((last, CappedText(last.text)))
        elif "text/plain" in last.get("data", {}):
            last.data["text/plain"] = str(CappedText("".join(last.data["text/plain"])))
        if len(outs) > MAX_OUTPUTS:
            self._dropped += 1 if self._dropped else 2  # the first time, the note itself takes a place
            said = f"… {self._dropped:,} outputs cut here …\n"
            outs[MAX_OUTPUTS - 2 :] = [new_output("stream", name="stderr", text=said), last]
            kept = {id(node) for node in outs}
            self._streams = [(node, text) for node, text in self._streams if id(node) in kept]

    def render(self) -> None:
        """Put the texts into the outputs; done before each save, since a text changes far more often."""
        for node, text in self._streams:
            node.text = str(text)
