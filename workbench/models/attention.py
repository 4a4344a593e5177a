"""Attention functions that a ViT can be built with, by name.

Each maps queries, keys and values of shape (batch, heads, tokens, head_dim) to an output of that shape. Scores are
scaled by head_dim ** -0.5.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.errors import Refused, nearest
from workbench.kernels import layouts
from workbench.kernels.adapters import ADAPTIVE, PATTERNS, pattern_attention
from workbench.models.config import VitConfig

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
    """Softmax attention that writes the (tokens × tokens) scores to memory: what fused kernels are measured against."""
    scores_BHNN = q_BHND @ k_BHND.transpose(-2, -1) * q_BHND.shape[-1] ** -0.5
    return torch.softmax(scores_BHNN, dim=-1) @ v_BHND


def sdpa(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
    """PyTorch's fused attention; the scores never reach memory where a flash kernel exists."""
    return F.scaled_dot_product_attention(q_BHND, k_BHND, v_BHND)


ATTENTION: dict[str, AttentionFunction] = {"eager": eager, "sdpa": sdpa}


IN_TILES = ("grid_2d", "dilated_2d")
"""Patterns that expect patches tile by tile and the other tokens after them."""


def attention_function(name: str, **options: Any) -> AttentionFunction:
    """The function of a name; ``options`` are a block pattern's.

    Raises:
        Refused: an unknown name, or options of something that is no pattern.
    """
    if name in PATTERNS or name == ADAPTIVE:
        return pattern_attention(name, **options)
    if name not in ATTENTION:
        known = [*ATTENTION, *PATTERNS, ADAPTIVE]
        raise Refused("attention", name, allowed="a registered function or a pattern", fix=nearest(name, known))
    if options:
        raise Refused(f"attention_args with attention={name!r}", options, allowed="none: they belong to block patterns")
    return ATTENTION[name]


def attention_of(config: VitConfig) -> AttentionFunction:
    """The function for one layer of a ViT: an adaptive one keeps that layer's choice."""
    image: dict[str, int] = {}
    if config.attention in IN_TILES:
        side = config.image_size // config.patch_size
        image = {"height": side, "width": side, "special_tokens": 1 + config.registers}
    return attention_function(config.attention, **{**config.attention_args, **image})


def token_order(config: VitConfig) -> Tensor | None:
    """Where a ViT's tokens (class token, patches row by row, registers) go for its pattern; ``None`` leaves them in place."""
    if config.attention not in IN_TILES:
        return None
    side = config.image_size // config.patch_size
    tiles = {name: value for name, value in config.attention_args.items() if name in ("block_size", "tile")}
    order = torch.from_numpy(layouts.tile_order(side, side, special_tokens=1, **tiles))
    return torch.cat([order, torch.arange(config.num_patches + 1, config.num_tokens)])
