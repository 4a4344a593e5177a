"""A task with a known speed and a planted fault, imported by arms' processes in the tests. Loads no torch."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from workbench.hardware.facts import DeviceFacts
from workbench.trainer.config import TrainConfig


class Diverged(RuntimeError):
    """Named like the trainer's."""


class PlantedTask:
    """Reports ``model_args['step_time']`` seconds with 8 % noise per block and ends as ``model_args['fault']`` says."""

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None:
        self.args: dict[str, Any] = config.model_args
        self.blocks = 0
        self.random = random.Random(f"{self.args}")

    def warm_up(self, steps: int) -> None:
        self._fail("warm-up")

    def block(self, steps: int) -> Any:
        self.blocks += 1
        if self.blocks == 3:
            self._fail("block")
        step_time = self.args.get("step_time", 0.01) * self.random.lognormvariate(0, 0.08)
        time.sleep(self.args.get("sleep", 0.0))
        return _Fields(
            step_time=step_time,
            samples_per_step=8,
            anatomy={"forward": step_time},
            peak_memory_bytes=None,
            energy_joules=None,
            extra={},
        )

    def guard_run(self, seed: int, steps: int, on_step: Callable[..., None]) -> Any:
        on_step(0, loss=2.0)
        self._fail("guard")
        on_step(steps - 1)
        loss = 1.0 + 0.001 * seed + self.args.get("worse", 0.0)
        return _Fields(loss=loss, accuracy=0.9, trajectories={"loss": [2.0, loss]})

    def _fail(self, place: str) -> None:
        if self.args.get("at", "block") != place:
            return
        fault = self.args.get("fault")
        if fault == "crash":
            raise ZeroDivisionError("planted")
        if fault == "oom":
            raise MemoryError
        if fault == "diverge":
            raise Diverged("loss is nan at step 3")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            os._exit(0)
        if fault == "hang":
            time.sleep(3600)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "hold":
            ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock, as a native extension may
        if fault == "spawn":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            time.sleep(3600)


class _Fields(dict):  # type: ignore[type-arg]
    def _asdict(self) -> dict[str, Any]:
        return dict(self)
