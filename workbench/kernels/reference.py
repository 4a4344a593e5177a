"""The reference backend: plain PyTorch over the live blocks only, in fp32 or better, differentiated by autograd."""

import torch

from workbench.kernels.layout import BlockLayout


@torch.compiler.disable  # its loop over rows would be unrolled into one operation per row
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output like ``q``, and the log-sum-exp ``(batch, heads, n)`` in fp32 (in fp64 for fp64 inputs)."""
    if layout.heads is None:
        return _attend_heads(q, k, v, layout, 0, scale)
    parts = [
        _attend_heads(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], layout, h, scale) for h in range(layout.heads)
    ]
    out, lse = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return out, lse


def _attend_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, head: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads that share one pattern, one row of blocks after the other."""
    size, n, nb = layout.block_size, layout.n, layout.num_blocks
    accumulate = torch.promote_types(q.dtype, torch.float32)
    within = torch.arange(size, device=q.device)
    pointers, indices = layout.rows.pointers, torch.from_numpy(layout.rows.indices).long().to(q.device)
    outs, lses = [], []
    for row in range(nb):
        query = torch.arange(row * size, min((row + 1) * size, n), device=q.device)
        columns = indices[pointers[head * nb + row] : pointers[head * nb + row + 1]]
        key = (columns[:, None] * size + within).flatten()
        key = key[key < n]
        scores = scale * q[:, :, row * size : (row + 1) * size].to(accumulate) @ k[:, :, key].to(accumulate).mT
        if layout.causal:
            scores = scores.masked_fill(key > query[:, None], float("-inf"))
        lse = scores.logsumexp(-1)  # −∞ where there is no key
        outs.append((scores - lse[..., None]).exp() @ v[:, :, key].to(accumulate))
        lses.append(lse)
    return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)
