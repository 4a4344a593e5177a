"""Small tables of a finding, as HTML. Cells are plain text and are escaped on the way out."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from workbench.experiment.finding import Effect, Finding, GuardVerdict, Interval, Measurement, PredictionCheck
from workbench.report.style import in_unit

NONE = "–"


class Badge(str):
    """A word that stands for a state; pages colour it by its first word."""

    @property
    def css_class(self) -> str:
        return "wb-" + re.sub(r"[^a-z]+", "-", self.lower()).strip("-")


class Table(NamedTuple):
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    """Columns set flush right."""

    def html(self) -> str:
        head = "".join(f"<th{self._class(k)}>{escape(text)}</th>" for k, text in enumerate(self.headers))
        body = "\n".join(
            "<tr>" + "".join(f"<td{self._class(k)}>{badge(cell)}</td>" for k, cell in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return f'<table class="wb-table"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'

    def _class(self, column: int) -> str:
        return ' class="wb-number"' if column in self.numeric else ""


def for_notebook(*shown: Table) -> str:
    """Tables with the little style that a notebook needs; a page of the site has its own and drops this one."""
    style = (
        "<style>.wb-table { border-collapse: collapse; font-size: 92%; line-height: 1.45; margin: 0.8em 0; }"
        " .wb-table th, .wb-table td { padding: 0.25em 0.9em 0.25em 0; text-align: left; vertical-align: top;"
        " border-bottom: 1px solid #8885; } .wb-table .wb-number { text-align: right; white-space: nowrap; }</style>"
    )
    return style + "\n".join(table.html() for table in shown)


def badge(cell: str) -> str:
    """A cell's HTML: text escaped, a state marked as one."""
    text = escape(cell)
    return f'<span class="wb-badge {cell.css_class}">{text}</span>' if isinstance(cell, Badge) else text


def seconds(value: float) -> str:
    factor, unit = in_unit(value)
    return f"{value * factor:.3g} {unit}"


def size(value: float) -> str:
    """Bytes, in MiB below 1 GiB, in GiB below 1 TiB and in TiB above."""
    if value >= 2**40:
        return f"{value / 2**40:.3g} TiB"
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"


def ratio(effect: Effect) -> str:
    return f"{effect.ratio:.{_digits(effect.interval)}f}×"


def bounds(interval: Interval | None) -> str:
    if interval is None:
        return NONE
    digits = _digits(interval)
    return f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]".replace("-", "−")


def _digits(interval: Interval) -> int:
    """Decimals that do not round a narrow interval onto 1 or 0, which it may just exclude."""
    return 3 if interval.high - interval.low < 0.05 else 2


def arms(finding: Finding) -> Table:
    """Every arm with its status, and what was measured of those that completed."""
    rows = []
    for arm in finding.arms:
        m = arm.measurement
        name = arm.name + (" (baseline)" if arm.name == finding.baseline else "")
        rows.append([name, Badge(arm.status), *(_measured(m) if m else [NONE] * 5), _cut(arm.error)])
    headers = ["arm", "status", "samples/s", "step time", "peak memory", "MFU", "J/step", "note"]
    return _without_empty_columns(Table(headers, rows, frozenset({2, 3, 4, 5, 6})))


def effects(finding: Finding) -> Table:
    """Every variant: its ratio to the baseline, how it was measured, its guard and the decision."""
    guards = {g.arm: g for g in finding.guards}
    reasons = {d.arm: d for d in finding.decisions}
    measured = {e.arm: e for e in finding.effects}
    rows = []
    for arm in finding.arms:
        if arm.name == finding.baseline:
            continue
        e, d = measured.get(arm.name), reasons.get(arm.name)
        figures = [ratio(e), bounds(e.interval), f"{e.rounds}, {e.stop}"] if e else [NONE] * 3
        state = Badge(guards[arm.name].state) if arm.name in guards else NONE
        rows.append([arm.name, *figures, state, Badge(d.decision) if d else NONE, d.reason if d else ""])
    headers = ["variant", "ratio", "interval", "rounds, stop", "guard", "decision", "why"]
    return Table(headers, rows, frozenset({1, 2}))


def guards(finding: Finding) -> Table:
    rows = [[g.arm, g.kind, Badge(g.state), *_guard_figures(g), g.reason] for g in finding.guards]
    return Table(
        ["variant", "guard", "state", "difference", "interval", "margin", "seeds", "why"], rows, frozenset({3, 4, 5, 6})
    )


def predictions(finding: Finding) -> Table:
    """Each prediction beside its measurement; the error is predicted / measured − 1."""
    rows = [prediction_row(p) for p in finding.predictions]
    return Table(["arm", "quantity", "predicted", "measured", "error", "method"], rows, frozenset({2, 3, 4}))


def predictions_before(checks: Sequence[PredictionCheck]) -> Table:
    """What is expected of each arm, before anything has run."""
    rows = [[*prediction_row(p)[:3], p.method] for p in checks]
    return Table(["arm", "quantity", "predicted", "method"], rows, frozenset({2}))


def prediction_row(p: PredictionCheck) -> list[str]:
    """Arm, quantity, predicted, measured, error, method."""
    write = {"step_time": seconds, "peak_memory_bytes": size}.get(p.quantity, lambda v: f"{v:.2f}×")
    measured = NONE if p.measured is None else write(p.measured)
    error = NONE if p.error is None else f"{p.error:+.0%}".replace("-", "−")
    return [p.arm, p.quantity.removesuffix("_bytes").replace("_", " "), write(p.predicted), measured, error, p.method]


def _measured(m: Measurement) -> list[str]:
    return [
        f"{m.samples_per_s:.4g}",
        seconds(m.step_time),
        NONE if m.peak_memory_bytes is None else size(m.peak_memory_bytes),
        NONE if m.mfu is None else f"{m.mfu:.1%}",
        NONE if m.energy_joules is None else f"{m.energy_joules:.3g}",
    ]


def _guard_figures(g: GuardVerdict) -> list[str]:
    difference = NONE if g.difference is None else f"{g.difference:+.3g}".replace("-", "−")
    return [difference, bounds(g.interval), f"±{g.margin:g}", str(g.seeds)]


def _cut(text: str, limit: int = 300) -> str:
    """The end of an error, where its cause stands."""
    text = text.strip()
    return text if len(text) <= limit else "…" + text[-limit:]


def _without_empty_columns(table: Table) -> Table:
    kept = [k for k in range(len(table.headers)) if any(row[k] not in (NONE, "") for row in table.rows)]
    return Table(*_columns(table, kept), frozenset(kept.index(k) for k in table.numeric if k in kept))


def _columns(table: Table, kept: Iterable[int]) -> tuple[list[str], list[list[str]]]:
    kept = list(kept)
    return [table.headers[k] for k in kept], [[row[k] for k in kept] for row in table.rows]
