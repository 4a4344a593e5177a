"""Which backend ``auto`` takes, and why: by what was measured on this kind of device.

``measured.toml`` beside this file holds the medians that tests/benchmarks/bench_attention.py wrote, by device name.
"""

import logging
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch

from workbench.kernels import fa4
from workbench.kernels.layout import BlockLayout, by_handle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it, in words."""

    backend: str
    reason: str


def choose(q: torch.Tensor, layout: BlockLayout) -> Choice:
    """The backend for tensors like ``q`` ``(batch, heads, n, head_dim)`` and ``layout``."""
    return _choose(str(q.device), q.dtype, q.shape[-1], layout.handle)


@torch.compiler.assume_constant_result
def backend_name(device: str, dtype: torch.dtype, head_dim: int, handle: int) -> str:
    """The name alone, from arguments that torch.compile takes for constants."""
    return _choose(device, dtype, head_dim, handle).backend


@cache
def _choose(device: str, dtype: torch.dtype, head_dim: int, handle: int) -> Choice:
    layout = by_handle(handle)
    kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else device.split(":")[0]
    choice = _decide(kind, dtype, head_dim, layout)
    log.info("attention backend for %r on %s: %s, because %s", layout, kind, choice.backend, choice.reason)
    return choice


def _decide(device: str, dtype: torch.dtype, head_dim: int, layout: BlockLayout) -> Choice:
    if layout.is_full:
        return Choice("dense", "every block is live")
    if device in ("cpu", "mps"):
        return Choice("reference", f"the other backends compute no gradients on {device}")
    if dtype not in (torch.float16, torch.bfloat16):
        return Choice("flex", f"the Triton kernels take fp16 and bf16, not {dtype}")
    able = [name for name in ("triton", "flex", "fa4") if _can(name, head_dim, layout)]
    cases = [case for case in _measured() if case["device"] == device and set(able) & set(case["milliseconds"])]
    if not cases:
        return Choice(able[0], f"nothing was measured on {device}; it is the first of {', '.join(able)}")
    case = min(cases, key=lambda c: _distance(c, head_dim, layout))
    times = {name: ms for name, ms in case["milliseconds"].items() if name in able}
    best = min(times, key=lambda name: times[name])
    shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(times.items(), key=lambda item: item[1]))
    nearest_case = f"{case['pattern']} at n={case['n']}, head_dim={case['head_dim']}"
    return Choice(best, f"on {device} the nearest measured case, {nearest_case}, took {shown} forward and backward")


def _can(name: str, head_dim: int, layout: BlockLayout) -> bool:
    if name == "triton":
        fits = layout.block_size in (64, 128) and 16 <= head_dim <= 128 and head_dim % 8 == 0
        return fits and find_spec("triton") is not None
    if name == "fa4":
        return fa4.supports(layout, head_dim) and fa4.is_installed()
    return True


def _distance(case: dict[str, Any], head_dim: int, layout: BlockLayout) -> float:
    """How unlike a measured case is: octaves of length, head_dim and density, head_dim first."""
    return (
        4 * abs(math.log2(case["head_dim"] / head_dim))
        + abs(math.log2(case["n"] / layout.n))
        + abs(math.log2(case["density"] / max(layout.density, 1e-9)))
    )


@cache
def _measured() -> list[dict[str, Any]]:
    text = files("workbench.kernels").joinpath("measured.toml").read_text()
    cases: list[dict[str, Any]] = tomllib.loads(text).get("case", [])
    return cases
