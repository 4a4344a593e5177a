"""Executing one notebook cell by cell: papermill's client on our own kernel, saved atomically and often."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import nbformat
from jupyter_core.utils import run_sync
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager

from workbench.batch.kernel import METADATA, OwnKernelManager
from workbench.batch.notebook import EXECUTED, LOG
from workbench.batch.outputs import CappedOutputs
from workbench.batch.processes import signal_name
from workbench.records.atomic import write_bytes
from workbench.records.record import Status

SAVE_INTERVAL_S = 1.0
START_TIMEOUT_S = 120
IOPUB_TIMEOUT_S = 60
"""How long the output of a finished cell may lag behind its reply."""


class Manager(NotebookExecutionManager):
    """Papermill's record of which cell is where, saved atomically. A cell is completed only when it has completed."""

    outputs = CappedOutputs()

    def save(self, **kwargs: Any) -> None:
        self.outputs.render()
        write_bytes(Path(self.output_path), nbformat.writes(self.nb).encode())
        self.last_save_time = self.now()

    def autosave_cell(self) -> None:
        """Nothing: the client saves by the clock, also when no message arrives any more."""


class Client(PapermillNotebookClient):
    """Papermill's client with capped output. It stops at the first cell that does not complete and leaves it ``running``."""

    def papermill_execute_cells(self) -> None:
        for index, cell in enumerate(self.nb.cells):
            self.nb_man.outputs = CappedOutputs()
            self.nb_man.cell_start(cell, index)
            self.execute_cell(cell, index)
            self.nb_man.cell_complete(cell, index)

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, **options: Any) -> NotebookNode:
        saving = asyncio.ensure_future(self._save_often())
        try:
            return await super().async_execute_cell(cell, cell_index, **options)
        finally:
            saving.cancel()

    execute_cell = run_sync(async_execute_cell)

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            if self.has_news:
                self.has_news = False
                self.nb_man.save()

    has_news = False

    def output(self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str, cell_index: int) -> Any:
        self.has_news = True
        kept, content = self.nb_man.outputs, msg["content"]
        hooked = self.output_hook_stack[msg["parent_header"].get("msg_id")]
        if (
            hooked
            or self.clear_before_next_output
            or msg["msg_type"] != "stream"
            or not kept.extends_last(outs, content)
        ):
            place = display_id if kept.may_be_updated(outs) else None
            if super().output(outs, msg, place, cell_index) is not None:
                kept.added(outs)
        return None


def execute(folder: Path, sockets: Path, cell_timeout: int | None) -> tuple[Status, str]:
    """Run the notebook to its end, whatever that is; what became of it and the error in one text."""
    path, kernel = folder / EXECUTED, OwnKernelManager(sockets)
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec = dict(METADATA)
    manager = Manager(notebook, output_path=str(path), progress_bar=False)
    signal.signal(signal.SIGTERM, lambda *_: _stop(manager))
    manager.notebook_start()
    timeouts = {"timeout": cell_timeout, "iopub_timeout": IOPUB_TIMEOUT_S, "startup_timeout": START_TIMEOUT_S}
    with (folder / LOG).open("a") as log:
        try:
            Client(manager, km=kernel, **timeouts).execute(cleanup_kc=True, stdout=log, stderr=log)
            manager.notebook_complete()
            return "completed", ""
        except CellExecutionError as error:
            refused = error.ename == "Refused"
            return ("refused" if refused else "failed"), f"{error.ename}: {error.evalue}"
        except CellTimeoutError as error:
            return "timeout", f"a cell ran longer than {cell_timeout} s" if cell_timeout else str(error).splitlines()[0]
        except DeadKernelError:
            return "killed", _how_it_died(kernel.exit_code())
        except RuntimeError:  # of a kernel that was never ready
            if (kernel.exit_code() or 0) >= 0:
                raise
            return "killed", _how_it_died(kernel.exit_code())
        finally:
            manager.save()


def _how_it_died(code: int | None) -> str:
    if code is None or code >= 0:
        return f"the kernel's process ended (exit code {code}) before the notebook did"
    memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"the kernel was killed by {signal_name(-code)}{memory}"


def _stop(manager: Manager) -> None:
    """The runner asks to end: keep the output so far. The runner says why and ends what is left."""
    manager.save()
    os._exit(128 + signal.SIGTERM)
