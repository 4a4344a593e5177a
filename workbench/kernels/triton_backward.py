"""Our block-sparse attention in Triton: the backward pass.

Two passes, each with its own work list. Over the columns of the layout (its transpose): dK and dV of a tile of keys,
summed over the query blocks that see it. Over the rows: dQ of a tile of queries. Recomputing the scores in both costs
7 matrix products a block instead of 5, but every sum has a fixed order, so the result is deterministic, and no
product has a computed operand that must be transposed through shared memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl

from workbench.kernels.layout import BlockLayout
from workbench.kernels.schedule import Schedule, group_size, item_bound, schedule
from workbench.kernels.triton_common import (
    LOG2_E,
    base_of,
    batch_and_head,
    config,
    constants,
    dot,
    load_rows,
    locate,
    needs_upcast,
    num_processors,
    padded_head_dim,
    rows_view,
    scratch,
    store_rows,
    visible,
)


@triton.jit
def delta_kernel(
    out, grad_out, grad_lse, delta, o_b, o_h, o_n, g_b, g_h, g_n, n, heads,
    M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """delta = Σ_d out·grad_out − grad_lse, the term that every score's gradient subtracts."""
    start = tl.program_id(0) * M
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    o = load_rows(base_of(out, b, h, o_b, o_h), start, o_n, n, M, D, D_PAD, True).to(tl.float32)
    g = load_rows(base_of(grad_out, b, h, g_b, g_h), start, g_n, n, M, D, D_PAD, True).to(tl.float32)
    place = tl.program_id(1).to(tl.int64) * n + start + tl.arange(0, M)
    inside = start + tl.arange(0, M) < n
    tl.store(delta + place, tl.sum(o * g, 1) - tl.load(grad_lse + place, mask=inside, other=0.0), mask=inside)


@triton.jit
def _query_tile(q, grad_out, lse, delta, start_m, q_n, g_n, n,
                M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, RAGGED: tl.constexpr):  # fmt: skip
    """Queries, their output gradients, base-2 log-sums and deltas. Past ``n`` the log-sum is +inf: no probability."""
    q_tile = load_rows(q, start_m, q_n, n, M, D, D_PAD, RAGGED)
    g_tile = load_rows(grad_out, start_m, g_n, n, M, D, D_PAD, RAGGED)
    row = start_m + tl.arange(0, M)
    if RAGGED:
        log2_sum = tl.load(lse + row, mask=row < n, other=float("inf")) * LOG2_E
        shift = tl.load(delta + row, mask=row < n, other=0.0)
    else:
        log2_sum = tl.load(lse + row) * LOG2_E
        shift = tl.load(delta + row)
    return q_tile, g_tile, log2_sum, shift


