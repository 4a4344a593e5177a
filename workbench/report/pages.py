"""The pages of the site, written as sources for Sphinx.

Text from records reaches a page through autoescaped templates or ``markdown_text`` only, so names show as spelt.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

from workbench.experiment.finding import Finding
from workbench.records.record import RunRecord
from workbench.report import tables
from workbench.report.claims import VERDICTS, load_claims
from workbench.report.collection import FindingPage, Plot, RunRow, gather
from workbench.report.executed import read_executed
from workbench.report.figures import TITLES, VIEWS, available, describe
from workbench.report.sphinx_ext import OWN
from workbench.report.style import render

HERE = Path(__file__).parent
WITHOUT_RESULT = {"failed", "killed", "timeout", "interrupted", "refused", "broken"}


def write_sources(records: list[RunRecord], root: Path, source: Path) -> None:
    """All sources of the site below ``source``."""
    pages, rows = gather(records)
    latest = sorted((p for p in pages if p.is_latest), key=lambda p: p.finding.name)
    claims = load_claims()
    shared = {"root": str(root), "runs": rows, "claims": claims, "latest": latest}
    fragments = source / "fragments"
    for folder in (source / "findings", source / "notebooks", fragments):
        folder.mkdir(parents=True)
    templates = _templates()

    def write(name: str, title: str, extra: str = "", **values: Any) -> None:
        (fragments / f"{name}.html").write_text(
            templates.get_template(f"{name}.html").render(**shared, **values), "utf-8"
        )
        (source / f"{name}.md").write_text(f"# {title}\n\n{_raw(f'fragments/{name}.html')}\n\n{extra}", "utf-8")

    top = _toctree(
        [("All findings", "findings"), ("Claims", "claims"), ("Runs", "runs"), ("How to read this", "reading")]
    )
    troubled = sum(row.run.status in WITHOUT_RESULT for row in rows)
    settled = sum(claim.verdict != "open" for claim in claims)
    earlier = [p for p in pages if not p.is_latest]
    write("index", "Findings", top, earlier=earlier, troubled=troubled, settled=settled)
    write("findings", "All findings", _toctree([(p.finding.title, f"findings/{p.slug}") for p in latest]), pages=pages)
    tally = Counter(claim.verdict for claim in claims)
    speaking = {c.id: [p for p in latest if c.id in p.finding.claims] for c in claims}
    grounds = {c.id: next((p for p in latest if p.finding.name == c.finding), None) for c in claims}
    verdicts = [(verdict, tally[verdict]) for verdict in VERDICTS]
    write("claims", "Claims", tally=verdicts, speaking=speaking, verdict_pages=grounds)
    write("runs", "Runs", statuses=Counter(row.run.status for row in rows).most_common())
    write("reading", "How to read this")
    for page in pages:
        _write_finding(page, source, templates)
    for row in rows:
        if row.has_notebook_page:
            _write_run(row, source, templates)


def _write_finding(page: FindingPage, source: Path, templates: Environment) -> None:
    # An earlier finding keeps its numbers and one figure: drawing takes most of the time that a site takes.
    views = available(page.finding) if page.is_latest else available(page.finding)[:1]
    page.figures = [_draw(page, name, source) for name in views]
    cells = [new_markdown_cell(f"# {markdown_text(page.finding.title)}")]
    for heading, name in (("", "finding"), ("## Figures", "figures"), ("## Numbers", "numbers")):
        fragment = f"{page.slug}-{name}.html"
        (source / "fragments" / fragment).write_text(templates.get_template(f"{name}.html").render(page=page), "utf-8")
        cells.append(new_markdown_cell(f"{heading}\n\n{_raw(f'../fragments/{fragment}')}"))
    cells.append(new_markdown_cell("## Executed notebook"))
    cells += _executed_cells(page.run.dir, page.finding)
    _write_notebook(cells, source / "findings" / f"{page.slug}.ipynb", orphan=not page.is_latest)


def _write_run(row: RunRow, source: Path, templates: Environment) -> None:
    fragment = f"{row.slug}-run.html"
    (source / "fragments" / fragment).write_text(templates.get_template("run.html").render(row=row), "utf-8")
    title = f"# {markdown_text(row.run.notebook or row.run.dir.name)}\n\n{_raw(f'../fragments/{fragment}')}"
    cells = [new_markdown_cell(title), *_executed_cells(row.run.dir)]
    _write_notebook(cells, source / "notebooks" / f"{row.slug}.ipynb", orphan=True)


def _executed_cells(folder: Path, finding: Finding | None = None) -> list[NotebookNode]:
    try:
        return read_executed(folder / "notebook.ipynb", finding)
    except (ValueError, OSError) as error:
        reason = "this run left none" if isinstance(error, FileNotFoundError) else str(error)
        return [new_markdown_cell(markdown_text(f"There is no executed notebook to show: {reason}."))]


def _write_notebook(cells: list[NotebookNode], path: Path, *, orphan: bool) -> None:
    metadata = {"orphan": orphan, "language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    path.write_text(json.dumps(new_notebook(cells=cells, metadata=metadata)), "utf-8")


def _draw(page: FindingPage, name: str, source: Path) -> Plot:
    """The view for light and for dark pages, as files that Sphinx copies to the site."""
    folder = source / "static" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"{page.slug}-{name}-{tone}.svg" for tone in ("light", "dark")]
    for file, dark in zip(files, (False, True), strict=True):
        (folder / file).write_bytes(render(VIEWS[name](page.finding, dark=dark), "svg"))
    light, dark_file = (f"../_static/figures/{file}" for file in files)
    return Plot(TITLES[name], light, dark_file, describe(page.finding, name))


def markdown_text(text: str) -> str:
    """Text as Markdown that shows it letter for letter: signs are escaped, line breaks become spaces."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text.split())) or "(untitled)"


def _raw(path: str) -> str:
    """A directive that puts an already escaped file of HTML here; no text in it can end the directive early."""
    return f"```{{raw}} html\n:file: {path}\n:class: {OWN}\n```"


def _toctree(entries: list[tuple[str, str]]) -> str:
    lines = [f"{' '.join(title.split()) or '(untitled)'} <{document}>" for title, document in entries]
    return "\n".join(["```````{toctree}", ":hidden:", "", *lines, "```````"]) if lines else ""


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    filters: dict[str, Callable[..., str]] = {
        "slug": lambda word: tables.Badge(word).css_class.removeprefix("wb-"),
        "ratio": tables.ratio,
        "bounds": tables.bounds,
        "place": _place,
        "day": lambda when: f"{when:%Y-%m-%d}",
        "minute": _minute,
    }
    environment.filters.update(filters)
    return environment


def _place(value: float, span: tuple[float, float]) -> str:
    """Horizontal place of a ratio on a strip 120 wide, on a log axis."""
    low, high = (math.log(v) for v in span)
    if math.isnan(value) or value <= 0:
        return "4"
    share = (math.log(value) - low) / (high - low) if math.isfinite(value) else 1.0
    return f"{4 + 112 * min(max(share, 0.0), 1.0):.1f}"


def _minute(when: datetime | None) -> str:
    return f"{when:%Y-%m-%d %H:%M}" if when else tables.NONE
