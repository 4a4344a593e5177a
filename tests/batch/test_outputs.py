"""Text and outputs within bounds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_output

from workbench.batch.outputs import KEPT_CHARS, MAX_OUTPUTS, CappedOutputs, CappedText


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["a\n", "b"], "a\nb"),
        (["\r 1%", "\r 2%", "\r100%\n"], "100%\n"),
        (["10%\r", "20%\r"], "20%\r"),
        (["a\r\nb\r\n"], "a\r\nb\r\n"),
        (["x\nold", "\rnew\n"], "x\nnew\n"),
    ],
)
def test_carriage_returns_overwrite_as_on_a_terminal(pieces: list[str], shown: str) -> None:
    text = CappedText()
    for piece in pieces:
        text.append(piece)
    assert str(text) == shown


@given(st.lists(st.integers(1, 3 * KEPT_CHARS), min_size=1, max_size=8), st.booleans())
@settings(max_examples=25, deadline=None)
def test_long_text_keeps_its_ends_and_accounts_for_the_rest(lengths: list[int], in_lines: bool) -> None:
    pieces = [("ab\n" if in_lines else "abc") * (length // 3) for length in lengths]
    text, whole = CappedText(), "".join(pieces)
    for piece in pieces:
        text.append(piece)
    shown = str(text)
    if "cut here" not in shown:
        assert shown == whole
        return
    head, tail = shown.split("\n… ")[0], shown.split("cut here …\n\n")[1]
    cut = int(shown.split(" characters)")[0].rsplit("(")[-1].replace(",", ""))
    assert whole.startswith(head) and whole.endswith(tail)
    assert len(head) + cut + len(tail) == len(whole)
    assert len(shown) < 4 * KEPT_CHARS


def test_outputs_beyond_the_bound_are_counted_and_the_latest_is_kept() -> None:
    kept, outs = CappedOutputs(), []
    for i in range(MAX_OUTPUTS + 50):
        outs.append(new_output("display_data", {"text/plain": str(i)}))
        kept.added(outs)
    assert len(outs) == MAX_OUTPUTS
    assert f"{MAX_OUTPUTS + 50 - (MAX_OUTPUTS - 1)} outputs cut here" in outs[-2].text
    assert outs[-1].data["text/plain"] == str(MAX_OUTPUTS + 49)


def test_streams_of_one_name_become_one_output() -> None:
    kept, outs = CappedOutputs(), []

    def stream(name: str, text: str) -> None:
        content: dict[str, Any] = {"name": name, "text": text}
        if not kept.extends_last(outs, content):
            outs.append(new_output("stream", **content))
            kept.added(outs)

    for name, text in [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d"), ("stdout", "e")]:
        stream(name, text)
    kept.render()
    assert [(o.name, o.text) for o in outs] == [("stdout", "ab"), ("stderr", "c"), ("stdout", "de")]
