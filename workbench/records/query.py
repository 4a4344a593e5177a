"""Reading runs: every folder is one record, a broken one says so and hides no other."""

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import Refused, nearest
from workbench.records.atomic import to_json
from workbench.records.record import EXIT_CODES, RunRecord

STALE_AFTER_S = 600
"""Ten minutes; the batch runner touches ``run.json`` every half minute."""


def scan(root: Path | str = "runs") -> list[RunRecord]:
    """All runs below ``root`` in order of their ids, which is the order in which they began."""
    return [read(folder) for folder in _folders(Path(root))]


def read(folder: Path) -> RunRecord:
    """The record of one run, true to what is known now: ``running`` becomes ``killed`` or ``stale``."""
    record = _stored(folder)
    writer = record.writer
    if record.status != "running" or writer is None:
        return record
    if writer.is_gone():
        record = _stored(folder)  # the writer may have written its last word since, and ended
        return _killed(record) if record.status == "running" else record
    silent = (datetime.now(UTC) - _last_sign(folder)).total_seconds()
    if writer.is_elsewhere() and silent > STALE_AFTER_S:
        said = f"silent for {silent / 60:.0f} minutes; whether {writer.host} still runs it cannot be seen from here"
        return record.model_copy(update={"status": "stale", "error": said})
    return record


def _stored(folder: Path) -> RunRecord:
    try:
        record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    except FileNotFoundError:
        return _broken(folder, "run.json is missing")
    except ValidationError as error:
        return _broken(folder, f"run.json cannot be read: {error.errors()[0]['msg']}")
    except OSError as error:
        return _broken(folder, f"run.json cannot be read: {error}")
    record.dir = folder
    return record


def _killed(record: RunRecord) -> RunRecord:
    assert record.writer is not None
    said = f"the process that ran it (pid {record.writer.pid} on {record.writer.host}) is gone"
    end = {"status": "killed", "error": said, "exit_code": EXIT_CODES["killed"], "ended": _last_sign(record.dir)}
    return record.model_copy(update=end)


def load(root: Path | str, run_id: str) -> RunRecord:
    """One run by its id or an unambiguous part of it; ``last`` is the newest."""
    ids = [folder.name for folder in _folders(Path(root))]
    found = ids[-1:] if run_id == "last" else ([run_id] if run_id in ids else [i for i in ids if run_id in i])
    if len(found) == 1:
        return read(Path(root) / found[0])
    if found:
        raise Refused("run", run_id, allowed="an id that names one run: " + ", ".join(found[:5]))
    raise Refused("run", run_id, allowed=f"an id in {root}/", fix=nearest(run_id, ids) if ids else "make a run first")


def where(root: Path | str, condition: str = "") -> list[dict[str, Any]]:
    """Rows of the runs that satisfy a DuckDB condition, such as ``status = 'failed' and parameters.steps > 40``.

    Only validated records are handed to DuckDB, since one truncated file would fail the whole query.
    """
    import duckdb

    records = [json.loads(to_json(r.model_dump(mode="json"))) for r in scan(root)]
    if not records:
        return []
    with duckdb.connect() as connection, tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(to_json(r) + "\n" for r in records)
        file.flush()
        read_all = f"read_json('{file.name}', format='newline_delimited', maximum_object_size=100000000)"
        connection.execute(f"create table runs as select * from {read_all}")
        # A condition comes from a person, perhaps by way of a script: it reads the runs and nothing else.
        connection.execute("set enable_external_access = false; set lock_configuration = true")
        try:
            query = f"select * from runs where ({condition or 'true'}\n)"
            if len(connection.extract_statements(query)) != 1:
                raise Refused("condition", condition, allowed="one SQL condition", fix="leave out the semicolon")
            rows = connection.execute(query)
            names = [column[0] for column in rows.description or ()]
            return [dict(zip(names, values, strict=True)) for values in rows.fetchall()]
        except duckdb.Error as error:
            fields = "SQL over the fields of run.json: " + ", ".join(RunRecord.model_fields)
            raise Refused("condition", condition, allowed=fields, fix=str(error).split("\n")[0]) from None


def progress(folder: Path) -> dict[str, Any]:
    """The last ``progress.json`` of a run: ``done``, ``total``, ``label``, ``time``; empty where there is none."""
    found = _object(folder / "progress.json")
    whole = isinstance(found.get("label"), str) and all(
        isinstance(found.get(k), int | float) for k in ("done", "total")
    )
    return found if whole else {}


def finding(folder: Path) -> dict[str, Any]:
    """The run's finding as plain data; empty where there is none or it cannot be read."""
    return _object(folder / "finding.json")


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _broken(folder: Path, why: str) -> RunRecord:
    return RunRecord(id=folder.name, notebook="", status="broken", error=why, dir=folder)


def _folders(root: Path) -> list[Path]:
    if root.exists() and not root.is_dir():
        raise Refused("folder of runs", str(root), allowed="a folder; this is a file", fix="name the folder above it")
    if not root.is_dir():
        return []
    return [f for f in sorted(root.iterdir()) if f.is_dir() and not f.name.startswith(".")]


def _last_sign(folder: Path) -> datetime:
    """When anything of the run was last written: its sign of life, or the best that can be said of when it died."""
    files = ("run.json", "progress.json", "metrics.jsonl", "finding.json", "notebook.ipynb")
    times = [path.stat().st_mtime for name in files if (path := folder / name).exists()]
    return datetime.fromtimestamp(max(times, default=0), UTC)
