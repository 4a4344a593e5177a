"""What the kernels lowered for Hopper share: where their work is, rings of tiles, and what they can compute.

They are written in Gluon, Triton's lower level, and all have the same build: one warp produces, copying tiles into
rings in shared memory with the tensor memory accelerator; two warpgroups of four warps consume, 64 rows each; one
thread block per multiprocessor walks the work list.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from copy import copy
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workbench.kernels.choice import lowered_compute
from workbench.kernels.layout import BlockLayout

BLOCK = gl.constexpr(128)
ROWS = gl.constexpr(64)  # rows of a consumer
CONSUMERS = gl.constexpr(2)
# Registers a thread: 12 warps share 65536, and the producer needs few.
PRODUCER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)
LOG2_E = gl.constexpr(1.4426950408889634)
# Triton renamed it after 3.6.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def computes(q: torch.Tensor, layout: BlockLayout) -> bool:
    """Whether the lowered kernels take this: a Hopper GPU, whole blocks of 128, head_dim 64 or 128, fp16 or bf16."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.float16, torch.bfloat16)
        and lowered_compute(layout, q.shape[-1])
    )


def tiles_of(x: torch.Tensor, rows: int = 128) -> TensorDescriptor:
    """A descriptor of ``x`` (batch, heads, n, head_dim) in tiles of ``rows`` tokens of one head."""
    if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:3]) or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves what begins at an odd address
    return described(x, (1, 1, rows, x.shape[-1]))


def described(x: torch.Tensor, tile: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of ``x`` in tiles of this shape. It is checked once per shape, for that takes the host longest; what is
    left is where ``x`` lies, which must be a multiple of 16 bytes."""
    assert x.data_ptr() % 16 == 0, "base must be 16-byte aligned"
    made = copy(_form(x.shape, x.stride(), x.dtype, tile))
    made.base = x
    return made


@lru_cache(maxsize=1024)
def _form(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, tile: tuple[int, ...]
) -> TensorDescriptor:
    """A descriptor of no tensor. Tiles of 16-bit numbers are swizzled for the products, those of fp32 are not."""
    swizzle = 128 if dtype.itemsize == 2 else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=len(tile))
    nowhere = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return TensorDescriptor(nowhere, list(shape), list(strides), list(tile), layout)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Two barriers for each tile of a ring: one says it is full, the other that every consumer is done with it."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return full, empty


@gluon.jit
def locate(unit, num_items, outer, group):
    """As triton_common.locate, for one tile per block."""
    per_group = group * num_items
    first = unit // per_group * group
    width = gl.minimum(group, outer - first)
    rest = unit % per_group
    return rest // width, first + rest % width


@gluon.jit
def place_of(items, unit, num_items, outer, group, heads, PER_HEAD: gl.constexpr):
    """(batch, head, row, first, count, slot) of a unit of work."""
    item, z = locate(unit, num_items, outer, group)
    items += item * 6
    if PER_HEAD:
        b, h = z, gl.load(items)
    else:
        b, h = z // heads, z % heads
    return b, h, gl.load(items + 1), gl.load(items + 2), gl.load(items + 3), gl.load(items + 5)
