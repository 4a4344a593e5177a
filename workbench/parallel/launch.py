"""Runs a function on several ranks of this machine, from a notebook or a script; under ``torchrun`` it joins the world there.

PyTorch's elastic multiprocessing starts the ranks (always by spawn: a forked copy of a process with threads or a GPU context may
hang) and shows their output as it comes. On top of it: whichever rank dies, raises or hangs, all of them end, and the one that
began it is named.
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, SignalException, Std

from workbench.errors import Refused

Device = Literal["cpu", "cuda"]

POLL_S = 0.05
GRACE_S = 3
"""From SIGTERM to SIGKILL, for a rank that handles the first but is stuck in a collective."""
TAIL_LINES = 20

# RankFailed says what this logger would, once and with the right rank
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


class RankFailed(RuntimeError):
    """A rank raised, died or hung, and all ranks were ended.

    ``traceback`` is the rank's own, or for one that hung its stack; empty for one that was killed. ``log_tail`` is the end of its
    output.
    """

    def __init__(self, rank: int, what: str, traceback: str = "", log_tail: str = "") -> None:
        self.rank, self.what, self.traceback, self.log_tail = rank, what, traceback, log_tail
        output = f"The end of its output:\n{log_tail}" if log_tail else ""
        super().__init__("\n".join(filter(None, [f"rank {rank} {what}", traceback.rstrip(), output])))


def launch(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 600.0,
    log_dir: Path | str | None = None,
    device_type: Device | None = None,
) -> list[Any]:
    """What ``fn(*args)`` returned on each rank, in rank order. The process group stands when ``fn`` is called.

    Args:
        fn: importable by name, like everything in ``args``.
        timeout: seconds that ranks wait for one another: to meet, in a collective, or at the end. Not of the whole run, so
            ranks that hang without waiting for one another are not noticed.
        log_dir: where the output of the ranks is kept; else it is only shown, after ``[rank]``.
        device_type: ``cpu`` (gloo, one thread each) or ``cuda`` (NCCL, a GPU each); by default GPUs where there are any.

    Raises:
        Refused: a function or an argument that cannot be sent to a rank, a world that this machine cannot have.
        RankFailed: a rank raised, died or hung.
    """
    device = _device(device_type, world)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join(fn, args, world, device, timeout)
    call = _call(fn, args)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        ranks = _Ranks(call, world, device, timeout, Path(scratch), log_dir)
        try:
            ranks.start()
            return ranks.results(timeout)
        finally:
            ranks.end()


def _device(asked: Device | None, world: int) -> Device:
    if world < 1:
        raise Refused("world", world, allowed="1 rank or more", fix="ask for 1")
    if asked == "cpu" or not (asked or torch.cuda.is_available()):
        return "cpu"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local > torch.cuda.device_count():
        allowed = f"at most {torch.cuda.device_count()}, the GPUs of this machine"
        raise Refused("ranks with a GPU each", local, allowed=allowed, fix="pass device_type='cpu'")
    return "cuda"


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call as bytes; refused where a fresh process could not read them."""
    name = getattr(fn, "__qualname__", repr(fn))
    fix = "move it to a module, and import it from there"
    if "<lambda>" in name or "<locals>" in name:
        raise Refused("function for ranks", name, allowed="one that a fresh process finds by its name", fix=fix)
    if getattr(fn, "__module__", "") == "__main__" and not _is_of_a_script(fn):
        allowed = "a function of a module: each rank is a fresh process, and a notebook's cells are not there"
        raise Refused("function for ranks", name, allowed=allowed, fix=fix)
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Refused(f"call of {name} on other ranks: {error}", allowed="what pickle can send", fix=fix) from None


