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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workbench.kernels.gluon_common import (
    BLOCK,
    CONSUMER_REGISTERS,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    barriers,
    described,
    place_of,
    tiles_of,
    tma_load,
)
from workbench.kernels.layout import BlockLayout
from workbench.kernels.schedule import group_size, item_bound, schedule
from workbench.kernels.triton_backward import sum_parts, take_delta
from workbench.kernels.triton_common import num_processors, scratch

# Rows of a streamed tile: as many as the registers hold beside the gradients; of keys by head_dim.
QUERIES = 64
KEYS = {64: 128, 128: 64}
STAGES = 3


@gluon.jit
def _produce(
    x, y, s, t, lse, delta, x_tiles, y_tiles, s_tiles, t_tiles, lse_tiles, delta_tiles, own_full, own_empty, s_full,
    s_empty, t_full, t_empty, items, indices, heads, outer, group, num_items,
    D: gl.constexpr, STAGES: gl.constexpr, ROWS_STREAMED: gl.constexpr, PER_HEAD: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Copy each item's own blocks ``x`` and ``y`` once, and the tiles of ``s`` and ``t`` that it streams over; with ``SUMS``
    also the rows' log-sums and deltas: read from device memory by the consumers they would cost a round trip a tile.

    Own blocks have two places, so that those of the next item arrive while this one is computed."""
    size: gl.constexpr = ROWS_STREAMED * D * 2 + (ROWS_STREAMED * 4 if SUMS else 0)
    CUTS: gl.constexpr = BLOCK // ROWS_STREAMED
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
            own = turn % 2
            mbarrier.wait(own_empty.index(own), (turn // 2 & 1) ^ 1)
            mbarrier.expect(own_full.index(own), 2 * BLOCK * D * 2)
            tma_load(x, [b, h, row * BLOCK, 0], own_full.index(own), x_tiles.index(own))
            tma_load(y, [b, h, row * BLOCK, 0], own_full.index(own), y_tiles.index(own))
            turn += 1
            for i in range(count * CUTS):
                start = gl.load(indices + first + i // CUTS) * BLOCK + i % CUTS * ROWS_STREAMED
                stage = step % STAGES
                free = (step // STAGES & 1) ^ 1
                mbarrier.wait(s_empty.index(stage), free)
                mbarrier.expect(s_full.index(stage), size)
                tma_load(s, [b, h, start, 0], s_full.index(stage), s_tiles.index(stage))
                if SUMS:
                    tma_load(lse, [b * heads + h, start], s_full.index(stage), lse_tiles.index(stage))
                mbarrier.wait(t_empty.index(stage), free)
                mbarrier.expect(t_full.index(stage), size)
                tma_load(t, [b, h, start, 0], t_full.index(stage), t_tiles.index(stage))
                if SUMS:
                    tma_load(delta, [b * heads + h, start], t_full.index(stage), delta_tiles.index(stage))
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
def _against(own, tiles, full, step, zero, D: gl.constexpr, STAGES: gl.constexpr, TILE_ROWS: gl.constexpr):
    """Start own·tileᵀ once the tile of this step is there."""
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    tile = tiles.index(step % STAGES).reshape([TILE_ROWS, D])
    return warpgroup_mma(own, tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _row_scores(
    s_run, p_run, log2_sum, shift, scale_log2, dtype: gl.constexpr, LAYOUT: gl.constexpr, BEHIND: gl.constexpr
):  # fmt: skip
    """dS of a tile of keys from its two products under way; ``BEHIND`` are the products started after them."""
    scores = warpgroup_mma_wait(1 + BEHIND, deps=[s_run])
    p = gl.exp2(scores * scale_log2 - log2_sum)
    dp = warpgroup_mma_wait(BEHIND, deps=[p_run])
    return gl.convert_layout((p * (dp - shift)).to(dtype), LAYOUT)


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
        flat = b.to(gl.int64) * heads + h
        dq = gl.zeros([ROWS, D], gl.float32, d_layout)
        if count > 0:
            at = flat * n + row * BLOCK + inside
            log2_sum = gl.expand_dims(gl.load(lse + at) * LOG2_E, 1)
            shift = gl.expand_dims(gl.load(delta + at), 1)
            own = turn % 2
            mbarrier.wait(own_full.index(own), turn // 2 & 1)
            q_tile = q_tiles.index(own).reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            g_tile = g_tiles.index(own).reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            s_run = _against(q_tile, k_tiles, k_full, step, zero, D, STAGES, KEYS)
            p_run = _against(g_tile, v_tiles, v_full, step, zero, D, STAGES, KEYS)
            ds = _row_scores(s_run, p_run, log2_sum, shift, scale_log2, dtype, p_layout, 0)
            mbarrier.arrive(v_empty.index(step % STAGES), count=1)
            for _ in range(count * CUTS - 1):
                last = step % STAGES
                step += 1
                s_run = _against(q_tile, k_tiles, k_full, step, zero, D, STAGES, KEYS)
                p_run = _against(g_tile, v_tiles, v_full, step, zero, D, STAGES, KEYS)
                dq_run = warpgroup_mma(ds, k_tiles.index(last).reshape([KEYS, D]), dq, is_async=True)
                fresh = _row_scores(s_run, p_run, log2_sum, shift, scale_log2, dtype, p_layout, 1)
                mbarrier.arrive(v_empty.index(step % STAGES), count=1)
                dq, ds = warpgroup_mma_wait(0, deps=[dq_run, ds])
                mbarrier.arrive(k_empty.index(last), count=1)
                ds = fresh
            mbarrier.arrive(own_empty.index(own), count=1)
            dq_run = warpgroup_mma(ds, k_tiles.index(step % STAGES).reshape([KEYS, D]), dq, is_async=True)
            dq, ds = warpgroup_mma_wait(0, deps=[dq_run, ds])
            mbarrier.arrive(k_empty.index(step % STAGES), count=1)
            step += 1
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
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK, D], shared)
    g_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, BLOCK, D], shared)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, D], shared)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, D], shared)
    own_full, own_empty = barriers(2)
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
            (_produce, (q, grad_out, k, v, lse, delta, q_tiles, g_tiles, k_tiles, v_tiles, k_tiles, v_tiles, own_full,
                        own_empty, k_full, k_empty, v_full, v_empty, items, indices, heads, outer, group, num_items,
                        D, STAGES, KEYS, PER_HEAD, False)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _consume_columns(
    WHO: gl.constexpr, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty, g_full, g_empty,
    lse_tiles, delta_tiles, grad_k, grad_v, part_k, part_v, items, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    heads, outer, group, num_items, num_slots, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, keys down: dV = Pᵀ·dO, dSᵀ = Pᵀ ∘ (V·dOᵀ − delta), dK = scale · dSᵀ·Q."""
    dtype: gl.constexpr = grad_k.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    CUTS: gl.constexpr = BLOCK // QUERIES
    zero = gl.zeros([ROWS, QUERIES], gl.float32, s_layout)
    step = 0
    turn = 0
    num_units = num_items * outer
    next_b, next_h, next_column, next_first, next_count, next_slot = place_of(
        items, gl.program_id(0), num_items, outer, group, heads, PER_HEAD
    )
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        b, h, column, first, count, slot = next_b, next_h, next_column, next_first, next_count, next_slot  # noqa: F841
        coming = gl.minimum(unit + gl.num_programs(0), num_units - 1)
        next_b, next_h, next_column, next_first, next_count, next_slot = place_of(
            items, coming, num_items, outer, group, heads, PER_HEAD
        )
        flat = b.to(gl.int64) * heads + h
        dk = gl.zeros([ROWS, D], gl.float32, d_layout)
        dv = gl.zeros([ROWS, D], gl.float32, d_layout)
        if count > 0:
            own = turn % 2
            mbarrier.wait(own_full.index(own), turn // 2 & 1)
            k_tile = k_tiles.index(own).reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            v_tile = v_tiles.index(own).reshape([BLOCK, D]).slice(WHO * ROWS, ROWS)
            for _ in range(count * CUTS):
                stage = step % STAGES
                q_tile = q_tiles.index(stage).reshape([QUERIES, D])
                g_tile = g_tiles.index(stage).reshape([QUERIES, D])
                s_run = _against(k_tile, q_tiles, q_full, step, zero, D, STAGES, QUERIES)
                p_run = _against(v_tile, g_tiles, g_full, step, zero, D, STAGES, QUERIES)
                log2_sum = lse_tiles.index(stage).reshape([QUERIES]).load(gl.SliceLayout(0, s_layout)) * LOG2_E
                scores = warpgroup_mma_wait(1, deps=[s_run])
                p = gl.exp2(scores * scale_log2 - gl.expand_dims(log2_sum, 0))
                p_tile = gl.convert_layout(p.to(dtype), p_layout)
                dv_run = warpgroup_mma(p_tile, g_tile, dv, is_async=True)
                shift = delta_tiles.index(stage).reshape([QUERIES]).load(gl.SliceLayout(0, s_layout))
                dp = warpgroup_mma_wait(1, deps=[p_run])
                ds = gl.convert_layout((p * (dp - gl.expand_dims(shift, 0))).to(dtype), p_layout)
                dk_run = warpgroup_mma(ds, q_tile, dk, is_async=True)
                dv, p_tile = warpgroup_mma_wait(1, deps=[dv_run, p_tile])
                mbarrier.arrive(g_empty.index(stage), count=1)
                dk, ds = warpgroup_mma_wait(0, deps=[dk_run, ds])
                mbarrier.arrive(q_empty.index(stage), count=1)
                step += 1
            mbarrier.arrive(own_empty.index(own), count=1)
            turn += 1
        place = (flat * num_slots + slot) * BLOCK
        k_base = grad_k + b.to(gl.int64) * dk_b + h.to(gl.int64) * dk_h + column.to(gl.int64) * BLOCK * dk_n
        v_base = grad_v + b.to(gl.int64) * dv_b + h.to(gl.int64) * dv_h + column.to(gl.int64) * BLOCK * dv_n
        _store(dk * scale, k_base, part_k, place, slot, dk_n, WHO, D, d_layout)
        _store(dv, v_base, part_v, place, slot, dv_n, WHO, D, d_layout)


@gluon.jit
def dkdv_kernel(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, part_k, part_v, items, indices,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, heads, outer, group, num_items, num_slots, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """k, v: descriptors in tiles of 128 rows; q, grad_out, and lse and delta as (batch·heads, n): in tiles of QUERIES rows."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    k_tiles = gl.allocate_shared_memory(k.dtype, [2, 1, 1, BLOCK, D], shared)
    v_tiles = gl.allocate_shared_memory(v.dtype, [2, 1, 1, BLOCK, D], shared)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, QUERIES, D], shared)
    g_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, QUERIES, D], shared)
    sums: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], sums)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], sums)
    own_full, own_empty = barriers(2)
    q_full, q_empty = barriers(STAGES)
    g_full, g_empty = barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_columns, (0, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty, g_full,
                                g_empty, lse_tiles, delta_tiles, grad_k, grad_v, part_k, part_v, items, dk_b, dk_h,
                                dk_n, dv_b, dv_h, dv_n, heads, outer, group, num_items, num_slots, scale, scale_log2,
                                D, STAGES, QUERIES, PER_HEAD)),
            (_consume_columns, (1, k_tiles, v_tiles, q_tiles, g_tiles, own_full, own_empty, q_full, q_empty, g_full,
                                g_empty, lse_tiles, delta_tiles, grad_k, grad_v, part_k, part_v, items, dk_b, dk_h,
                                dk_n, dv_b, dv_h, dv_n, heads, outer, group, num_items, num_slots, scale, scale_log2,
                                D, STAGES, QUERIES, PER_HEAD)),
            (_produce, (k, v, q, grad_out, lse, delta, k_tiles, v_tiles, q_tiles, g_tiles, lse_tiles, delta_tiles,
                        own_full, own_empty, q_full, q_empty, g_full, g_empty, items, indices, heads, outer, group,
                        num_items, D, STAGES, QUERIES, PER_HEAD, True)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def sums_of(x: torch.Tensor) -> TensorDescriptor:
    """A descriptor of one fp32 number per token, ``(batch, heads, n)``, in tiles of QUERIES tokens of one head."""
    return described(x.contiguous().view(-1, x.shape[-1]), (1, QUERIES))


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
    keys = KEYS[d]
    constants = {"D": d, "STAGES": STAGES, "PER_HEAD": layout.heads is not None, "num_warps": 4}

    plan = schedule(layout, True, bound, q.device)
    part_k, part_v = (scratch(plan, batch * heads, layout.block_size, d, q.device)[0] for _ in range(2))
    dkdv_kernel[(min(processors, len(plan.items) * outer),)](
        tiles_of(q, QUERIES), tiles_of(k), tiles_of(v), tiles_of(grad_out, QUERIES), sums_of(lse), sums_of(delta), dk, dv,
        part_k, part_v, plan.items, plan.indices, *dk.stride()[:3], *dv.stride()[:3], heads, outer, group, len(plan.items),
        plan.num_slots, scale, scale * LOG2_E.value, QUERIES=QUERIES, **constants,
    )  # fmt: skip
    sum_parts(part_k, plan, dk, layout, outer)
    sum_parts(part_v, plan, dv, layout, outer)

    plan = schedule(layout, False, bound, q.device)
    part_q, _ = scratch(plan, batch * heads, layout.block_size, d, q.device)
    dq_kernel[(min(processors, len(plan.items) * outer),)](
        tiles_of(q), tiles_of(k, keys), tiles_of(v, keys), tiles_of(grad_out), lse, delta, dq, part_q, plan.items,
        plan.indices, *dq.stride()[:3], n, heads, outer, group, len(plan.items), plan.num_slots, scale,
        scale * LOG2_E.value, KEYS=keys, **constants,
    )  # fmt: skip
    sum_parts(part_q, plan, dq, layout, outer)
    return dq, dk, dv
