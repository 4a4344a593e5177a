"""Where a step's time goes, read without waiting for the device inside the step."""

import time
from itertools import pairwise
from typing import NamedTuple

import torch

PHASES = ("data_wait", "forward", "backward", "optimizer")


class StepTimes(NamedTuple):
    """Seconds of one optimizer step. The phases are summed over micro-batches; the rest of ``total`` is the loop itself."""

    total: float
    data_wait: float
    forward: float
    backward: float
    optimizer: float


class StepClock:
    """Marks the boundaries of phases: host clock on a CPU, events on a GPU, resolved once per block of steps.

    On a GPU a phase's time is what the device spent between the marks; data wait is the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        """Forget what was marked, as after a step that did not reach its end."""
        self._steps: list[list[tuple[str, float | torch.cuda.Event]]] = []
        self._waits: list[float] = []
        self._wait_began = 0.0

    def begin(self) -> None:
        self._steps.append([("", self._now())])
        self._waits.append(0.0)

    def mark(self, phase: str) -> None:
        """The time since the previous mark belongs to ``phase``."""
        self._steps[-1].append((phase, self._now()))

    def wait_begins(self) -> None:
        self._wait_began = time.perf_counter()

    def wait_ends(self) -> None:
        self._waits[-1] += time.perf_counter() - self._wait_began
        self.mark("data_wait")

    def resolve(self) -> list[StepTimes]:
        """Times of all steps since the last call; waits for the device once."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        resolved = []
        for marks, wait in zip(self._steps, self._waits, strict=True):
            phases = dict.fromkeys(PHASES, 0.0)
            for (_, before), (phase, after) in pairwise(marks):
                phases[phase] += _between(before, after)
            if self.cuda:
                phases["data_wait"] = wait
            resolved.append(StepTimes(total=_between(marks[0][1], marks[-1][1]), **phases))
        self.reset()
        return resolved

    def _now(self) -> "float | torch.cuda.Event":
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _between(before: "float | torch.cuda.Event", after: "float | torch.cuda.Event") -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    assert not isinstance(after, float)
    return before.elapsed_time(after) / 1000
