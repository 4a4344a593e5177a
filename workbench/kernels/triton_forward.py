"""Our block-sparse attention in Triton: the forward pass.

One program computes one item of the work list (:mod:`workbench.kernels.schedule`): a tile of queries against a
bounded run of live key blocks, by the online softmax of FlashAttention-2 (Dao 2023) in base 2 with the scale folded
in. Full blocks come first and are not masked; partial ones, last in every row, are.
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
def _softmax_step(scores, top, total, acc, v, scale_log2, UPCAST: tl.constexpr):
    """One step of the online softmax. By now every row within ``n`` has had a finite score, so ``top`` is finite."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_top[:, None])
    alpha = tl.exp2(top - new_top)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None], UPCAST)
    return new_top, total * alpha + tl.sum(p, 1), acc


@triton.jit
def forward_kernel(
    q, k, v, out, lse, part_out, part_lse, items, indices,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    n, heads, outer, group, num_items, num_slots, scale_log2,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """q, k, v, out: (batch, heads, n, D). lse: (batch, heads, n). part_*: scratch (batch, heads, slots, BLOCK, …)."""
    SUBS: tl.constexpr = BLOCK // M
    CUTS: tl.constexpr = BLOCK // N
    item, sub, z = locate(num_items, SUBS, outer, group)
    items += item * 6
    row, first, full = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    partial, slot = tl.load(items + 4), tl.load(items + 5)
    b, h = batch_and_head(z, tl.load(items), heads, PER_HEAD)
    k = base_of(k, b, h, k_b, k_h)
    v = base_of(v, b, h, v_b, v_h)

    start_m = row * BLOCK + sub * M
    q_tile = load_rows(base_of(q, b, h, q_b, q_h), start_m, q_n, n, M, D, D_PAD, RAGGED)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    zero = tl.zeros([M, N], tl.float32)

    indices += first
    column = tl.load(indices)  # one step ahead, so that no key load waits for its own index
    for t in range(full * CUTS):
        start_n = column * BLOCK + t % CUTS * N
        column = tl.load(indices + (t + 1) // CUTS)
        k_tile = load_rows(k, start_n, k_n, n, N, D, D_PAD, False)
        scores = dot(q_tile, tl.trans(k_tile), zero, UPCAST)
        v_tile = load_rows(v, start_n, v_n, n, N, D, D_PAD, False)
        top, total, acc = _softmax_step(scores, top, total, acc, v_tile, scale_log2, UPCAST)
    if CAUSAL or RAGGED:
        for t in range(full * CUTS, (full + partial) * CUTS):
            start_n = tl.load(indices + t // CUTS) * BLOCK + t % CUTS * N
            k_tile = load_rows(k, start_n, k_n, n, N, D, D_PAD, RAGGED)
            scores = dot(q_tile, tl.trans(k_tile), zero, UPCAST)
            query, key = start_m + tl.arange(0, M), start_n + tl.arange(0, N)
            scores = tl.where(visible(query[:, None], key[None, :], n, CAUSAL), scores, float("-inf"))
            v_tile = load_rows(v, start_n, v_n, n, N, D, D_PAD, RAGGED)
            top, total, acc = _softmax_step(scores, top, total, acc, v_tile, scale_log2, UPCAST)

    some = tl.where(total == 0, 1.0, total)  # an empty row: output 0, log-sum −inf
    acc = acc * (1.0 / some)[:, None]
    log2_sum = top + tl.log2(some)
    inside = tl.arange(0, M)
    if slot >= 0:
        place = ((b.to(tl.int64) * heads + h) * num_slots + slot) * BLOCK + sub * M
        tl.store(part_lse + place + inside, log2_sum)
        store_rows(part_out, place, D, place + M, acc, M, D, D_PAD)
    else:
        store_rows(base_of(out, b, h, o_b, o_h), start_m, o_n, n, acc, M, D, D_PAD)
        lse += (b.to(tl.int64) * heads + h) * n
        tl.store(lse + start_m + inside, log2_sum / LOG2_E, mask=start_m + inside < n)


@triton.jit
def combine_kernel(
    part_out, part_lse, splits, out, lse, o_b, o_h, o_n, n, heads, num_slots,
    BLOCK: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Combine the partial softmaxes of one tile of a split row, weighted by their sums."""
    splits += tl.program_id(0) * 4
    row, first, count = tl.load(splits + 1), tl.load(splits + 2), tl.load(splits + 3)
    b, h = batch_and_head(tl.program_id(1), tl.load(splits), heads, PER_HEAD)
    sub = tl.program_id(2)
    inside = tl.arange(0, M)
    place = ((b.to(tl.int64) * heads + h) * num_slots + first) * BLOCK + sub * M
    top = tl.full([M], float("-inf"), tl.float32)
    for s in range(count):
        top = tl.maximum(top, tl.load(part_lse + place + s * BLOCK + inside))
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    for s in range(count):
        weight = tl.exp2(tl.load(part_lse + place + s * BLOCK + inside) - top)
        total += weight
        acc += weight[:, None] * load_rows(part_out, place + s * BLOCK, D, n, M, D, D_PAD, False)
    start = row * BLOCK + sub * M
    store_rows(base_of(out, b, h, o_b, o_h), start, o_n, n, acc / total[:, None], M, D, D_PAD)
    lse += (b.to(tl.int64) * heads + h) * n
    tl.store(lse + start + inside, (top + tl.log2(total)) / LOG2_E, mask=start + inside < n)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output like ``q`` and log-sum-exp ``(batch, heads, n)`` in fp32, natural logarithm."""
    q, k, v = rows_view(q), rows_view(k), rows_view(v)
    batch, heads, n, d = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    tile = config(d, layout.block_size).forward
    outer = batch if layout.heads else batch * heads
    plan = schedule(layout, False, item_bound(layout, outer, num_processors(q.device)), q.device)
    part_out, part_lse = scratch(plan, batch * heads, layout.block_size, d, q.device)
    parts = layout.block_size // tile.rows
    forward_kernel[(len(plan.items) * parts * outer,)](
        q, k, v, out, lse, part_out, part_lse, plan.items, plan.indices,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        n, heads, outer, group_size(layout, q, outer), len(plan.items), plan.num_slots, scale * LOG2_E.value,
        **constants(layout, tile, d), UPCAST=needs_upcast(q),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    combine(plan, part_out, part_lse, out, lse, layout, outer)
    return out, lse


def combine(
    plan: Schedule,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    layout: BlockLayout,
    outer: int,
) -> None:
    """Write the rows whose items lie in scratch."""
    if not plan.num_slots:
        return
    heads, n, d = out.shape[1:]
    combine_kernel[(len(plan.splits), outer, layout.block_size // 16)](
        part_out, part_lse, plan.splits, out, lse, *out.stride()[:3], n, heads, plan.num_slots,
        BLOCK=layout.block_size, M=16, D=d, D_PAD=padded_head_dim(d), PER_HEAD=layout.heads is not None, num_warps=4,
    )  # fmt: skip