def _is_of_a_script(fn: Callable[..., Any]) -> bool:
    """Spawn runs a script again in each rank, so its functions are found; a cell's or a prompt's are in no file."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    code = getattr(fn, "__code__", None)
    return bool(script and code and Path(code.co_filename).resolve() == Path(script).resolve())


# ---- in the process that launches


class _Ranks:
    """The processes of one launch."""

    def __init__(
        self, call: bytes, world: int, device: Device, timeout: float, scratch: Path, log_dir: Path | str | None
    ) -> None:
        # the store is served from here, on a port that the system chose: no port is free between probe and use
        self._store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        self._scratch, self._world = scratch, world
        self._processes: dict[int, BaseProcess] = {}
        self._context = MultiprocessContext(
            name="rank",
            entrypoint=_on_rank,
            args={rank: (call, device, timeout, str(scratch)) for rank in range(world)},
            envs={rank: self._environment(rank, device) for rank in range(world)},
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(str(log_dir or scratch / "logs"), tee=Std.ALL),
            log_line_prefixes={rank: f"[{rank}] " for rank in range(world)},
        )

    def _environment(self, rank: int, device: Device) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        return threads | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def start(self) -> None:
        before = set(multiprocessing.active_children())
        try:
            with _own_signal_handlers():
                self._context.start()
        except BaseException:  # Ctrl-C halfway: the context does not know those that it started
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            raise
        of_pid = {process.pid: process for process in multiprocessing.active_children()}
        self._processes = {rank: of_pid[pid] for rank, pid in self._context.pids().items() if pid in of_pid}

    def results(self, timeout: float) -> list[Any]:
        first_returned = None
        while True:
            # Looked at before the context does: it ends the others at once, and takes exit code 0 for no end at all. A rank
            # that raised may be stuck in leaving the process group; a rank that died did so before the others complained.
            raised = any(self._scratch.glob("failed-*"))
            if (ended := self._ended()) or raised:
                raise self._failure(ended)
            outcome = self._context.wait(0)
            if outcome is not None and outcome.is_failed():
                by_us = (0, -signal.SIGTERM)
                first = {rank: failure.exitcode for rank, failure in outcome.failures.items()}
                raise self._failure({r: code for r, code in self._ended().items() if code not in by_us} or first)
            if outcome is not None:
                return [pickle.loads(outcome.return_values[rank]) for rank in range(self._world)]
            if first_returned is None and any(self._scratch.glob("returned-*")):
                first_returned = time.monotonic()
            if first_returned is not None and time.monotonic() - first_returned > timeout:
                raise self._failure({})
            time.sleep(POLL_S)

    def _ended(self) -> dict[int, int]:
        return {rank: p.exitcode for rank, p in self._processes.items() if p.exitcode is not None}

    def _failure(self, ended: dict[int, int]) -> RankFailed:
        """The rank that began it: one that hung, one that died without a word, or the first to raise."""
        said = self._reports()
        silent = [rank for rank in ended if not self._told(rank, "failed")]
        aborted = bool(silent) and ended[silent[0]] == -signal.SIGABRT  # so NCCL ends a rank that waited too long
        if aborted or (not silent and (not said or said[0].waited)):
            hung = self._stacks()
            for rank, stack in hung.items():
                return self._failed(rank, "hung: other ranks waited for it until the timeout", stack)
        if silent:
            return self._failed(silent[0], _death(ended[silent[0]]))
        return self._failed(said[0].rank, "raised", said[0].traceback)

    def _reports(self) -> list["_Report"]:
        files = [self._scratch / f"failed-{rank}" for rank in range(self._world) if self._told(rank, "failed")]
        return sorted((_Report(**json.loads(file.read_text())) for file in files), key=lambda report: report.at_ns)

    def _told(self, rank: int, what: str) -> bool:
        return (self._scratch / f"{what}-{rank}").exists()

    def _stacks(self) -> dict[int, str]:
        """Where the ranks are that neither returned nor failed, though those that waited had a moment to fail too."""
        time.sleep(GRACE_S / 3)
        still = [
            (rank, process)
            for rank, process in self._processes.items()
            if process.is_alive() and not self._told(rank, "failed") and not self._told(rank, "returned")
        ]
        for rank, process in still:
            if self._told(rank, "stack"):  # else it does not listen yet
                os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(GRACE_S / 10)
        files = {rank: self._scratch / f"stack-{rank}" for rank, _ in still}
        return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}

    def _failed(self, rank: int, what: str, trace: str = "") -> RankFailed:
        self.end()  # and with it the output is whole
        files = [Path(self._context.stdouts[rank]), Path(self._context.stderrs[rank])]
        lines = [line for f in files if f.exists() for line in f.read_text(errors="replace").splitlines()]
        return RankFailed(rank, what, trace, "\n".join(lines[-TAIL_LINES:]))

    def end(self) -> None:
        """End every rank that still is, and show the rest of the output."""
        self._context.close(signal.SIGTERM, timeout=GRACE_S)


class _Report(NamedTuple):
    """What a rank says of its own exception, before it leaves the process group and others notice."""

    rank: int
    at_ns: int
    waited: bool
    """It waited for others until the timeout."""
    traceback: str


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} and without a result"


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Take back the handlers that the context puts in place of this process's: a notebook's Ctrl-C stays what it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)


# ---- in each rank


def _on_rank(call: bytes, device: Device, timeout: float, scratch: str) -> bytes:
    """The result as bytes, so that one that cannot be sent is an exception here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the process that launched ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rank = int(os.environ["RANK"])
    with (Path(scratch) / f"stack-{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            _enter(device, timeout)
            fn, args = pickle.loads(call)
            result = pickle.dumps(fn(*args))
        except BaseException as error:
            _report(error, rank, Path(scratch))
            raise RuntimeError(f"rank {rank} failed") from error  # SystemExit would pass for a normal end
        finally:
            _leave()
            faulthandler.unregister(signal.SIGUSR1)
    (Path(scratch) / f"returned-{rank}").touch()
    return result


def _end_with_parent() -> None:
    """No rank outlives the process that launched it, not even when that is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _report(error: BaseException, rank: int, scratch: Path) -> None:
    """Written before the process group is left, hence before any rank can fail because of this one; whole or not at all."""
    waited = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("timed out", "timeout"))
    trace = "".join(traceback.format_exception(error))
    partial = scratch / f"partial-{rank}"
    partial.write_text(json.dumps(_Report(rank, time.time_ns(), waited, trace)._asdict()))
    partial.rename(scratch / f"failed-{rank}")


def _enter(device: Device, timeout: float) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(fn: Callable[..., Any], args: tuple[Any, ...], world: int, device: Device, timeout: float) -> list[Any]:
    """Run as the rank that this process already is, under ``torchrun``, ``srun`` or another launch."""
    if int(os.environ["WORLD_SIZE"]) != world:
        raise Refused("world", world, allowed=f"{os.environ['WORLD_SIZE']}, the world that this process belongs to")
    member = dist.is_initialized()
    if not member:
        _enter(device, timeout)
    try:
        results: list[Any] = [None] * world
        dist.all_gather_object(results, fn(*args))
        return results
    finally:
        if not member:
            _leave()
