"""Ending everything that a run started, wherever it hid: kernels and arms lead sessions of their own."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from workbench.records.run import RUN_DIR_VARIABLE

PATIENCE_S = 5.0


def end_all(folder: Path) -> None:
    """SIGKILL every other process that carries this run's folder in its environment, until none is left.

    A process group or a tree of parents misses what has begun a session of its own or outlived its parent.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := list(processes_of(folder))) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.2)


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """Living processes that a run started, this one excepted, found by the variable they inherit."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.pid != os.getpid() and process.environ().get(RUN_DIR_VARIABLE) == str(folder)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
