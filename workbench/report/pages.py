"""What each page of the site says: findings and runs brought together, and written as sources for Sphinx.

Text from records reaches a page through autoescaped templates or ``markdown_text`` only, so a name shows as it is spelt.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from nbformat.v4 import new_markdown_cell, new_notebook

from workbench.experiment.finding import ArmStatus, Decision, Effect, Finding, GuardVerdict
from workbench.records.query import RunRecord
from workbench.report import tables
from workbench.report.claims import VERDICTS, load_claims
from workbench.report.executed import read_executed
from workbench.report.figures import VIEWS, available, describe, metric_name
from workbench.report.sphinx_ext import OWN
from workbench.report.style import render

HERE = Path(__file__).parent
WITHOUT_RESULT = {"failed", "killed", "timeout", "interrupted", "refused", "broken"}


class Variant(NamedTuple):
    name: str
    status: ArmStatus
    effect: Effect | None
    guard: GuardVerdict | None
    decision: Decision | None


class SummaryRow(NamedTuple):
    """One arm in the summary; times are of a step."""

    name: str
    predicted: str
    measured: str
    error: str
    variant: Variant | None


class Plot(NamedTuple):
    light: str
    dark: str
    alt: str


@dataclass
class FindingPage:
    """A finding and the run that made it, with what its page and its card show."""

    finding: Finding
    run: RunRecord
    latest: "FindingPage | None" = None
    """The newest finding of the same notebook, tier and device, which may be this one."""
    figures: list[Plot] = field(default_factory=list)

    @property
    def slug(self) -> str:
        return slug(self.run.id)

    @property
    def href(self) -> str:
        return f"findings/{self.slug}.html"

    @property
    def is_latest(self) -> bool:
        return self.latest is self

    @property
    def latest_href(self) -> str:
        return self.latest.href if self.latest else self.href

    @property
    def variants(self) -> list[Variant]:
        f = self.finding
        by_arm = [{item.arm: item for item in group} for group in (f.effects, f.guards, f.decisions)]
        arms = [arm for arm in f.arms if arm.name != f.baseline]
        return [Variant(arm.name, arm.status, *(group.get(arm.name) for group in by_arm)) for arm in arms]

    @property
    def span(self) -> tuple[float, float]:
        """Ends of the axis of ratios that the card's variants share; holds 1."""
        ends = [v for e in self.finding.effects for v in (e.interval.low, e.interval.high, e.ratio)]
        ends = [v for v in ends if math.isfinite(v) and v > 0] + [0.9, 1.1]
        return min(ends), max(ends)

    @property
    def metric(self) -> str:
        return " and ".join(dict.fromkeys(metric_name(e.metric) for e in self.finding.effects)) or "nothing measured"

    @property
    def summary(self) -> list[SummaryRow]:
        variants = {v.name: v for v in self.variants}
        steps = {p.arm: tables.prediction_row(p) for p in self.finding.predictions if p.quantity == "step_time"}
        rows = []
        for arm in self.finding.arms:
            predicted, error = (
                (steps[arm.name][2], steps[arm.name][4]) if arm.name in steps else (tables.NONE, tables.NONE)
            )
            measured = tables.seconds(arm.measurement.step_time) if arm.measurement else arm.status
            rows.append(SummaryRow(arm.name, predicted, measured, error, variants.get(arm.name)))
        return rows

    @property
    def prediction_error(self) -> str:
        errors = [p.error for p in self.finding.predictions if p.error is not None]
        if not errors:
            return "not known: nothing predicted was measured"
        worst = max(errors, key=abs)
        mean = sum(map(abs, errors)) / len(errors)
        return f"{mean:.0%} on average over {len(errors)} quantities, {worst:+.0%} at worst".replace("-", "−")

    @property
    def effect_said(self) -> str:
        effects = self.finding.effects
        if not effects:
            return "none measured"
        stops = ", ".join(f"{e.arm}: {e.rounds} rounds ({e.stop})" for e in effects)
        confidence = f"{effects[0].interval.confidence:.0%}"
        return f"{self.metric}, ratio to {self.finding.baseline}, with {confidence} intervals; {stops}"

    @property
    def guard_said(self) -> str:
        rules = dict.fromkeys(f"{g.kind} within ±{g.margin:g} over {g.seeds} seeds" for g in self.finding.guards)
        troubles = [f"{g.arm}: {g.state}, {g.reason}" for g in self.finding.guards if g.reason]
        return "; ".join([*rules, *troubles]) or "not run"

    @property
    def tables(self) -> list[tuple[str, Markup]]:
        made = [
            ("Effects and decisions", tables.effects(self.finding)),
            ("Arms", tables.arms(self.finding)),
            ("Guards", tables.guards(self.finding)),
            ("Predictions", tables.predictions(self.finding)),
        ]
        # Table.html escapes its cells, so the fragment may pass the template's own escaping.
        return [(title, Markup(table.html())) for title, table in made if table.rows]

    @property
    def conditions(self) -> list[tuple[str, dict[str, str]]]:
        f = self.finding
        parts = {
            "Workload": f.workload,
            "Protocol": f.protocol,
            "Device": f.device_facts,
            "Provenance": self.run.provenance,
        }
        return [(title, _flat(values)) for title, values in parts.items()]


