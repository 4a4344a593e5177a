"""Meters for the process that trains: peak memory and energy. They read counters and never wait for the device."""

import threading
import time
from pathlib import Path

import psutil
import torch

from workbench.hardware.nvml import Nvml

SAMPLE_S = 0.01
"""Between two looks at the resident set: rare enough not to slow a step."""


class PeakMemory:
    """Peak bytes since ``reset``.

    On a GPU the allocator's own peak. On a CPU the resident set's growth over its size at the start: Linux's high-water mark
    where it can be reset, else samples every 10 ms, which may miss a short spike.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = 0 if device.type == "cuda" else psutil.Process().memory_info().rss
        self._sampler: _Sampler | None = None
        if device.type == "cuda":
            torch.cuda.init()  # the allocator has no statistics to reset before that
        self.reset()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._sampler = self._sampler or _Sampler()
            self._sampler.peak = 0

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max((self._sampler.peak if self._sampler else _high_water()) - self.base, 0)


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            time.sleep(SAMPLE_S)


class EnergyMeter:
    """Joules of one GPU by the driver's counter; ``read`` gives ``None`` where there is no such counter."""

    def __init__(self, device: torch.device) -> None:
        self._nvml = Nvml(device)

    def read(self) -> float | None:
        """Joules since the driver was loaded."""
        return self._nvml.energy_joules()
