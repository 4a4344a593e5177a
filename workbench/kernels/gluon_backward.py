"""The backward pass lowered for Hopper: the two deterministic passes of triton_backward in the build of gluon_common.

A consumer holds 64 rows of its block and streams over tiles of the other side. Products that nothing waits for are left
running: the gradient products of one tile overlap with the score products of the next.
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
from workbench.kernels.triton_backward import sum_parts, take_delta
from workbench.kernels.triton_common import num_processors, scratch

TILE = 64  # rows of a streamed tile


@gluon.jit
def _produce(
    x, y, s, t, x_tiles, y_tiles, s_tiles, t_tiles, own_full, own_empty, s_full, s_empty, t_full, t_empty,
    items, indices, heads, outer, group, num_items,
    D: gl.constexpr, STAGES: gl.constexpr, ROWS_STREAMED: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Copy each item's own blocks ``x`` and ``y`` once, and the tiles of ``s`` and ``t`` that it streams over."""
    size: gl.constexpr = ROWS_STREAMED * D * 2
    CUTS: gl.constexpr = BLOCK // ROWS_STREAMED
    step = 0
    turn = 0
    for unit in range(gl.program_id(0), num_items * outer, gl.num_programs(0)):
        b, h, row, first, count, slot = place_of(items, unit, num_items, outer, group, heads, PER_HEAD)  # noqa: RUF059
        if count > 0:
            mbarrier.wait(own_empty.index(0), (turn & 1) ^ 1)
            mbarrier.expect(own_full.index(0), 2 * BLOCK * D * 2)
            tma_load(x, [b, h, row * BLOCK, 0], own_full.index(0), x_tiles)
            tma_load(y, [b, h, row * BLOCK, 0], own_full.index(0), y_tiles)
            turn += 1
            for i in range(count * CUTS):
                start = gl.load(indices + first + i // CUTS) * BLOCK + i % CUTS * ROWS_STREAMED
                stage = step % STAGES
                free = (step // STAGES & 1) ^ 1
                mbarrier.wait(s_empty.index(stage), free)
                mbarrier.expect(s_full.index(stage), size)
                tma_load(s, [b, h, start, 0], s_full.index(stage), s_tiles.index(stage))
                mbarrier.wait(t_empty.index(stage), free)
                mbarrier.expect(t_full.index(stage), size)
                tma_load(t, [b, h, start, 0], t_full.index(stage), t_tiles.index(stage))
                step += 1


@gluon.jit
def _store(
    value, grad, part, place, slot, stride, WHO: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Write a consumer's rows to the gradient, or to scratch when the row is split."""
    inside = WHO * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    if slot >= 0:
        gl.store(part + place * D + gl.expand_dims(inside * D, 1) + d, value)
    else:
        gl.store(grad + gl.expand_dims(inside * stride, 1) + d, value.to(grad.dtype.element_ty))


@gluon.jit
def _consume_rows(
    WHO: gl.constexpr, q_tiles, g_tiles, k_tiles, v_tiles, own_full, own_empty, k_full, k_empty, v_full, v_empty,
    lse, delta, grad_q, part_q, items, dq_b, dq_h, dq_n, n, heads, outer, group, num_items, num_slots,
    scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """dQ of 64 query rows: dS = P ∘ (dO·Vᵀ − delta), dQ = scale · dS·K."""
    dtype: gl.constexpr = grad_q.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    CUTS: gl.constexpr = BLOCK // KEYS
    inside = WHO * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    zero = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    step = 0
    turn = 0
    for unit in range(gl.program_id(0), num_items * outer, gl.num_programs(0)):
        b, h, row, first, count, slot = place_of(items, unit, num_items, outer, group, heads, PER_HEAD)  # noqa: RUF059
        flat = b.to(gl.int64) * heads + h
        dq = gl.zeros([ROWS, D], gl.float32, d_layout)
        if count > 0:
            at = flat * n + row * BLOCK + inside
            log2_sum = gl.expand_dims(gl.load(lse + at) * LOG2_E, 1)
            shift = gl.expand_dims(gl.load(delta + at), 1)
            mbarrier.wait(own_full.index(0), turn & 1)
            q_tile = q_tiles.reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            g_tile = g_tiles.reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            for _ in range(count * CUTS):
                stage = step % STAGES
                ready = step // STAGES & 1
                k_tile = k_tiles.index(stage).reshape([KEYS, D])
                mbarrier.wait(k_full.index(stage), ready)
                s_run = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                v_tile = v_tiles.index(stage).reshape([KEYS, D])
                mbarrier.wait(v_full.index(stage), ready)
                p_run = warpgroup_mma(g_tile, v_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[s_run])
                p = gl.exp2(scores * scale_log2 - log2_sum)
                dp = warpgroup_mma_wait(0, deps=[p_run])
                mbarrier.arrive(v_empty.index(stage), count=1)
                ds = gl.convert_layout((p * (dp - shift)).to(dtype), p_layout)
                dq_run = warpgroup_mma(ds, k_tile, dq, is_async=True)
                dq, ds = warpgroup_mma_wait(0, deps=[dq_run, ds])
                mbarrier.arrive(k_empty.index(stage), count=1)
                step += 1
            mbarrier.arrive(own_empty.index(0), count=1)
            turn += 1
        base = grad_q + b.to(gl.int64) * dq_b + h.to(gl.int64) * dq_h + row.to(gl.int64) * BLOCK * dq_n
        _store(dq * scale, base, part_q, (flat * num_slots + slot) * BLOCK, slot, dq_n, WHO, D, d_layout)


@gluon.jit
def dq_kernel(
    q, k, v, grad_out, lse, delta, grad_q, part_q, items, indices, dq_b, dq_h, dq_n,
    n, heads, outer, group, num_items, num_slots, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """q, grad_out: descriptors in tiles of 128 rows; k, v: in tiles of KEYS rows."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    q_tiles = gl.allocate_shared_memory(q.dtype, [1, 1, BLOCK, D], shared)
    g_tiles = gl.allocate_shared_memory(q.dtype, [1, 1, BLOCK, D], shared)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, D], shared)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, D], shared)
    own_full, own_empty = barriers(1)
    k_full, k_empty = barriers(STAGES)
    v_full, v_empty = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_rows, (0, q_tiles, g_tiles, k_tiles, v_tiles, own_full, own_empty, k_full, k_empty, v_full,
                             v_empty, lse, delta, grad_q, part_q, items, dq_b, dq_h, dq_n, n, heads, outer, group,
                             num_items, num_slots, scale, scale_log2, D, STAGES, KEYS, PER_HEAD)),
            (_consume_rows, (1, q_tiles, g_tiles, k_tiles, v_tiles, own_full, own_empty, k_full, k_empty, v_full,
                             v_empty, lse, delta, grad_q, part_q, items, dq_b, dq_h, dq_n, n, heads, outer, group,
                             num_items, num_slots, scale, scale_log2, D, STAGES, KEYS, PER_HEAD)),
            (_produce, (q, grad_out, k, v, q_tiles, g_tiles, k_tiles, v_tiles, own_full, own_empty, k_full, k_empty,
                        v_full, v_empty, items, indices, heads, outer, group, num_items, D, STAGES, KEYS, PER_HEAD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _consume_columns(
    WHO: gl.constexpr, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty, g_full, g_empty,
    lse, delta, grad_k, grad_v, part_k, part_v, items, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    n, heads, outer, group, num_items, num_slots, indices, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, keys down: dV = Pᵀ·dO, dSᵀ = Pᵀ ∘ (V·dOᵀ − delta), dK = scale · dSᵀ·Q."""
    dtype: gl.constexpr = grad_k.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    CUTS: gl.constexpr = BLOCK // QUERIES
    across = gl.arange(0, QUERIES, gl.SliceLayout(0, s_layout))
    zero = gl.zeros([ROWS, QUERIES], gl.float32, s_layout)
    step = 0
    turn = 0
    for unit in range(gl.program_id(0), num_items * outer, gl.num_programs(0)):
        b, h, column, first, count, slot = place_of(items, unit, num_items, outer, group, heads, PER_HEAD)
        flat = b.to(gl.int64) * heads + h
        dk = gl.zeros([ROWS, D], gl.float32, d_layout)
        dv = gl.zeros([ROWS, D], gl.float32, d_layout)
        if count > 0:
            mbarrier.wait(own_full.index(0), turn & 1)
            k_tile = k_tiles.reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            v_tile = v_tiles.reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            lse_row, delta_row = lse + flat * n, delta + flat * n
            for i in range(count * CUTS):
                at = gl.load(indices + first + i // CUTS) * BLOCK + i % CUTS * QUERIES + across
                log2_sum = gl.load(lse_row + at) * LOG2_E
                stage = step % STAGES
                ready = step // STAGES & 1
                q_tile = q_tiles.index(stage).reshape([QUERIES, D])
                mbarrier.wait(q_full.index(stage), ready)
                s_run = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                g_tile = g_tiles.index(stage).reshape([QUERIES, D])
                mbarrier.wait(g_full.index(stage), ready)
                p_run = warpgroup_mma(v_tile, g_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[s_run])
                p = gl.exp2(scores * scale_log2 - gl.expand_dims(log2_sum, 0))
                shift = gl.load(delta_row + at)
                p_tile = gl.convert_layout(p.to(dtype), p_layout)
                dv_run = warpgroup_mma(p_tile, g_tile, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[p_run])
                ds = gl.convert_layout((p * (dp - gl.expand_dims(shift, 0))).to(dtype), p_layout)
                dk_run = warpgroup_mma(ds, q_tile, dk, is_async=True)
                dv, p_tile = warpgroup_mma_wait(1, deps=[dv_run, p_tile])
                mbarrier.arrive(g_empty.index(stage), count=1)
                dk, ds = warpgroup_mma_wait(0, deps=[dk_run, ds])
                mbarrier.arrive(q_empty.index(stage), count=1)
                step += 1
            mbarrier.arrive(own_empty.index(0), count=1)
            turn += 1
        place = (flat * num_slots + slot) * BLOCK
        k_base = grad_k + b.to(gl.int64) * dk_b + h.to(gl.int64) * dk_h + column.to(gl.int64) * BLOCK * dk_n
        v_base = grad_v + b.to(gl.int64) * dv_b + h.to(gl.int64) * dv_h + column.to(gl.int64) * BLOCK * dv_n
        _store(dk * scale, k_base, part_k, place, slot, dk_n, WHO, D, d_layout)
        _store(dv, v_base, part_v, place, slot, dv_n, WHO, D, d_layout)


@gluon.jit
def dkdv_kernel(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, part_k, part_v, items, indices,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, n, heads, outer, group, num_items, num_slots, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """k, v: descriptors in tiles of 128 rows; q, grad_out: in tiles of QUERIES rows."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    k_tiles = gl.allocate_shared_memory(k.dtype, [1, 1, BLOCK, D], shared)
    v_tiles = gl.allocate_shared_memory(v.dtype, [1, 1, BLOCK, D], shared)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, QUERIES, D], shared)
    g_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, QUERIES, D], shared)
    own_full, own_empty = barriers(1)
    q_full, q_empty = barriers(STAGES)
    g_full, g_empty = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_columns, (0, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty, g_full,
                                g_empty, lse, delta, grad_k, grad_v, part_k, part_v, items, dk_b, dk_h, dk_n,
                                dv_b, dv_h, dv_n, n, heads, outer, group, num_items, num_slots, indices, scale,
                                scale_log2, D, STAGES, QUERIES, PER_HEAD)),
            (_consume_columns, (1, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty, g_full,
                                g_empty, lse, delta, grad_k, grad_v, part_k, part_v, items, dk_b, dk_h, dk_n,
                                dv_b, dv_h, dv_n, n, heads, outer, group, num_items, num_slots, indices, scale,
                                scale_log2, D, STAGES, QUERIES, PER_HEAD)),
            (_produce, (k, v, q, grad_out, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty,
                        g_full, g_empty, items, indices, heads, outer, group, num_items, D, STAGES, QUERIES,
                        PER_HEAD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    layout: BlockLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`workbench.kernels.triton_backward.backward`, deterministic."""
    batch, heads, n, d = q.shape
    delta = take_delta(out, grad_out, grad_lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    outer = batch if layout.heads else batch * heads
    processors = num_processors(q.device)
    bound, group = item_bound(layout, outer, processors), group_size(layout, k, outer)
    constants = {"D": d, "STAGES": 3, "PER_HEAD": layout.heads is not None, "num_warps": 4}

    plan = schedule(layout, True, bound, q.device)
    part_k, part_v = (scratch(plan, batch * heads, layout.block_size, d, q.device)[0] for _ in range(2))
    dkdv_kernel[(min(processors, len(plan.items) * outer),)](
        tiles_of(q, TILE), tiles_of(k), tiles_of(v), tiles_of(grad_out, TILE), lse, delta, dk, dv, part_k, part_v,
        plan.items, plan.indices, *dk.stride()[:3], *dv.stride()[:3], n, heads, outer, group, len(plan.items),
        plan.num_slots, scale, scale * LOG2_E.value, QUERIES=TILE, **constants,
    )  # fmt: skip
    sum_parts(part_k, plan, dk, layout, outer)
    sum_parts(part_v, plan, dv, layout, outer)

    plan = schedule(layout, False, bound, q.device)
    part_q, _ = scratch(plan, batch * heads, layout.block_size, d, q.device)
    dq_kernel[(min(processors, len(plan.items) * outer),)](
        tiles_of(q), tiles_of(k, TILE), tiles_of(v, TILE), tiles_of(grad_out), lse, delta, dq, part_q, plan.items,
        plan.indices, *dq.stride()[:3], n, heads, outer, group, len(plan.items), plan.num_slots, scale,
        scale * LOG2_E.value, KEYS=TILE, **constants,
    )  # fmt: skip
    sum_parts(part_q, plan, dq, layout, outer)
    return dq, dk, dv
