"""Which backend ``auto`` takes, and why: by what was measured on this kind of device.

``measured.toml`` beside this file holds the medians that tests/benchmarks/bench_attention.py wrote, by device name. In
it ``triton`` is our portable kernels and ``triton-hopper`` those that take over on Hopper where they can.
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


def choose(q: torch.Tensor, layout: BlockLayout, *, without_fa4: bool = False) -> Choice:
    """The backend for tensors like ``q`` ``(batch, heads, n, head_dim)`` and ``layout``.

    Args:
        without_fa4: leave FlashAttention-4 out, as for a deterministic backward and for the log-sum-exp: it refuses
            the one, and the gradient through the other was not checked.
    """
    return _choose(str(q.device), q.dtype, q.shape[-1], layout.handle, without_fa4)


@torch.compiler.assume_constant_result
def backend_name(device: str, dtype: torch.dtype, head_dim: int, handle: int, without_fa4: bool) -> str:
    """The name alone, from arguments that torch.compile takes for constants."""
    return _choose(device, dtype, head_dim, handle, without_fa4).backend


@cache
def _choose(device: str, dtype: torch.dtype, head_dim: int, handle: int, without_fa4: bool) -> Choice:
    layout = by_handle(handle)
    kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else device.split(":")[0]
    choice = _decide(kind, dtype, head_dim, layout, without_fa4)
    log.info("attention backend for %r on %s: %s, because %s", layout, kind, choice.backend, choice.reason)
    return choice


def _decide(device: str, dtype: torch.dtype, head_dim: int, layout: BlockLayout, without_fa4: bool = False) -> Choice:
    if layout.is_full:
        return Choice("dense", "every block is live")
    if device in ("cpu", "mps"):
        return Choice("reference", f"the other backends compute no gradients on {device}")
    half = dtype in (torch.float16, torch.bfloat16)
    able = [
        name
        for name in ("triton", "flex", "fa4")
        if _can(name, head_dim, layout) and (half or name == "flex") and not (without_fa4 and name == "fa4")
    ]
    if not able:
        return Choice("reference", f"no other backend takes {layout!r} with head_dim {head_dim} in {dtype}")
    if able == ["flex"]:
        return Choice("flex", f"it alone takes {layout!r} with head_dim {head_dim} in {dtype}")
    cases = [case for case in _measured() if case["device"] == device]
    if not cases:
        return Choice(able[0], f"nothing was measured on {device}; it is the first of {', '.join(able)}")
    case = min(cases, key=lambda c: _distance(c, head_dim, layout))
    measured = {name: ms for name, ms in case["milliseconds"].items() if name != "triton-hopper"}
    if lowered_compute(layout, head_dim) and "triton-hopper" in case["milliseconds"]:
        measured["triton"] = case["milliseconds"]["triton-hopper"]
    times = {name: measured[name] for name in able if name in measured}
    best = min(times, key=lambda name: times[name])
    shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(times.items(), key=lambda item: item[1]))
    nearest_case = f"{case['pattern']} at n={case['n']}, head_dim={case['head_dim']}"
    return Choice(best, f"on {device} the nearest measured case, {nearest_case}, took {shown} forward and backward")


def lowered_compute(layout: BlockLayout, head_dim: int) -> bool:
    """Whether the kernels lowered for Hopper take this, given a Hopper GPU, fp16 or bf16."""
    return layout.block_size == 128 and head_dim in (64, 128) and not layout.rows.partial.any()


def _can(name: str, head_dim: int, layout: BlockLayout) -> bool:
    if name == "triton":
        fits = layout.block_size in (64, 128) and 16 <= head_dim <= 128 and head_dim % 8 == 0
        return fits and find_spec("triton") is not None
    if name == "fa4":
        return fa4.supports(layout, head_dim) and fa4.is_installed()
    return layout.block_size % 128 == 0  # FlexAttention as compiled for a GPU


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
