"""The forward pass lowered for Hopper: a warp-specialised, persistent kernel in Gluon, Triton's lower level.

One warp produces: it walks the work list, reads column indices and copies queries, keys and values into shared memory
with the tensor memory accelerator, running ahead of the consumers across items, so that a short row costs no start-up.
Two warpgroups consume, 64 query rows each: the scores of the next key block are multiplied while this block's
probabilities multiply its values (the overlap of FlashAttention-3, Shah et al. 2024). The grid is one thread block per
multiprocessor.

It takes whole blocks of 128 only (no causal cut, n a multiple of 128) and head_dim 64 or 128; the rest is
:mod:`workbench.kernels.triton_forward`'s.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workbench.kernels.gluon_common import (
    BLOCK,
    CONSUMER_REGISTERS,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    barriers,
    place_of,
    tiles_of,
    tma_load,
)
from workbench.kernels.layout import BlockLayout
from workbench.kernels.schedule import group_size, item_bound, schedule
from workbench.kernels.triton_common import num_processors, scratch
from workbench.kernels.triton_forward import combine


@gluon.jit
def _produce(
    q, k, v, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    items, indices, heads, outer, group, num_items,
    D: gl.constexpr, STAGES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of one item after the other. Tiles go round in rings; a barrier's parity tells the rounds."""
    size: gl.constexpr = BLOCK * D * 2
    step = 0
    turn = 0
    num_units = num_items * outer
    next_b, next_h, next_row, next_first, next_count, next_slot = place_of(
        items, gl.program_id(0), num_items, outer, group, heads, PER_HEAD
    )
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        b, h, row, first, count, slot = next_b, next_h, next_row, next_first, next_count, next_slot  # noqa: F841
        coming = gl.minimum(unit + gl.num_programs(0), num_units - 1)
        next_b, next_h, next_row, next_first, next_count, next_slot = place_of(
            items, coming, num_items, outer, group, heads, PER_HEAD
        )
        if count > 0:
            mbarrier.wait(q_empty.index(turn % 2), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(turn % 2), size)
            tma_load(q, [b, h, row * BLOCK, 0], q_full.index(turn % 2), q_tiles.index(turn % 2))
            turn += 1
            column = gl.load(indices + first)
            for t in range(count):
                start = column * BLOCK
                column = gl.load(indices + first + t + 1)
                stage = step % STAGES
                free = (step // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_full.index(stage), size)
                tma_load(k, [b, h, start, 0], k_full.index(stage), k_tiles.index(stage))
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_full.index(stage), size)
                tma_load(v, [b, h, start, 0], v_full.index(stage), v_tiles.index(stage))
                step += 1


