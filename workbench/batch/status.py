"""Runs as a table: for ``workbench status``, ``runs`` and the end of a ladder."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from workbench.records.query import progress
from workbench.records.record import RunRecord

STYLES = {
    "completed": "green",
    "running": "cyan",
    "failed": "red",
    "killed": "red",
    "timeout": "red",
    "broken": "red",
    "refused": "yellow",
    "interrupted": "yellow",
    "stale": "yellow",
}


def runs_table(records: Iterable[RunRecord]) -> Table:
    table = Table("run", "notebook", "status", "took", "exit", "what", box=None, pad_edge=False, header_style="bold")
    for r in records:
        took, code = duration(seconds(r)), "" if r.exit_code is None else str(r.exit_code)
        table.add_row(escape(r.id), escape(r.notebook), status_text(r.status), took, code, escape(doing(r)))
    return table


def doing(record: RunRecord) -> str:
    """What a running run does, or in one line why another one ended."""
    if record.status == "running" and (said := progress(record.dir)):
        return f"{said.get('label', '')} {said.get('done', 0):g}/{said.get('total', 0):g}"
    return next(iter(record.error.splitlines()), "")


def as_json(record: RunRecord) -> dict[str, Any]:
    """The record, its folder, and how far it is if it runs."""
    further = {"dir": str(record.dir)} | ({"progress": progress(record.dir)} if record.status == "running" else {})
    return record.model_dump(mode="json") | further


def status_text(status: str) -> str:
    style = STYLES.get(status, "")
    return f"[{style}]{status}[/]" if style else status


def seconds(record: RunRecord) -> float | None:
    if record.started is None:
        return None
    return ((record.ended or datetime.now(UTC)) - record.started).total_seconds()


def duration(value: float | None) -> str:
    """``7 s``, ``2:05 min``, ``1:02:05 h``."""
    if value is None:
        return ""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    return f"{minutes}:{left:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{left:02} h"
