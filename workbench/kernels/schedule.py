"""Work lists: how the live blocks of a layout are dealt out to thread blocks.

A row of blocks is cut into *items* of a bounded number of live blocks, and items are listed longest first. A row of
one item is written to the output directly; the items of a longer row write partial results to slots of a scratch
buffer, which a second kernel combines. So one dense row among sparse ones costs its share of the work and not its
length. (The same idea for sparse matrices is merge-path, Merrill and Garland 2016; for attention, the split of
flash-decoding, Dao et al. 2023.)
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.kernels.layout import BlockLayout, Csr

# Columns of the two tables, in the order in which the kernels read them.
ITEM_FIELDS = ("head", "row", "first", "full", "partial", "slot")
SPLIT_FIELDS = ("head", "row", "first_slot", "num_slots")
SHORTEST_ITEM = 16


@dataclass(frozen=True)
class Schedule:
    """The items of one layout, by rows or by columns, on one device.

    Attributes:
        items: int32 ``(num_items, 6)``: head, row, position of its first block in ``indices``, number of full and of
        partial
            blocks, scratch slot (−1: writes the output itself). Longest first.
        splits: int32 ``(num_splits, 4)``: the rows whose items must be combined.
        indices: int32, the other coordinate of every live block, with one entry of padding to prefetch from.
        num_slots: scratch slots per (batch, head).
    """

    items: torch.Tensor
    splits: torch.Tensor
    indices: torch.Tensor
    num_slots: int


def item_bound(layout: BlockLayout, outer: int, num_processors: int) -> int:
    """The most blocks one item may hold: a quarter of a processor's share of the work, and no less than SHORTEST_ITEM.

    Shorter items would balance better but pay a prologue and a round trip through scratch each.

    Args:
        outer: how often the pattern is computed: batch × heads for a shared pattern, batch for a per-head one.
    """
    share = layout.nnz * outer / num_processors / 4
    return max(SHORTEST_ITEM, 1 << int(np.ceil(np.log2(max(share, 1)))))


@lru_cache(maxsize=256)
def schedule(layout: BlockLayout, by_columns: bool, bound: int, device: torch.device) -> Schedule:
    """The work list of ``layout``, by query rows or by key columns, with at most ``bound`` blocks per item."""
    csr = layout.columns if by_columns else layout.rows
    items, splits, num_slots = _deal(csr, layout.num_blocks, bound)
    indices = np.append(csr.indices, np.int32(0))
    items_, splits_, indices_ = (torch.from_numpy(array).to(device) for array in (items, splits, indices))
    return Schedule(items_, splits_, indices_, num_slots)


def _deal(csr: Csr, num_blocks: int, bound: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Cut every row into equal items of at most ``bound`` blocks. An empty row is one empty item: it writes zeros."""
    counts = csr.counts.astype(np.int64)
    pieces = np.maximum(1, -(-counts // bound))
    row = np.repeat(np.arange(counts.size), pieces)
    piece = np.arange(row.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin, end = (counts[row] * step // pieces[row] for step in (piece, piece + 1))

    tail = np.concatenate([[0], np.cumsum(csr.partial)])[csr.pointers]
    num_full = counts - np.diff(tail)  # partial blocks are the last of their row
    full = np.clip(np.minimum(end, num_full[row]) - begin, 0, None)
    is_split = pieces[row] > 1
    slot = np.where(is_split, np.cumsum(is_split) - 1, -1)

    head, block = np.divmod(row, num_blocks)
    first = csr.pointers[row] + begin
    # Scratch is addressed per (batch, head): a head's slots start at zero again.
    base = np.full(int(head.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(base, head[is_split], slot[is_split])
    slot = np.where(is_split, slot - base[head], -1)
    items = np.stack([head, block, first, full, end - begin - full, slot], axis=1)
    longest_first = np.argsort(begin - end, kind="stable")

    starts = is_split & (piece == 0)
    splits = np.stack([head[starts], block[starts], slot[starts], pieces[row][starts]], axis=1)
    return items[longest_first].astype(np.int32), splits.astype(np.int32), int(slot.max(initial=-1)) + 1


def group_size(layout: BlockLayout, k: torch.Tensor, outer: int, l2_bytes: int = 24 * 2**20) -> int:
    """How many of the ``outer`` problems are in flight together, so that their keys and values stay in the L2 cache."""
    per_problem = 2 * k.numel() // outer * k.element_size()
    return max(1, min(outer, l2_bytes // per_problem))
