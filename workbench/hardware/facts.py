"""What a device is and how fast it can be, asked of a child process so that the caller loads no torch."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import Refused

PROBE_TIMEOUT_S = 180
FORMAT = 3
"""Of a cached answer; raised when the probe measures something else."""
STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc's own maximum of the first; the second is never reached."""
NO_DEVICE = 3
"""Exit code of the probe when the device asked for is not there; its last line says which are."""


class DeviceFacts(BaseModel):
    """One device. FLOP/s, bytes, bytes per second, seconds, watts."""

    model_config = ConfigDict(frozen=True)

    device: str
    """As torch names it: ``cpu``, ``cuda:0``."""
    kind: str
    name: str
    count: int = 1
    """Devices of this kind that the process may use."""
    memory_bytes: int
    peak_flops: dict[str, float]
    """Dense rate by precision (fp32, tf32, bf16, fp16); one that is not there is missing."""
    peak_source: str
    """``datasheet`` or ``measured matmul``."""
    memory_bandwidth: float
    bandwidth_source: str
    """``datasheet`` or ``measured copy``."""
    matmul_flops: dict[str, float] = {}
    """What a large linear layer's three products, forward and backward, reached here, by precision; empty if not measured."""
    attention_flops: dict[str, float] = {}
    """What fused attention over 256 tokens reached here, forward and backward, the recomputed scores counted."""
    copy_bandwidth: float | None = None
    """What a large copy reached here, bytes read and written per second."""
    op_overhead_s: float
    """Host time to launch one small operator, which bounds small models."""
    power_cap_watts: float | None = None
    torch_version: str
    driver: str | None = None
    """The GPU driver's version."""
    threads: int = 1


def detect(device: str = "auto") -> DeviceFacts:
    """Facts about ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``; measured once, then cached.

    Raises:
        Refused: the device is not there.
    """
    cache = _cache_file(device)
    try:
        return DeviceFacts.model_validate_json(cache.read_bytes())
    except (OSError, ValidationError):
        pass  # not measured yet, or the file is damaged: measure
    command = [sys.executable, "-m", "workbench.hardware.probe", device]
    environment = worker_environment()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == NO_DEVICE:
        raise Refused("device", device, allowed=lines[-1], fix="use device=auto")
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"the device probe failed ({done.returncode}): {done.stderr[-2000:]}")
    facts = DeviceFacts.model_validate_json(lines[-1])
    _store(cache, lines[-1])
    return facts


def worker_environment() -> dict[str, str]:
    """Environment of a process that computes on the CPU: one thread per core but one, unless the user said otherwise.

    Every operator ends at a barrier that waits for its slowest thread. With a thread on every core, whatever else runs (the
    notebook, the system) stops one of them for a scheduler's slice at hundreds of barriers a step, and times vary tenfold.
    And glibc keeps the memory that it has: else it gives every large tensor back to the system and fetches it anew, page by page.
    """
    return {"OMP_NUM_THREADS": str(max(cpu_count() - 1, 1)), **STEADY_MALLOC, **os.environ}


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_file(device: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "workbench"
    environment = [worker_environment().get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")]
    key = json.dumps([device, platform.node(), version("torch"), cpu_count(), environment, FORMAT])
    return folder / f"device-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _store(cache: Path, line: str) -> None:
    """A cache that cannot be written costs a few seconds next time, nothing else."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
            file.write(line)
        Path(file.name).replace(cache)
    except OSError:
        return
