"""The executed notebook after the end: every cell says what became of it."""

import json
from datetime import UTC, datetime
from pathlib import Path

from workbench.batch.notebook import write_notebook
from workbench.records.record import Status

NOTED: tuple[Status, ...] = ("killed", "timeout", "interrupted")
"""Ends that leave no traceback in the notebook; a line under the cell says what happened."""


def settle(path: Path, status: Status, error: str) -> None:
    """Give the cell that was ``running`` the run's own status; cells after it stay ``pending``."""
    try:
        notebook = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return  # nothing was saved; the record says why
    running = [c for c in notebook["cells"] if c["metadata"].get("papermill", {}).get("status") == "running"]
    for cell in running:
        cell["metadata"]["papermill"] |= {"status": status, "exception": status in ("failed", "refused")}
        if cell["cell_type"] == "code" and status in NOTED:
            said = [f"[workbench] {status}: {error}\n"]
            cell["outputs"].append({"output_type": "stream", "name": "stderr", "text": said})
    timing = notebook["metadata"].get("papermill", {})
    if status == "completed" or not timing:
        return
    now = datetime.now(UTC)
    timing |= {"exception": True, "end_time": now.isoformat()}
    if timing.get("start_time"):
        timing["duration"] = (now - datetime.fromisoformat(timing["start_time"])).total_seconds()
    write_notebook(path, notebook)
