"""Running one notebook to an honest end.

This process (the runner) owns ``run.json``. It starts ``workbench.batch.execute``, which drives the kernel; whatever
happens to either, the runner says what became of the run and leaves no process behind.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from workbench.batch.executed import settle
from workbench.batch.notebook import EXECUTED, LOG, write_notebook
from workbench.batch.preflight import Prepared, check_root
from workbench.batch.processes import end_all, signal_name
from workbench.experiment.finding import read_finding
from workbench.records.provenance import collect
from workbench.records.record import EXIT_CODES, RunRecord, Status
from workbench.records.run import RUN_DIR_VARIABLE, Run

POLL_S = 0.1
HEARTBEAT_S = 30.0
GRACE_S = 5.0
"""What the executing process has to save the last output once it is asked to end."""
MAX_SOCKET_FOLDER = 80
"""A Unix socket's path may hold 104 bytes on macOS, 108 on Linux."""


def run_notebook(
    prepared: Prepared,
    root: Path = Path("runs"),
    *,
    run_id: str | None = None,
    timeout: float | None = None,
    cell_timeout: int | None = None,
    ladder: str = "",
    profile: str = "",
    on_start: Callable[[Run], None] = lambda run: None,
    on_tick: Callable[[Run], None] = lambda run: None,
) -> RunRecord:
    """Run a prepared notebook in processes of its own and return its record, whose status is what really happened.

    Args:
        root: folder of the run records; ``root/<id>/`` is made and must not exist.
        timeout: seconds that the whole run may take.
        cell_timeout: whole seconds that one cell may take.
        on_start, on_tick: called in this process once, and about ten times a second.

    SIGINT and SIGTERM end the run as ``interrupted`` when this is called in the main thread.

    Raises:
        Refused: the folder cannot be written to or exists.
    """
    check_root(Path(root))
    with _signals_noted() as signals:
        provenance = {**collect(), **prepared.provenance}
        run = Run.create(
            prepared.stem,
            prepared.recorded,
            Path(root).absolute(),
            run_id=run_id,
            ladder=ladder,
            profile=profile,
            provenance=provenance,
        )
        try:
            on_start(run)
            write_notebook(run.dir / EXECUTED, prepared.notebook)
            status, error = _execute(run, signals, timeout, cell_timeout, on_tick)
        except BaseException as problem:
            run.finish("failed", f"the runner failed: {type(problem).__name__}: {problem}")
            raise
        exit_code = EXIT_CODES[status]
        if status == "completed" and (found := read_finding(run.dir)):
            failed, error = found.trouble
            status, exit_code = "failed" if failed else "completed", 1 if error else 0
        # On a full disk the record, which may still fit, says more than the notebook.
        with contextlib.suppress(OSError):
            settle(run.dir / EXECUTED, status, error)
        run.finish(status, error, exit_code)
        assert run.record is not None
        return run.record


def _execute(
    run: Run, signals: list[int], timeout: float | None, cell_timeout: int | None, on_tick: Callable[[Run], None]
) -> tuple[Status, str]:
    sockets = _socket_folder()
    command = [sys.executable, "-m", "workbench.batch.execute", str(run.dir), str(sockets), str(os.getpid())]
    if cell_timeout:
        command.append(str(cell_timeout))
    environment = os.environ | {RUN_DIR_VARIABLE: str(run.dir), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    try:
        with (run.dir / LOG).open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            reason = _wait(child, run, signals, timeout, on_tick)
        finally:
            if child.poll() is None:
                _end(child)
            end_all(run.dir)
        said = child.stdout.read() if child.stdout else b""
        return reason or _outcome(said, child.returncode, run.dir / LOG)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _wait(
    child: subprocess.Popen, run: Run, signals: list[int], timeout: float | None, on_tick: Callable[[Run], None]
) -> tuple[Status, str] | None:
    """Wait for the end of the child, of the time, or of the user's patience; why it must end, if it has not."""
    started = last_beat = time.monotonic()
    while child.poll() is None:
        now = time.monotonic()
        if signals:
            return "interrupted", f"stopped by {signal_name(signals[0])}"
        if timeout is not None and now - started > timeout:
            return "timeout", f"the run took longer than {timeout:g} s"
        if now - last_beat > HEARTBEAT_S:
            last_beat = now
            os.utime(run.dir / "run.json")  # readers on other hosts see by it that this process lives
        on_tick(run)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
    # A signal to the whole process group may have reached the child's end before the loop saw it.
    return ("interrupted", f"stopped by {signal_name(signals[0])}") if signals and child.returncode else None


def _end(child: subprocess.Popen) -> None:
    """Let the child save what was printed last, then make sure."""
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _outcome(said: bytes, code: int, log: Path) -> tuple[Status, str]:
    """What the child said of the notebook, or what its own death says."""
    lines = said.decode(errors="replace").strip().splitlines()
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        outcome = json.loads(lines[-1])
        return outcome["status"], outcome["error"]
    tail = log.read_bytes()[-2000:].decode(errors="replace").strip()
    if code < 0:
        return "killed", f"the process that executed the notebook was killed by {signal_name(-code)}"
    return "failed", f"the process that executed the notebook ended with code {code}: {tail}"


def _socket_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="workbench-")
    if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="workbench-", dir="/tmp")
    return Path(folder)


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """The signals to end that arrive meanwhile; nobody dies of them, so that the record is always written."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
