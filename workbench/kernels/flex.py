"""The flex backend: PyTorch's FlexAttention, its BlockMask made from the CSR layout.

FlexAttention keeps index tables of nb × nb entries, where CSR has nb + nnz. It has no backward on the CPU.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from workbench.errors import Refused
from workbench.kernels.layout import BlockLayout


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp (natural logarithm)."""
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise Refused("FlexAttention has no backward on the CPU", fix="use backend='reference'")
    mask = block_mask(layout, q.device)
    run: Any = _compiled() if q.device.type == "cuda" else flex_attention
    out, aux = run(q, k, v, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def block_mask(layout: BlockLayout, device: torch.device) -> BlockMask:
    """The same pattern as FlexAttention wants it, full and partial blocks apart."""
    nb, heads = layout.num_blocks, layout.heads or 1
    row = np.repeat(np.arange(heads * nb), layout.rows.counts)
    tables = []
    for wanted in (layout.rows.partial, ~layout.rows.partial):
        rows, cols = row[wanted], layout.rows.indices[wanted]
        counts = np.bincount(rows, minlength=heads * nb)
        place = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.zeros((heads * nb, nb), dtype=np.int32)
        table[rows, place] = cols
        tables += [
            torch.from_numpy(counts.astype(np.int32)).view(1, heads, nb).to(device),
            torch.from_numpy(table).view(1, heads, nb, nb).to(device),
        ]
    partial_counts, partial_table, full_counts, full_table = tables
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_table,
        full_counts,
        full_table,
        BLOCK_SIZE=layout.block_size,
        mask_mod=_token_mask(layout) if device.type == "cpu" else _causal if layout.causal else None,
        seq_lengths=(layout.n, layout.n),
    )


def _token_mask(layout: BlockLayout) -> Callable[..., torch.Tensor]:
    """The whole pattern as a function of tokens: uncompiled, FlexAttention looks at nothing else."""
    nb, size, shared = layout.num_blocks, layout.block_size, layout.heads is None
    live = torch.zeros((layout.heads or 1) * nb, nb, dtype=torch.bool)
    row = np.repeat(np.arange(len(live)), layout.rows.counts)
    live[torch.from_numpy(row), torch.from_numpy(layout.rows.indices).long()] = True

    def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block = live[(0 if shared else h * nb) + query // size, key // size]
        return block & (query >= key) if layout.causal else block

    return visible


def _causal(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key
