"""Findings and runs brought together: what the pages of the site have to say, before it is put in words of HTML."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from markupsafe import Markup

from workbench.experiment.finding import ArmStatus, Decision, Effect, Finding, GuardVerdict
from workbench.records.record import RunRecord
from workbench.report import tables
from workbench.report.figures import metric_name


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
    title: str
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
        return slug(self.run.dir.name)

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
        effects, guards = {e.arm: e for e in f.effects}, {g.arm: g for g in f.guards}
        decisions = {d.arm: d for d in f.decisions}
        return [
            Variant(arm.name, arm.status, effects.get(arm.name), guards.get(arm.name), decisions.get(arm.name))
            for arm in f.arms
            if arm.name != f.baseline
        ]

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


@dataclass
class RunRow:
    """A run in the list of all. The newest run of a notebook without a finding has its executed notebook as a page."""

    run: RunRecord
    page: FindingPage | None
    finding_trouble: str
    has_notebook_page: bool = False

    @property
    def slug(self) -> str:
        return slug(self.run.dir.name)

    @property
    def href(self) -> str:
        if self.page:
            return self.page.href
        return f"notebooks/{self.slug}.html" if self.has_notebook_page else ""

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
    pages.sort(key=lambda p: p.finding.created.timestamp(), reverse=True)
    newest: dict[tuple[str, str, str], FindingPage] = {}
    for page in pages:
        f = page.finding
        page.latest = newest.setdefault((f.name, f.tier, f.device), page)
    rows.sort(key=lambda row: row.run.dir.name, reverse=True)
    seen: set[str] = set()
    for row in rows:
        if not row.page and row.run.notebook not in seen and (row.run.dir / "notebook.ipynb").exists():
            seen.add(row.run.notebook)
            row.has_notebook_page = True
    return pages, rows


def slug(text: str) -> str:
    """A file name for any text; texts that differ get names that differ."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:80]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values under dotted names."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat
