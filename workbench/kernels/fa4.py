"""The fa4 backend: FlashAttention-4's block-sparse path, where the package ``flash-attn-4`` is installed."""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from workbench.errors import Refused
from workbench.kernels.layout import BlockLayout, Csr


def is_installed() -> bool:
    """Whether ``flash_attn.cute`` can be imported."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def supports(layout: BlockLayout, head_dim: int) -> bool:
    """Whether a layout maps onto its block-sparse tensors: whole blocks of 128, head_dim 64 or 128."""
    return not layout.rows.partial.any() and layout.block_size == 128 and head_dim in (64, 128)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, scale: float, *, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp (natural logarithm)."""
    if not is_installed():
        raise Refused("the fa4 backend needs FlashAttention-4", fix="pip install --pre flash-attn-4")
    if not supports(layout, q.shape[-1]):
        raise Refused(
            f"{layout!r} with head_dim {q.shape[-1]} in the fa4 backend",
            allowed="uncut blocks of 128 (not causal, n a multiple of 128), head_dim 64 or 128",
        )
    if deterministic:
        raise Refused("a deterministic backward of the fa4 backend", fix="use backend='triton'")
    from flash_attn.cute.interface import flash_attn_func

    out, lse = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=scale,
        block_sparse_tensors=_tensors(layout, False, q.device),
        block_sparse_tensors_bwd=_tensors(layout, True, q.device),
        return_lse=True,
    )
    return out.transpose(1, 2), lse


@lru_cache(maxsize=64)
def _tensors(layout: BlockLayout, by_columns: bool, device: torch.device) -> Any:
    """Counts ``(1, heads, nb)`` and indices ``(1, heads, nb, longest row)`` of the full blocks; none are partial."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    counts, table = _padded(layout.columns if by_columns else layout.rows)
    shape = (1, layout.heads or 1, layout.num_blocks)
    full_counts = torch.from_numpy(counts).view(shape).to(device)
    full_indices = torch.from_numpy(table).view(*shape, -1).to(device)
    return BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(full_counts),
        mask_block_idx=torch.zeros_like(full_indices[..., :1]).contiguous(),
        full_block_cnt=full_counts,
        full_block_idx=full_indices,
        block_size=(layout.block_size, layout.block_size),
    )


def _padded(csr: Csr) -> tuple[np.ndarray, np.ndarray]:
    counts = csr.counts.astype(np.int32)
    row = np.repeat(np.arange(counts.size), counts)
    table = np.zeros((counts.size, max(1, int(counts.max()))), dtype=np.int32)
    table[row, np.arange(row.size) - csr.pointers[row]] = csr.indices
    return counts, table