class RunRow(NamedTuple):
    run: RunRecord
    page: FindingPage | None
    finding_trouble: str

    @property
    def took(self) -> str:
        if not (self.run.started and self.run.ended):
            return tables.NONE
        minutes, seconds = divmod(round((self.run.ended - self.run.started).total_seconds()), 60)
        return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"

    @property
    def error_line(self) -> str:
        lines = [line.strip() for line in self.run.error.splitlines() if line.strip()]
        return lines[-1][:160] if lines else ""


def gather(records: list[RunRecord]) -> tuple[list[FindingPage], list[RunRow]]:
    """Finding pages and run rows, newest first; a finding that cannot be read is told in its run's row."""
    pages, rows = [], []
    for run in records:
        page, trouble = None, ""
        path = run.dir / "finding.json"
        if path.exists():
            try:
                page = FindingPage(Finding.model_validate_json(path.read_bytes()), run)
                pages.append(page)
            except (ValueError, OSError) as error:
                trouble = f"finding.json cannot be read: {str(error).splitlines()[0]}"
        rows.append(RunRow(run, page, trouble))
    pages.sort(key=lambda p: p.finding.created, reverse=True)
    newest: dict[tuple[str, str, str], FindingPage] = {}
    for page in pages:
        f = page.finding
        page.latest = newest.setdefault((f.name, f.tier, f.device), page)
    rows.sort(key=lambda row: row.run.id, reverse=True)
    return pages, rows


def write_sources(records: list[RunRecord], root: Path, source: Path) -> None:
    """All sources of the site below ``source``."""
    pages, rows = gather(records)
    latest = sorted((p for p in pages if p.is_latest), key=lambda p: p.finding.name)
    claims = load_claims()
    shared = {"root": str(root), "runs": rows, "claims": claims, "latest": latest}
    fragments = source / "fragments"
    (source / "findings").mkdir(parents=True)
    fragments.mkdir()
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


def _write_finding(page: FindingPage, source: Path, templates: Environment) -> None:
    page.figures = [_draw(page, name, source) for name in available(page.finding)]
    cells = [new_markdown_cell(f"# {markdown_text(page.finding.title)}")]
    for heading, name in (("", "finding"), ("## Figures", "figures"), ("## Numbers", "numbers")):
        fragment = f"{page.slug}-{name}.html"
        (source / "fragments" / fragment).write_text(templates.get_template(f"{name}.html").render(page=page), "utf-8")
        cells.append(new_markdown_cell(f"{heading}\n\n{_raw(f'../fragments/{fragment}')}"))
    notebook = new_notebook(cells=cells)
    cells.append(new_markdown_cell("## Executed notebook"))
    try:
        executed = read_executed(page.run.dir / "notebook.ipynb", page.finding)
        notebook.metadata = executed.metadata
        cells += executed.cells
    except (ValueError, OSError) as error:
        reason = "this run left none" if isinstance(error, FileNotFoundError) else str(error)
        cells.append(new_markdown_cell(markdown_text(f"There is no executed notebook to show: {reason}.")))
    notebook.cells = cells
    notebook.metadata["orphan"] = not page.is_latest
    (source / "findings" / f"{page.slug}.ipynb").write_text(json.dumps(notebook), "utf-8")


def _draw(page: FindingPage, name: str, source: Path) -> Plot:
    """The view for light and for dark pages, as files that Sphinx copies to the site."""
    folder = source / "static" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    addresses = []
    for tone in ("light", "dark"):
        file = f"{page.slug}-{name}-{tone}.svg"
        (folder / file).write_bytes(render(VIEWS[name](page.finding, dark=tone == "dark"), "svg"))
        addresses.append(f"../_static/figures/{file}")
    return Plot(*addresses, alt=describe(page.finding, name))


def markdown_text(text: str) -> str:
    """Text as Markdown that shows it letter for letter: signs are escaped, line breaks become spaces."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text.split())) or "(untitled)"


def slug(text: str) -> str:
    """A file name for any text; texts that differ get names that differ."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:80]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


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


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values under dotted names."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat
