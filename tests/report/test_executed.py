from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.runs import executed_notebook
from tests.samples import sample_finding
from workbench.report.executed import MAX_LINES, capped, clean_html, read_executed


@pytest.fixture
def outputs(tmp_path: Path) -> list:
    finding = sample_finding()
    nbformat.write(executed_notebook(finding), tmp_path / "notebook.ipynb")
    return read_executed(tmp_path / "notebook.ipynb", finding)[1].outputs


def test_a_progress_bar_leaves_its_last_line_once(outputs: list) -> None:
    assert [o.text for o in outputs if o.get("name") == "stderr"] == ["100%|bar"]


def test_a_flood_of_lines_keeps_both_ends_and_says_how_much_is_missing(outputs: list) -> None:
    text = next(o.text for o in outputs if o.get("name") == "stdout")
    assert len(text.splitlines()) == MAX_LINES + 1
    assert "19,920 lines left out" in text


def test_a_line_without_end_is_cut() -> None:
    assert len(capped("x" * 1_000_000)) < 3_000


def test_the_finding_shown_again_becomes_a_note_and_another_finding_stays(outputs: list, tmp_path: Path) -> None:
    assert "top of this page" in outputs[-1].data["text/markdown"]
    nbformat.write(executed_notebook(sample_finding("another")), tmp_path / "notebook.ipynb")
    assert "<img" in read_executed(tmp_path / "notebook.ipynb", sample_finding())[1].outputs[-1].data["text/html"]


def test_a_kernel_s_own_output_of_show_is_recognised_as_the_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    finding = sample_finding()
    (tmp_path / "finding.json").write_text(finding.model_dump_json())
    code = """from pathlib import Path
from workbench.experiment.finding import Finding
from workbench.report import show
show(Finding.model_validate_json(Path("finding.json").read_bytes()))"""
    notebook = new_notebook(cells=[new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = notebook.cells[0].outputs
    assert output.data["text/html"].count("<img") == 1
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    (shown,) = read_executed(tmp_path / "notebook.ipynb", finding)[0].outputs
    assert "top of this page" in shown.data["text/markdown"]


@pytest.mark.parametrize(
    ("html", "gone"),
    [
        ("<script>alert(1)</script>ok", "alert"),
        ("<style>p{}</style>ok", "p{}"),
        ('<p onclick="alert(1)">ok</p>', "alert"),
        ('<a href="javascript:alert(1)">ok</a>', "alert"),
        ('<img src="http://example.org/x.png">ok', "example"),
        ('<img src="data:image/svg+xml;base64,AA">ok', "svg"),
        ('<p style="background: url(//example.org)">ok</p>', "example"),
        ('<iframe src="https://example.org"></iframe>ok', "example"),
        ('<link rel="stylesheet" href="https://example.org">ok', "example"),
    ],
)
def test_html_loses_what_runs_or_fetches_and_keeps_its_text(html: str, gone: str) -> None:
    assert gone not in clean_html(html)
    assert "ok" in clean_html(html)


def test_html_keeps_tables_links_and_pictures_that_are_data() -> None:
    html = (
        '<table><tr><td colspan="2">1</td></tr></table><a href="https://a.b">c</a><img src="data:image/png;base64,AA">'
    )
    for part in ('<td colspan="2">', 'href="https://a.b"', "data:image/png"):
        assert part in clean_html(html)


@pytest.mark.parametrize("content", ["", "{}", '{"cells": 3}', "not json", "\ufeff[]"])
def test_a_file_that_is_no_notebook_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notebook\.ipynb"):
        read_executed(path)
