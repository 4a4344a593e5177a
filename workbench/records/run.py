"""Writing one run. ``run.json`` belongs to the runner; what the notebook finds goes to files of its own beside it."""

import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import Refused
from workbench.records.atomic import to_json, write_json
from workbench.records.provenance import collect
from workbench.records.record import EXIT_CODES, RunRecord, Status, Writer

RUN_DIR_VARIABLE = "WORKBENCH_RUN_DIR"
ROOT_VARIABLE = "WORKBENCH_RUNS"
PROGRESS_INTERVAL_S = 0.5
SPARE = ".spare"
SPARE_BYTES = 32_768
"""Kept in a running run's folder and given back at its end, so that the last word can be written on a full disk."""


class Run:
    """A run in progress: its folder and what may be written there.

    Attributes:
        dir: ``runs/<id>``.
        record: the content of ``run.json``, ``None`` when another process (the batch runner) owns it.
    """

    def __init__(self, folder: Path, record: RunRecord | None) -> None:
        self.dir, self.record = folder, record
        self._progress_written = 0.0

    @property
    def id(self) -> str:
        return self.dir.name

    @classmethod
    def create(
        cls,
        notebook: str,
        parameters: Mapping[str, Any],
        root: Path | str = "runs",
        *,
        run_id: str | None = None,
        ladder: str = "",
        profile: str = "",
        provenance: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Make ``root/<id>/`` and its ``run.json`` with status ``running``, owned by this process.

        Raises:
            Refused: the folder exists already, or the root cannot be written to.
        """
        run_id = run_id or new_id(notebook)
        folder = Path(root) / run_id
        record = RunRecord(
            id=run_id,
            notebook=notebook,
            status="running",
            parameters=dict(parameters),
            started=datetime.now(UTC),
            writer=Writer.this_process(),
            provenance=dict(collect() if provenance is None else provenance),
            ladder=ladder,
            profile=profile,
            dir=folder,
        )
        run = cls(folder, record)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            raise Refused("output folder", str(folder), allowed="one that does not exist", fix="name another") from None
        except OSError as error:
            raise _not_writable(folder, error) from None
        try:
            (folder / "artifacts").mkdir()
            (folder / SPARE).write_bytes(bytes(SPARE_BYTES))
            run._save()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise _not_writable(folder, error) from None
        return run

    @classmethod
    def current(cls, notebook: str, parameters: Mapping[str, Any], root: Path | str = "") -> "Run":
        """The run that this kernel belongs to: the batch runner's, or else a new one of its own.

        That one lies in ``root``, ``$WORKBENCH_RUNS`` or ``runs/``, whichever is given first.
        """
        batch = os.environ.get(RUN_DIR_VARIABLE)
        return cls(Path(batch), None) if batch else cls.create(notebook, parameters, root or default_root())

    def log(self, **fields: Any) -> None:
        """Append one line to ``metrics.jsonl``."""
        line = to_json({"time": time.time(), **fields}) + "\n"
        with (self.dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def save_finding(self, finding: Mapping[str, Any]) -> None:
        write_json(self.dir / "finding.json", dict(finding))

    def artifact(self, name: str) -> Path:
        """Path for a file under ``artifacts/``; folders on the way are made."""
        folder = (self.dir / "artifacts").resolve()
        path = (folder / name).resolve()
        if folder not in path.parents:
            raise Refused("artifact name", name, allowed="a relative path inside artifacts/")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def progress(self, done: float, total: float, label: str) -> None:
        """Say how far the run is; written at most twice a second, the last step always."""
        now = time.monotonic()
        if now - self._progress_written >= PROGRESS_INTERVAL_S or done >= total:
            self._progress_written = now
            write_json(self.dir / "progress.json", {"done": done, "total": total, "label": label, "time": time.time()})

    def finish(self, status: Status, error: str = "", exit_code: int | None = None) -> None:
        """Write the end of the run into ``run.json``; nothing where the batch runner answers for it."""
        if self.record is None:
            return
        code = EXIT_CODES[status] if exit_code is None else exit_code
        update = {"status": status, "error": error, "exit_code": code, "ended": datetime.now(UTC)}
        self.record = self.record.model_copy(update=update)
        (self.dir / SPARE).unlink(missing_ok=True)
        self._save()

    def _save(self) -> None:
        assert self.record is not None
        write_json(self.dir / "run.json", self.record.model_dump(mode="json"))


def _not_writable(folder: Path, error: OSError) -> Refused:
    allowed = f"a folder that can be written to ({error.strerror})"
    return Refused("output folder", str(folder), allowed=allowed, fix="free space there, or name another root")


def current_root() -> Path:
    """Where the records lie that this kernel's run belongs to: beside it in a batch run, else the default."""
    batch = os.environ.get(RUN_DIR_VARIABLE)
    return Path(batch).parent if batch else Path(default_root())


def default_root() -> Path:
    return Path(os.environ.get(ROOT_VARIABLE, "runs"))


def new_id(notebook: str) -> str:
    """Sortable by time, unique without a server, safe as a file name whatever the notebook is called."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", notebook).strip("-.")[:60] or "run"
    return f"{datetime.now():%Y%m%d-%H%M%S}-{stem}-{secrets.token_hex(2)}"
