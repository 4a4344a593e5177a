"""Meters for the process that trains: peak memory and energy. They read counters and never wait for the device."""

import threading
from pathlib import Path

import psutil
import torch


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
        self.stop = threading.Event()
        self.start()

    def run(self) -> None:
        process = psutil.Process()
        while not self.stop.wait(0.01):
            self.peak = max(self.peak, process.memory_info().rss)


class EnergyMeter:
    """Joules of one GPU by NVML's counter; ``read`` gives ``None`` where there is no such counter."""

    def __init__(self, device: torch.device) -> None:
        self._handle = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception:  # no library, no driver, or a card without the counter
            self._handle = None

    def read(self) -> float | None:
        """Joules since the driver was loaded."""
        if self._handle is None:
            return None
        import pynvml

        return pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
