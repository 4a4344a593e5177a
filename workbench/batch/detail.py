"""One run in full, and two runs side by side."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from workbench.batch.notebook import LOG
from workbench.batch.status import duration, seconds, status_text
from workbench.experiment.finding import Finding, read_finding
from workbench.records.record import RunRecord

TAIL_LINES = 20


class Difference(NamedTuple):
    """One thing in which two runs differ; ``about`` is ``parameters.steps``, ``effect of bf16``, …"""

    about: str
    first: str
    second: str


def describe(record: RunRecord) -> Group:
    """What came of a run first, then everything that the record says, and the log's end if it went wrong."""
    table = Table(box=None, show_header=False, pad_edge=False)
    rows: dict[str, str] = {"run": escape(record.id), "status": status_text(record.status)}
    rows |= {"notebook": escape(record.notebook), "folder": escape(str(record.dir))}
    if record.started:
        rows["started"] = f"{record.started.astimezone():%Y-%m-%d %H:%M:%S}, took {duration(seconds(record))}"
    if record.ladder:
        rows["ladder"] = escape(f"{record.ladder}, profile {record.profile}")
    rows |= {f"  {name}": escape(json.dumps(value, ensure_ascii=False)) for name, value in record.parameters.items()}
    rows |= {f"  {name}": escape(value) for name, value in flat(record.provenance)}
    for name, value in rows.items():
        table.add_row(escape(name), value)
    parts: list[RenderableType] = []
    if found := read_finding(record.dir):
        parts += [summary(found), Text("")]
    if record.error:
        parts.append(Text(f"{record.error}\n", style="red"))
    parts.append(table)
    if record.status in ("failed", "killed") and (tail := log_tail(record)):
        parts.append(Text(f"\n{LOG} ends with:\n{tail}", style="dim"))
    return Group(*parts)


def summary(finding: Finding) -> Group:
    """The question and a line per variant: what was decided, and the effect."""
    table = Table(box=None, show_header=False, pad_edge=False)
    effects = {effect.arm: effect for effect in finding.effects}
    for decision in finding.decisions:
        e = effects.get(decision.arm)
        figure = f"{e.ratio:.2f}× [{e.interval.low:.2f}, {e.interval.high:.2f}]" if e else ""
        table.add_row(escape(f"  {decision.arm}"), escape(decision.decision), figure)
    about = f"{finding.question} Ratios of throughput to {finding.baseline!r}; {finding.tier} on {finding.device}."
    return Group(Text(about), table)


def differences(first: RunRecord, second: RunRecord) -> list[Difference]:
    """What differs between two runs; effects are listed even when they are equal, for they are what is compared."""
    a, b = dict(_facts(first)), dict(_facts(second))
    names = list(dict.fromkeys([*a, *b]))
    return [
        Difference(name, a.get(name, "–"), b.get(name, "–"))
        for name in names
        if a.get(name) != b.get(name) or name.startswith("effect")
    ]


def comparison_table(first: RunRecord, second: RunRecord, rows: list[Difference]) -> RenderableType:
    table = Table("", escape(first.id), escape(second.id), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    devices = [row for row in rows if row.about == "device"]
    if not devices:
        return table
    return Group(table, Text("\nDifferent devices: the ratios may be compared, the times may not.", style="yellow"))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def log_tail(record: RunRecord) -> str:
    try:
        text = (record.dir / LOG).read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "notebook", record.notebook
    yield "status", record.status
    yield from flat(record.parameters, "parameters.")
    yield from flat(record.provenance, "provenance.")
    if found := read_finding(record.dir):
        yield "device", found.device
        decisions = {d.arm: d.decision for d in found.decisions}
        for effect in found.effects:
            interval = f"[{effect.interval.low:.2f}, {effect.interval.high:.2f}]"
            said = f"{effect.ratio:.2f}× {interval} {decisions.get(effect.arm, '')}"
            yield f"effect of {effect.arm} on {effect.metric}", said.strip()
