"""What ``run.json`` says of one run."""

import platform
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

Status = Literal["running", "completed", "failed", "killed", "timeout", "interrupted", "refused", "stale", "broken"]
"""The last two are a reader's word and never written: ``stale`` is a run of another host that has gone silent."""
EXIT_CODES: dict[Status, int] = {
    "completed": 0,
    "failed": 1,
    "refused": 2,
    "timeout": 124,
    "interrupted": 130,
    "killed": 137,
}


class Writer(BaseModel):
    """The process that answers for a run's status; by its creation time a reused pid is told from the real one."""

    pid: int
    created: float
    host: str

    @classmethod
    def this_process(cls) -> "Writer":
        process = psutil.Process()
        return cls(pid=process.pid, created=process.create_time(), host=hostname())

    def is_elsewhere(self) -> bool:
        return self.host != hostname()

    def is_gone(self) -> bool:
        """Whether the process has surely ended. Of another host's processes nothing can be said from here."""
        if self.is_elsewhere():
            return False
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) > 1 or process.status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ValueError, OverflowError):  # no such process, or no number that one could have
            return True


class RunRecord(BaseModel):
    """One run. ``status`` is what happened: a reader turns ``running`` without a living writer into ``killed``."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    schema_version: int = 1
    id: str
    notebook: str
    status: Status
    parameters: dict[str, Any] = {}
    started: AwareDatetime | None = None
    ended: AwareDatetime | None = None
    exit_code: int | None = None
    error: str = ""
    writer: Writer | None = None
    provenance: dict[str, Any] = {}
    ladder: str = ""
    """Id of the ladder that this run is a stage of."""
    profile: str = ""
    dir: Path = Field(default=Path(), exclude=True)


def hostname() -> str:
    return platform.node()
