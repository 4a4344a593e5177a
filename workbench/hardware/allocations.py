"""Bytes that a computation allocates: the allocator's own count on a GPU, the profiler's record of it on a CPU."""

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def allocations(run: Callable[[], T], device: torch.device) -> tuple[T, int, int]:
    """The result of ``run()``, the most bytes it held at once beyond what was there, and those still held with the result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = [0, *accumulate(size for _, size in changes)]
    return result, max(held), held[-1]
