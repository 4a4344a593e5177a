"""The dense backend: PyTorch's own attention, with the layout as a token mask unless every block is live."""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.errors import Refused
from workbench.kernels.layout import BlockLayout

LARGEST_MASKED = 16384  # tokens; the boolean mask then takes 256 MiB

# Below, PyTorch's fused attention with a mask now and then leaves NaN in the gradients: one token, H200, torch 2.11.
SMALLEST_FUSED = 8


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout, scale: float, *, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the log-sum-exp when asked for (which takes the full score matrix)."""
    if layout.is_full and not return_lse:
        return scaled_dot_product_attention(q, k, v, is_causal=layout.causal, scale=scale), None
    if layout.n > LARGEST_MASKED:
        raise Refused(
            "the dense backend's token mask for n",
            layout.n,
            allowed=f"up to {LARGEST_MASKED} tokens",
            fix="use backend='reference', 'flex' or 'triton'",
        )
    mask = layout.to_dense_mask().to(q.device)
    seen = mask.any(-1, keepdim=True)
    # A row without keys has no softmax: let it see everything, then set its output to zero.
    with sdpa_kernel(SDPBackend.MATH) if q.is_cuda and layout.n < SMALLEST_FUSED else contextlib.nullcontext():
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask | ~seen, scale=scale)
    out = out.masked_fill(~seen, 0)
    if not return_lse:
        return out, None
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    lse = scores.masked_fill(~(mask | ~seen), float("-inf")).logsumexp(-1)
    return out, lse.masked_fill(~seen[..., 0], float("-inf"))
