"""What the Triton kernels share: locating a program's work, loading and storing blocks of rows, configurations.

Names in the kernels: M counts query rows and N key rows of a tile, D is head_dim padded to a power of two. A *block*
is the layout's; a kernel may cut it into tiles of fewer rows.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from workbench.kernels.layout import BlockLayout
from workbench.kernels.schedule import Schedule

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: query rows and key rows per tile, warps, stages of the software pipeline."""

    rows: int
    cols: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """Tiles of the large kernels."""

    forward: Tile
    dkdv: Tile
    dq: Tile


# By padded head_dim and block size; sweeps: tests/benchmarks/bench_attention.py --tune.
CONFIGS: dict[tuple[int, int], Config] = {
    (32, 64): Config(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    (64, 64): Config(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    (128, 64): Config(Tile(64, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (32, 128): Config(Tile(128, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 64, 4, 3)),
    (64, 128): Config(Tile(128, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    (128, 128): Config(Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
}


def padded_head_dim(head_dim: int) -> int:
    """``head_dim`` as the kernels see it: the next power of two, at least 32."""
    return max(32, triton.next_power_of_2(head_dim))


def config(head_dim: int, block_size: int) -> Config:
    """The configuration for a head_dim and block size; change :data:`CONFIGS` to try another."""
    return CONFIGS[padded_head_dim(head_dim), block_size]


def rows_view(x: torch.Tensor) -> torch.Tensor:
    """``x`` with a contiguous last dimension, which the kernels rely on; other strides may be anything."""
    return x if x.stride(-1) == 1 else x.contiguous()


def constants(layout: BlockLayout, tile: Tile, head_dim: int) -> dict[str, int | bool]:
    """The compile-time arguments that forward and backward share."""
    return {
        "BLOCK": layout.block_size, "M": tile.rows, "N": tile.cols, "D": head_dim, "D_PAD": padded_head_dim(head_dim),
        "PER_HEAD": layout.heads is not None, "CAUSAL": layout.causal, "RAGGED": layout.n % layout.block_size != 0,
    }  # fmt: skip


def scratch(
    plan: Schedule, outer: int, block_size: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the partial results of split rows: values ``(outer, slots, block, head_dim)`` and log-sums."""
    rows = outer * plan.num_slots * block_size
    values = torch.empty(max(rows, 1) * head_dim, dtype=torch.float32, device=device)
    return values, torch.empty(max(rows, 1), dtype=torch.float32, device=device)


def needs_upcast(x: torch.Tensor) -> bool:
    """Products are taken in fp32 for fp32 inputs, and for bf16 in the interpreter, whose bf16 product is wrong."""
    return x.dtype == torch.float32 or (INTERPRETED and x.dtype == torch.bfloat16)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU. In the interpreter few, so that small tests split rows too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@triton.jit
def locate(num_items, num_subs, outer, group):
    """Which item, which part of its block and which (batch, head) this program computes.

    ``group`` (batch, head) pairs run side by side; within them the list goes longest first.
    """
    pid = tl.program_id(0)
    per_group = group * num_items * num_subs
    first = pid // per_group * group
    width = tl.minimum(group, outer - first)
    rest = pid % per_group
    z = first + rest % width
    unit = rest // width
    return unit // num_subs, unit % num_subs, z


@triton.jit
def batch_and_head(z, pattern_head, heads, PER_HEAD: tl.constexpr):
    """(batch, head) of a program: ``z`` counts both for a shared pattern, and batches only for per-head ones."""
    if PER_HEAD:
        return z, pattern_head
    else:
        return z // heads, z % heads


@triton.jit
def base_of(pointer, b, h, stride_b, stride_h):
    """Pointer to (b, h) in 64-bit arithmetic: batch·heads·n·d passes 2³¹."""
    return pointer + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def load_rows(base, start, stride, n, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, RAGGED: tl.constexpr):
    """Rows ``start … start + ROWS − 1``, zeros past ``n`` and past head_dim."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    pointers = base + start.to(tl.int64) * stride + row[:, None] * stride + d[None, :]
    if RAGGED and D != D_PAD:
        return tl.load(pointers, mask=(row[:, None] < n - start) & (d[None, :] < D), other=0.0)
    elif RAGGED:
        return tl.load(pointers, mask=row[:, None] < n - start, other=0.0)
    elif D != D_PAD:
        return tl.load(pointers, mask=d[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, start, stride, n, value, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store rows, leaving out what lies past ``n`` or head_dim."""
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    pointers = base + start.to(tl.int64) * stride + row[:, None] * stride + d[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=(row[:, None] < n - start) & (d[None, :] < D))


@triton.jit
def dot(a, b, accumulator, UPCAST: tl.constexpr):
    """Matrix product accumulated in fp32. The interpreter's bf16 product is wrong, so it multiplies in fp32 there."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    else:
        return tl.dot(a, b, accumulator)


@triton.jit
def visible(query, key, n, CAUSAL: tl.constexpr):
    """The token mask of a partial block."""
    seen = key < n
    if CAUSAL:
        seen = seen & (key <= query)
    return seen