@gluon.jit
def _consume(
    WHO: gl.constexpr, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    out, lse, part_out, part_lse, items, o_b, o_h, o_n, n, heads, outer, group, num_items, num_slots, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Rows ``WHO·64 … WHO·64 + 63`` of every item's queries."""
    dtype: gl.constexpr = out.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    inside = WHO * ROWS + gl.arange(0, ROWS, s_rows)
    o_inside = WHO * ROWS + gl.arange(0, ROWS, o_rows)
    d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    no_scores = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    step = 0
    turn = 0
    num_units = num_items * outer
    next_b, next_h, next_row, next_first, next_count, next_slot = place_of(
        items, gl.program_id(0), num_items, outer, group, heads, PER_HEAD
    )
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        b, h, row, first, count, slot = next_b, next_h, next_row, next_first, next_count, next_slot  # noqa: F841
        coming = gl.minimum(unit + gl.num_programs(0), num_units - 1)
        next_b, next_h, next_row, next_first, next_count, next_slot = place_of(
            items, coming, num_items, outer, group, heads, PER_HEAD
        )
        acc = gl.zeros([ROWS, D], gl.float32, o_layout)
        top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
        total = gl.zeros([ROWS], gl.float32, s_rows)
        if count > 0:
            mbarrier.wait(q_full.index(turn % 2), turn // 2 & 1)
            q_tile = q_tiles.index(turn % 2).reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)

            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            k_tile = k_tiles.index(stage).reshape([BLOCK, D])
            pending = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[pending])
            mbarrier.arrive(k_empty.index(stage), count=1)
            top = gl.max(scores, 1) * scale_log2
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(top, 1))
            total = gl.sum(p, 1)
            p_tile = gl.convert_layout(p.to(dtype), p_layout)

            for _ in range(1, count):
                ahead = (step + 1) % STAGES
                mbarrier.wait(k_full.index(ahead), (step + 1) // STAGES & 1)
                k_tile = k_tiles.index(ahead).reshape([BLOCK, D])
                pending = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), step // STAGES & 1)
                pending_acc = warpgroup_mma(p_tile, v_tiles.index(stage).reshape([BLOCK, D]), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[pending])
                mbarrier.arrive(k_empty.index(ahead), count=1)
                new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
                p = gl.exp2(scores * scale_log2 - gl.expand_dims(new_top, 1))
                alpha = gl.exp2(top - new_top)
                total = total * alpha + gl.sum(p, 1)
                top = new_top
                acc, p_tile = warpgroup_mma_wait(0, deps=[pending_acc, p_tile])
                mbarrier.arrive(v_empty.index(stage), count=1)
                acc = acc * gl.expand_dims(gl.convert_layout(alpha, o_rows), 1)
                p_tile = gl.convert_layout(p.to(dtype), p_layout)
                step += 1
                stage = ahead

            mbarrier.arrive(q_empty.index(turn % 2), count=1)
            turn += 1
            mbarrier.wait(v_full.index(stage), step // STAGES & 1)
            pending_acc = warpgroup_mma(p_tile, v_tiles.index(stage).reshape([BLOCK, D]), acc, is_async=True)
            acc, p_tile = warpgroup_mma_wait(0, deps=[pending_acc, p_tile])
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1

        some = gl.where(total == 0, 1.0, total)
        acc = acc * gl.expand_dims(gl.convert_layout(1.0 / some, o_rows), 1)
        log2_sum = top + gl.log2(some)
        flat = b.to(gl.int64) * heads + h
        if slot >= 0:
            place = (flat * num_slots + slot) * BLOCK
            gl.store(part_lse + place + inside, log2_sum)
            gl.store(part_out + place * D + gl.expand_dims(o_inside * D, 1) + gl.expand_dims(d, 0), acc)
        else:
            base = out + b.to(gl.int64) * o_b + h.to(gl.int64) * o_h + row.to(gl.int64) * BLOCK * o_n
            gl.store(base + gl.expand_dims(o_inside * o_n, 1) + gl.expand_dims(d, 0), acc.to(dtype))
            gl.store(lse + flat * n + row * BLOCK + inside, log2_sum / LOG2_E)


@gluon.jit
def forward_kernel(
    q, k, v, out, lse, part_out, part_lse, items, indices, o_b, o_h, o_n,
    n, heads, outer, group, num_items, num_slots, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """q, k, v: descriptors of (batch, heads, n, D) with tiles of (1, 1, 128, D). The rest as in triton_forward."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK, D], shared)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK, D], shared)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK, D], shared)
    q_full, q_empty = barriers(2)
    k_full, k_empty = barriers(STAGES)
    v_full, v_empty = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        out, lse, part_out, part_lse, items, o_b, o_h, o_n, n, heads, outer, group, num_items,
                        num_slots, scale_log2, D, STAGES, PER_HEAD)),
            (_consume, (1, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        out, lse, part_out, part_lse, items, o_b, o_h, o_n, n, heads, outer, group, num_items,
                        num_slots, scale_log2, D, STAGES, PER_HEAD)),
            (_produce, (q, k, v, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        items, indices, heads, outer, group, num_items, D, STAGES, PER_HEAD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`workbench.kernels.triton_forward.forward`."""
    batch, heads, n, d = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    outer = batch if layout.heads else batch * heads
    processors = num_processors(q.device)
    plan = schedule(layout, False, item_bound(layout, outer, processors), q.device)
    part_out, part_lse = scratch(plan, batch * heads, layout.block_size, d, q.device)
    forward_kernel[(min(processors, len(plan.items) * outer),)](
        tiles_of(q), tiles_of(k), tiles_of(v), out, lse, part_out, part_lse, plan.items, plan.indices,
        *out.stride()[:3], n, heads, outer, group_size(layout, k, outer), len(plan.items), plan.num_slots,
        scale * LOG2_E.value,
        D=d, STAGES=256 // d, PER_HEAD=layout.heads is not None, num_warps=4,
    )  # fmt: skip
    combine(plan, part_out, part_lse, out, lse, layout, outer)
    return out, lse
