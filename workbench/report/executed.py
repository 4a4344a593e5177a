"""An executed notebook made fit for a page: short, quiet, and without anything that a browser would fetch or run."""

import copy
import re
from pathlib import Path
from typing import Any

import bleach
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_output

from workbench.experiment.finding import Finding
from workbench.report.panel import FINDING_MARK

MAX_LINES = 80
"""Lines of one text output that are kept, half from its start and half from its end."""
MAX_LINE = 2_000
MAX_HTML = 400_000
KEPT_MIME = ("text/html", "image/svg+xml", "image/png", "image/jpeg", "text/latex", "text/markdown", "text/plain")
TAGS = bleach.ALLOWED_TAGS | {
    "br", "caption", "del", "details", "div", "figcaption", "figure", "h2", "h3", "h4", "hr", "img", "p", "pre",
    "progress", "s", "span", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "tt", "u",
}  # fmt: skip
PLAIN_ATTRIBUTES = {"alt", "class", "colspan", "height", "max", "open", "rowspan", "scope", "title", "value", "width"}


def read_executed(path: Path, finding: Finding | None = None) -> list[NotebookNode]:
    """The notebook's cells, outputs cleaned, joined and capped; outputs that only show ``finding`` again are left out.

    Raises:
        ValueError: the file is not a notebook.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
    except OSError:
        raise
    except Exception as error:  # nbformat lets JSON, schema and attribute errors through, depending on what is broken
        raise ValueError(f"{path.name} cannot be read as a notebook: {error}") from error
    return [_page_cell(cell, finding) for cell in notebook.cells]


def clean_html(html: str) -> str:
    """HTML that can neither run a script nor fetch anything: allowed tags and attributes, pictures only as data."""
    html = re.sub(r"<(script|style)\b.*?</\1\s*>", "", html, flags=re.DOTALL | re.IGNORECASE)
    return bleach.clean(
        html, tags=TAGS, attributes=_attribute_allowed, protocols=["http", "https", "mailto", "data"], strip=True
    )


def _attribute_allowed(tag: str, name: str, value: str) -> bool:
    if tag == "img" and name == "src":
        return re.match(r"data:image/(png|jpeg|gif|webp);base64,", value) is not None
    if tag == "a" and name == "href":
        return re.match(r"https?://|mailto:|#", value) is not None
    return name in PLAIN_ATTRIBUTES


def _page_cell(cell: NotebookNode, finding: Finding | None) -> NotebookNode:
    cell = copy.deepcopy(cell)
    if cell.cell_type == "markdown":
        cell.source = _demote_headings(cell.source)
    if cell.cell_type == "code":
        cell.outputs = [_page_output(output, finding) for output in _joined_streams(cell.outputs)]
    return cell


def _demote_headings(source: str) -> str:
    """Headings two levels down, under the page's own; fenced code stays as it is."""
    lines, fenced = [], False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        lines.append(line if fenced else re.sub(r"^(#{1,4}) ", r"##\1 ", line))
    return "\n".join(lines)


def _joined_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One output per stream and stretch: progress bars write hundreds of small ones."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last and last.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _page_output(output: NotebookNode, finding: Finding | None) -> NotebookNode:
    if output.output_type == "stream":
        return new_output("stream", name=output.name, text=capped(output.text))
    if output.output_type == "error":
        output.traceback = [capped("\n".join(output.traceback))]
        return output
    mark = output.metadata.get(FINDING_MARK)
    if finding and mark == {"name": finding.name, "created": finding.created.isoformat()}:
        note = "*The finding shown here has its figures and tables at the top of this page.*"
        return new_output("display_data", {"text/markdown": note})
    return new_output("display_data", _page_data(output.data))


def _page_data(data: NotebookNode) -> dict[str, Any]:
    """The richest form a page can show, alone."""
    best = next((mime for mime in KEPT_MIME if mime in data), None)
    if best == "text/html" and len(data[best]) > MAX_HTML and "image/png" not in data:
        return {"text/plain": f"({len(data[best]):,} characters of HTML left out; the run's notebook has them)"}
    if best == "text/html":
        return {best: clean_html(data[best])}
    if best is None:
        return {"text/plain": f"(an output of type {', '.join(data)} that a page cannot show)"}
    return {best: capped(data[best]) if best == "text/plain" else data[best]}


def capped(text: str) -> str:
    """Text as a terminal would leave it (carriage returns overwrite), its middle left out when it is long."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")]
    lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}… ({len(line) - MAX_LINE:,} more)" for line in lines]
    if len(lines) > MAX_LINES:
        left_out = f"… {len(lines) - MAX_LINES:,} lines left out; the run's notebook has them …"
        lines = [*lines[: MAX_LINES // 2], left_out, *lines[-MAX_LINES // 2 :]]
    return "\n".join(lines)
