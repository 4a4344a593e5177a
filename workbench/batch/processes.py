"""Ending everything that a run started, wherever it hid: kernels and arms lead sessions of their own."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from workbench.records.run import RUN_DIR_VARIABLE

PATIENCE_S = 5.0
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent died becomes this process's child, on Linux; so ``end_all`` finds it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all(folder: Path, *, descendants: bool = False) -> None:
    """SIGKILL every other process that a run started, until none is left.

    Those are the processes that carry the run's folder in their environment, for a process group or a tree of parents misses
    what has begun a session of its own or outlived its parent; and with ``descendants`` all below this process, for the
    environment misses what dropped it.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := [*processes_of(folder), *(_descendants() if descendants else ())]) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.2)


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """Living processes that a run started, this one excepted, found by the variable they inherit."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.pid != os.getpid() and process.environ().get(RUN_DIR_VARIABLE) == str(folder)
            if ours and _lives(process):
                yield process


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _descendants() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if _lives(process):
                yield process


def _lives(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE
