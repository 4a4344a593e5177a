"""Layouts chosen from the input: which key blocks matter to which query block, estimated from pooled q and k.

The estimate is softmax(scale · mean(q, block) · mean(k, block)ᵀ), averaged over the batch (as in MInference, Jiang et
al. 2024, and SeerAttention, Gao et al. 2024). It is of size nb × nb, not n × n. It is cheap, and it is only an
estimate: a single sharp key inside a dull block is averaged away.
"""

import math

import numpy as np
import torch

from workbench.errors import Refused
from workbench.kernels.layout import BlockLayout


@torch.no_grad()
def select_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    block_size: int = 128,
    *,
    mass: float | None = None,
    top_k: int | None = None,
    causal: bool = False,
    keep: BlockLayout | None = None,
) -> BlockLayout:
    """A per-head layout for ``q``, ``k`` of shape ``(batch, heads, n, head_dim)``.

    Args:
        mass: for each row keep the fewest blocks whose estimated probabilities sum to at least this, in (0, 1].
        top_k: or keep this many blocks per row. Exactly one of the two must be given.
        keep: blocks that stay live whatever the estimate says. The diagonal always does.
    """
    if (mass is None) == (top_k is None):
        raise Refused(f"mass={mass} with top_k={top_k}", allowed="exactly one of the two")
    if mass is not None and not 0 < mass <= 1:
        raise Refused("mass", mass, allowed="above 0, at most 1")
    if top_k is not None and top_k < 1:
        raise Refused("top_k", top_k, allowed="1 or more")
    if q.shape != k.shape or q.dim() != 4:
        raise Refused(f"shapes of q {tuple(q.shape)} and k {tuple(k.shape)}", allowed="equal, with four dimensions")
    heads, n, d = q.shape[1:]
    nb = -(-n // block_size)
    scores = _pool(q, block_size) @ _pool(k, block_size).transpose(-1, -2) / math.sqrt(d)
    if causal:
        scores = scores.masked_fill(torch.ones(nb, nb, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    sorted_p, order = scores.softmax(-1).mean(0).sort(-1, descending=True)  # (heads, nb, nb)
    if mass is not None:
        chosen = sorted_p.cumsum(-1) - sorted_p < mass
    else:
        chosen = torch.arange(nb, device=q.device).expand_as(sorted_p) < (top_k or 0)
    live = torch.zeros_like(chosen).scatter_(-1, order, chosen)
    live |= torch.eye(nb, dtype=torch.bool, device=q.device)
    head, row, col = np.nonzero(live.cpu().numpy())
    layout = BlockLayout.from_pairs(n, block_size, row, col, head_of_pair=head, heads=heads, causal=causal)
    return layout if keep is None else layout.union(keep)


def _pool(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Mean over each block, in fp32: ``(batch, heads, nb, head_dim)``; the last block may be shorter."""
    n = x.shape[2]
    whole = n // block_size * block_size
    pooled = x[:, :, :whole].unflatten(2, (-1, block_size)).mean(3, dtype=torch.float32)
    if whole == n:
        return pooled
    return torch.cat([pooled, x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32)], dim=2)


class AdaptiveLayout:
    """A layout that is chosen anew every ``refresh_every`` calls: ``layout = adaptive(q, k)``.

    Choosing copies nb² booleans to the host and so waits for the device; between refreshes a call costs nothing.
    """

    def __init__(
        self,
        block_size: int = 128,
        *,
        mass: float | None = None,
        top_k: int | None = None,
        causal: bool = False,
        keep: BlockLayout | None = None,
        refresh_every: int = 100,
    ) -> None:
        if refresh_every < 1:
            raise Refused("refresh_every", refresh_every, allowed="1 or more")
        self.block_size, self.mass, self.top_k, self.causal, self.keep = block_size, mass, top_k, causal, keep
        self.refresh_every = refresh_every
        self.calls = 0
        self.layout: BlockLayout | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> BlockLayout:
        stale = self.layout is None or self.layout.n != q.shape[2] or self.calls % self.refresh_every == 0
        if stale:
            self.layout = select_blocks(
                q, k, self.block_size, mass=self.mass, top_k=self.top_k, causal=self.causal, keep=self.keep
            )
        self.calls += 1
        assert self.layout is not None
        return self.layout
