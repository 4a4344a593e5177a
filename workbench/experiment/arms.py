"""The parent's side of an arm: start its process, ask it for blocks, notice how it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench.errors import Refused
from workbench.experiment.ablation import Arm
from workbench.experiment.finding import ArmStatus
from workbench.hardware.facts import DeviceFacts, worker_environment
from workbench.trainer.config import TrainConfig

OnStep = Callable[[int, dict[str, float]], None]
POLL_S = 0.05
"""How often a waiting parent looks up, so that an interrupt is noticed at once."""


class ArmEnded(Exception):
    """The arm cannot go on. That is its result, not an error of the experiment. The last line of ``error`` says why."""

    def __init__(self, status: ArmStatus, error: str) -> None:
        super().__init__(f"{status}: {error}")
        self.status, self.error = status, error


class ArmProcess:
    """A fresh process that runs one arm; never forked, in a session of its own, its output in a log file."""

    def __init__(self, arm: Arm, config: TrainConfig, facts: DeviceFacts, log: Path, timeout_s: float) -> None:
        self.arm, self.log, self.timeout_s = arm, log, timeout_s
        self._request = {
            "task": arm.task,
            "task_args": arm.task_args,
            "config": config.model_dump(mode="json"),
            "facts": facts.model_dump(mode="json"),
        }

    def start(self, warmup_steps: int) -> None:
        """Start building and warming up; ``wait_ready`` waits for it. Arms start side by side."""
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        child_life, self._life = (
            os.pipe()
        )  # nothing is written to it: it closes when this process ends, however it ends
        fds = (child_read, child_write, child_life)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workbench.experiment.arm_process", *map(str, fds)],
                pass_fds=fds,
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for fd in fds:
            os.close(fd)
        self._requests = Connection(parent_write, readable=False)
        self._answers = Connection(parent_read, writable=False)
        self._send(ask="build", warmup_steps=warmup_steps, **self._request)

    def wait_ready(self) -> None:
        self._receive("ready")

    def block(self, steps: int) -> dict[str, Any]:
        """Measure one block; the fields of ``tasks.Block``."""
        self._send(ask="block", steps=steps)
        return self._receive("block")

    def guard_run(self, seed: int, steps: int, on_step: OnStep) -> dict[str, Any]:
        """Train from ``seed``; the fields of ``tasks.GuardRun``. ``on_step`` gets each step's number and values."""
        self._send(ask="guard", seed=seed, steps=steps)
        return self._receive("guard", on_step)

    def stop(self) -> None:
        """End the process and all that it started. It holds nothing that a kill could lose."""
        if not hasattr(self, "_process"):
            return
        self._kill()
        self._requests.close()
        self._answers.close()
        os.close(self._life)
        del self._process

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, **request: Any) -> None:
        try:
            self._requests.send_bytes(json.dumps(request).encode())
        except OSError:
            raise self._ended() from None

    def _receive(self, kind: str, on_step: OnStep | None = None) -> dict[str, Any]:
        heard = time.monotonic()
        while True:
            try:
                if not self._answers.poll(POLL_S):
                    if time.monotonic() - heard > self.timeout_s:
                        self._kill()
                        raise ArmEnded("timeout", f"{self._log_tail()}\nno sign of life for {self.timeout_s:g} s")
                    continue
                message = json.loads(self._answers.recv_bytes())
            except (EOFError, OSError):
                raise self._ended() from None
            heard = time.monotonic()
            said = message.pop("kind")
            if said == "step":
                if on_step:
                    on_step(message["step"], message["values"])
            elif said == "refused":
                raise Refused(f"arm {self.arm.name!r}: {message['error']}")
            elif said == "failed":
                raise ArmEnded(message["status"], message["error"])
            else:
                assert said == kind, f"asked for {kind}, got {said}"
                return dict(message)

    def _ended(self) -> ArmEnded:
        """The process went away by itself: by a signal, or by leaving without a word."""
        code = self._process.wait()
        if code < 0:
            return ArmEnded("killed", f"{self._log_tail()}\nkilled by {signal.Signals(-code).name}")
        return ArmEnded("crashed", f"{self._log_tail()}\nthe process left with exit code {code}")

    def _log_tail(self, lines: int = 5) -> str:
        try:
            tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        except OSError:
            tail = []
        return "last output: " + ("\n".join(tail) if tail else "none")
