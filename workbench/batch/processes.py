"""Ending everything that a run started, wherever it hid: kernels and arms lead sessions of their own."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from workbench.records.run import RUN_DIR_VARIABLE

PATIENCE_S = 5.0
PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """While it lasts, a descendant whose parent died becomes this process's child, on Linux; so ``end_all`` finds it."""
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def end_all(folder: Path, spared: Collection[int]) -> None:
    """SIGKILL every process that a run started, until none is left.

    Those are the processes that carry the run's folder in their environment (a tree of parents misses what outlived its
    parent), and the children of this process (the environment misses what dropped it) other than ``spared``, which were there
    before the run.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := [*processes_of(folder), *_descendants(spared)]) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.2)


def children() -> set[int]:
    """The pids of this process's children."""
    return {child.pid for child in psutil.Process().children()}


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


def _descendants(spared: Collection[int]) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        if child.pid not in spared:
            with contextlib.suppress(psutil.Error):
                yield from (process for process in (child, *child.children(recursive=True)) if _lives(process))


def _lives(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE


def _set_subreaper(on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
