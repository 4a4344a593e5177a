"""Attention functions that a ViT can be built with, by name.

Each maps queries, keys and values of shape (batch, heads, tokens, head_dim) to an output of that shape. Scores are
scaled by head_dim ** -0.5.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.errors import Refused, nearest

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
    """Softmax attention that writes the (tokens × tokens) scores to memory: what fused kernels are measured against."""
    scores_BHNN = q_BHND @ k_BHND.transpose(-2, -1) * q_BHND.shape[-1] ** -0.5
    return torch.softmax(scores_BHNN, dim=-1) @ v_BHND


def sdpa(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
    """PyTorch's fused attention; the scores never reach memory where a flash kernel exists."""
    return F.scaled_dot_product_attention(q_BHND, k_BHND, v_BHND)


ATTENTION: dict[str, AttentionFunction] = {"eager": eager, "sdpa": sdpa}


def attention_function(name: str) -> AttentionFunction:
    if name not in ATTENTION:
        raise Refused("attention", name, allowed="a registered function", fix=nearest(name, ATTENTION))
    return ATTENTION[name]