@triton.jit
def _column_step(
    dk, dv, k_tile, v_tile, q, grad_out, lse, delta, start_m, start_n, q_n, g_n, n, scale_log2,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, RAGGED: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries against the program's keys. Scores are computed transposed, keys down, queries across."""
    q_tile, g_tile, log2_sum, shift = _query_tile(q, grad_out, lse, delta, start_m, q_n, g_n, n, M, D, D_PAD, RAGGED)
    zero = tl.zeros([N, M], tl.float32)
    p = tl.exp2(dot(k_tile, tl.trans(q_tile), zero, UPCAST) * scale_log2 - log2_sum[None, :])
    if MASKED:
        query, key = start_m + tl.arange(0, M), start_n + tl.arange(0, N)
        p = tl.where(visible(query[None, :], key[:, None], n, CAUSAL), p, 0.0)
    dv = dot(p.to(g_tile.dtype), g_tile, dv, UPCAST)
    ds = p * (dot(v_tile, tl.trans(g_tile), zero, UPCAST) - shift[None, :])
    ds = ds.to(q_tile.dtype)
    dk = dot(ds, q_tile, dk, UPCAST)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, part_k, part_v, items, indices,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    n, heads, outer, group, num_items, num_slots, scale, scale_log2,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys over one item of its column."""
    SUBS: tl.constexpr = BLOCK // N
    CUTS: tl.constexpr = BLOCK // M
    item, sub, z = locate(num_items, SUBS, outer, group)
    items += item * 6
    block, first, full = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    partial, slot = tl.load(items + 4), tl.load(items + 5)
    b, h = batch_and_head(z, tl.load(items), heads, PER_HEAD)
    flat = b.to(tl.int64) * heads + h
    q, grad_out = base_of(q, b, h, q_b, q_h), base_of(grad_out, b, h, g_b, g_h)
    lse, delta = lse + flat * n, delta + flat * n

    start_n = block * BLOCK + sub * N
    k_tile = load_rows(base_of(k, b, h, k_b, k_h), start_n, k_n, n, N, D, D_PAD, RAGGED)
    v_tile = load_rows(base_of(v, b, h, v_b, v_h), start_n, v_n, n, N, D, D_PAD, RAGGED)
    dk = tl.zeros([N, D_PAD], tl.float32)
    dv = tl.zeros([N, D_PAD], tl.float32)

    indices += first
    row = tl.load(indices)
    for t in range(full * CUTS):
        start_m = row * BLOCK + t % CUTS * M
        row = tl.load(indices + (t + 1) // CUTS)
        dk, dv = _column_step(dk, dv, k_tile, v_tile, q, grad_out, lse, delta, start_m, start_n, q_n, g_n, n,
                              scale_log2, M, N, D, D_PAD, RAGGED, False, CAUSAL, UPCAST)  # fmt: skip
    if CAUSAL or RAGGED:
        for t in range(full * CUTS, (full + partial) * CUTS):
            start_m = tl.load(indices + t // CUTS) * BLOCK + t % CUTS * M
            dk, dv = _column_step(dk, dv, k_tile, v_tile, q, grad_out, lse, delta, start_m, start_n, q_n, g_n,
                                  n, scale_log2, M, N, D, D_PAD, RAGGED, True, CAUSAL, UPCAST)  # fmt: skip

    dk *= scale
    if slot >= 0:
        place = (flat * num_slots + slot) * BLOCK + sub * N
        store_rows(part_k, place, D, place + N, dk, N, D, D_PAD)
        store_rows(part_v, place, D, place + N, dv, N, D, D_PAD)
    else:
        store_rows(base_of(grad_k, b, h, dk_b, dk_h), start_n, dk_n, n, dk, N, D, D_PAD)
        store_rows(base_of(grad_v, b, h, dv_b, dv_h), start_n, dv_n, n, dv, N, D, D_PAD)


@triton.jit
def _row_step(dq, q_tile, g_tile, log2_sum, shift, k, v, start_m, start_n, k_n, v_n, n, scale_log2,
              M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, RAGGED: tl.constexpr,
              CAUSAL: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """One tile of keys against the program's queries; RAGGED and CAUSAL are False for a full block."""
    k_tile = load_rows(k, start_n, k_n, n, N, D, D_PAD, RAGGED)
    v_tile = load_rows(v, start_n, v_n, n, N, D, D_PAD, RAGGED)
    zero = tl.zeros([M, N], tl.float32)
    p = tl.exp2(dot(q_tile, tl.trans(k_tile), zero, UPCAST) * scale_log2 - log2_sum[:, None])
    if RAGGED or CAUSAL:
        query, key = start_m + tl.arange(0, M), start_n + tl.arange(0, N)
        p = tl.where(visible(query[:, None], key[None, :], n, CAUSAL), p, 0.0)
    ds = p * (dot(g_tile, tl.trans(v_tile), zero, UPCAST) - shift[:, None])
    return dot(ds.to(k_tile.dtype), k_tile, dq, UPCAST)


@triton.jit
def dq_kernel(
    q, k, v, grad_out, lse, delta, grad_q, part_q, items, indices,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
    n, heads, outer, group, num_items, num_slots, scale, scale_log2,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries over one item of its row."""
    SUBS: tl.constexpr = BLOCK // M
    CUTS: tl.constexpr = BLOCK // N
    item, sub, z = locate(num_items, SUBS, outer, group)
    items += item * 6
    block, first, full = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    partial, slot = tl.load(items + 4), tl.load(items + 5)
    b, h = batch_and_head(z, tl.load(items), heads, PER_HEAD)
    flat = b.to(tl.int64) * heads + h
    k, v = base_of(k, b, h, k_b, k_h), base_of(v, b, h, v_b, v_h)

    start_m = block * BLOCK + sub * M
    q_tile, g_tile, log2_sum, shift = _query_tile(
        base_of(q, b, h, q_b, q_h), base_of(grad_out, b, h, g_b, g_h), lse + flat * n, delta + flat * n,
        start_m, q_n, g_n, n, M, D, D_PAD, RAGGED,
    )  # fmt: skip
    dq = tl.zeros([M, D_PAD], tl.float32)
    indices += first
    column = tl.load(indices)
    for t in range(full * CUTS):
        start_n = column * BLOCK + t % CUTS * N
        column = tl.load(indices + (t + 1) // CUTS)
        dq = _row_step(dq, q_tile, g_tile, log2_sum, shift, k, v, start_m, start_n, k_n, v_n, n, scale_log2,
                       M, N, D, D_PAD, False, False, UPCAST)  # fmt: skip
    if CAUSAL or RAGGED:
        for t in range(full * CUTS, (full + partial) * CUTS):
            start_n = tl.load(indices + t // CUTS) * BLOCK + t % CUTS * N
            dq = _row_step(dq, q_tile, g_tile, log2_sum, shift, k, v, start_m, start_n, k_n, v_n, n, scale_log2,
                           M, N, D, D_PAD, RAGGED, CAUSAL, UPCAST)  # fmt: skip

    dq *= scale
    if slot >= 0:
        place = (flat * num_slots + slot) * BLOCK + sub * M
        store_rows(part_q, place, D, place + M, dq, M, D, D_PAD)
    else:
        store_rows(base_of(grad_q, b, h, dq_b, dq_h), start_m, dq_n, n, dq, M, D, D_PAD)


@triton.jit
def sum_kernel(
    parts, splits, out, o_b, o_h, o_n, n, heads, num_slots,
    BLOCK: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of one tile of a split row or column, in the order of its items."""
    splits += tl.program_id(0) * 4
    row, first, count = tl.load(splits + 1), tl.load(splits + 2), tl.load(splits + 3)
    b, h = batch_and_head(tl.program_id(1), tl.load(splits), heads, PER_HEAD)
    sub = tl.program_id(2)
    place = ((b.to(tl.int64) * heads + h) * num_slots + first) * BLOCK + sub * M
    acc = tl.zeros([M, D_PAD], tl.float32)
    for s in range(count):
        acc += load_rows(parts, place + s * BLOCK, D, n, M, D, D_PAD, False)
    store_rows(base_of(out, b, h, o_b, o_h), row * BLOCK + sub * M, o_n, n, acc, M, D, D_PAD)


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
    """Gradients of q, k and v."""
    q, k, v, grad_out = (rows_view(x) for x in (q, k, v, grad_out))
    delta = take_delta(out, grad_out, grad_lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tensors = (q, k, v, grad_out, lse, delta)
    _column_pass(tensors, dk, dv, layout, scale)
    _row_pass(tensors, dq, layout, scale)
    return dq, dk, dv


def take_delta(out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> torch.Tensor:
    """What every score's gradient subtracts, fp32 ``(batch, heads, n)``."""
    out, grad_out = rows_view(out), rows_view(grad_out)
    batch, heads, n, d = out.shape
    delta = torch.empty(batch, heads, n, dtype=torch.float32, device=out.device)
    delta_kernel[(triton.cdiv(n, 64), batch * heads)](
        out, grad_out, grad_lse.contiguous(), delta, *out.stride()[:3], *grad_out.stride()[:3], n, heads,
        M=64, D=d, D_PAD=padded_head_dim(d), num_warps=4,
    )  # fmt: skip
    return delta


def _column_pass(
    tensors: tuple[torch.Tensor, ...], dk: torch.Tensor, dv: torch.Tensor, layout: BlockLayout, scale: float
) -> None:
    q, k, v, grad_out, lse, delta = tensors
    tile = config(q.shape[-1], layout.block_size).dkdv
    plan, outer = _plan(q, layout, by_columns=True)
    heads, n, d = q.shape[1:]
    part_k, _ = scratch(plan, q.shape[0] * heads, layout.block_size, d, q.device)
    part_v, _ = scratch(plan, q.shape[0] * heads, layout.block_size, d, q.device)
    dkdv_kernel[(len(plan.items) * (layout.block_size // tile.cols) * outer,)](
        q, k, v, grad_out, lse, delta, dk, dv, part_k, part_v, plan.items, plan.indices,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        n, heads, outer, group_size(layout, k, outer), len(plan.items), plan.num_slots, scale, scale * LOG2_E.value,
        **constants(layout, tile, d), UPCAST=needs_upcast(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    sum_parts(part_k, plan, dk, layout, outer)
    sum_parts(part_v, plan, dv, layout, outer)


def _row_pass(tensors: tuple[torch.Tensor, ...], dq: torch.Tensor, layout: BlockLayout, scale: float) -> None:
    q, k, v, grad_out, lse, delta = tensors
    tile = config(q.shape[-1], layout.block_size).dq
    plan, outer = _plan(q, layout, by_columns=False)
    heads, n, d = q.shape[1:]
    part_q, _ = scratch(plan, q.shape[0] * heads, layout.block_size, d, q.device)
    dq_kernel[(len(plan.items) * (layout.block_size // tile.rows) * outer,)](
        q, k, v, grad_out, lse, delta, dq, part_q, plan.items, plan.indices,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3], *dq.stride()[:3],
        n, heads, outer, group_size(layout, k, outer), len(plan.items), plan.num_slots, scale, scale * LOG2_E.value,
        **constants(layout, tile, d), UPCAST=needs_upcast(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    sum_parts(part_q, plan, dq, layout, outer)


def _plan(q: torch.Tensor, layout: BlockLayout, *, by_columns: bool) -> tuple[Schedule, int]:
    outer = q.shape[0] if layout.heads else q.shape[0] * q.shape[1]
    return schedule(layout, by_columns, item_bound(layout, outer, num_processors(q.device)), q.device), outer


def sum_parts(parts: torch.Tensor, plan: Schedule, out: torch.Tensor, layout: BlockLayout, outer: int) -> None:
    if not plan.num_slots:
        return
    heads, n, d = out.shape[1:]
    sum_kernel[(len(plan.splits), outer, layout.block_size // 16)](
        parts, plan.splits, out, *out.stride()[:3], n, heads, plan.num_slots,
        BLOCK=layout.block_size, M=16, D=d, D_PAD=padded_head_dim(d), PER_HEAD=layout.heads is not None, num_warps=4,
    )  # fmt: skip
