"""One line each to put block-sparse attention into our ViT, into transformers and into timm.

VitConfig(attention="window_global", attention_args={"radius": 2})      # nothing to register for our own patterns

register_vit("mine", layout_attention(my_layout))                       # VitConfig(attention="mine")

register_transformers("window", layouts.window_global(4096))            # attn_implementation="window"

register_timm("window", layouts.window_global(4096))                    # VisionTransformer(attn_layer="window")
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from workbench.errors import Refused, nearest
from workbench.kernels import layouts
from workbench.kernels.adaptive import AdaptiveLayout
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.layout import BlockLayout

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PATTERNS: dict[str, Callable[..., BlockLayout]] = {
    f.__name__: f
    for f in (layouts.local, layouts.strided, layouts.fixed, layouts.window_global, layouts.grid_2d, layouts.dilated_2d,
              layouts.random, layouts.causal, layouts.full)
}  # fmt: skip
ADAPTIVE = "adaptive"


class BlockSparseAttention:
    """``fn(q, k, v) -> out`` on ``(batch, heads, tokens, head_dim)``, over the blocks that ``layout_of(q, k)`` says."""

    def __init__(self, layout_of: Callable[[torch.Tensor, torch.Tensor], BlockLayout], backend: str = "auto") -> None:
        self.layout_of, self.backend = layout_of, backend

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = block_sparse_attention(q, k, v, self.layout_of(q, k), backend=self.backend)
        assert isinstance(out, torch.Tensor)
        return out


def layout_attention(layout: BlockLayout, backend: str = "auto") -> BlockSparseAttention:
    """Attention over a fixed layout."""
    return BlockSparseAttention(lambda q, k: layout, backend)


def pattern_attention(
    pattern: str, block_size: int = 128, backend: str = "auto", **options: Any
) -> BlockSparseAttention:
    """Attention over a layout that is built, once, for each number of tokens that comes.

    Args:
        pattern: a builder of :mod:`workbench.kernels.layouts`, by name, with ``options`` as its arguments; or ``adaptive``,
            with those of :class:`workbench.kernels.adaptive.AdaptiveLayout`, whose choice belongs to one layer of a model.
    """
    if pattern == ADAPTIVE:
        return BlockSparseAttention(AdaptiveLayout(block_size, **options), backend)
    if pattern not in PATTERNS:
        raise Refused("attention pattern", pattern, allowed=nearest(pattern, [*PATTERNS, ADAPTIVE]))
    accepted = list(inspect.signature(PATTERNS[pattern]).parameters)[2:]
    for option in options:
        if option not in accepted:
            raise Refused(f"option of the {pattern} pattern", option, allowed=nearest(option, accepted))
    frozen = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in sorted(options.items()))
    return BlockSparseAttention(lambda q, k: _built(pattern, q.shape[2], block_size, frozen), backend)


@cache
def _built(pattern: str, n: int, block_size: int, options: tuple[tuple[str, Any], ...]) -> BlockLayout:
    """One layout for all layers: what is worked out for it, transpose and work lists, is theirs together."""
    return PATTERNS[pattern](n, block_size, **dict(options))


def register_vit(name: str, function: AttentionFunction) -> None:
    """Make ``attention=name`` available to our ViT's configuration."""
    from workbench.models.attention import ATTENTION

    ATTENTION[name] = function


def register_transformers(name: str, layout: BlockLayout, backend: str = "auto") -> None:
    """Make ``attn_implementation=name`` available to transformers models.

    The mask interface is registered too: without it a mask would be dropped in silence. With it, one that hides tokens
    is refused, since a layout has no place for it; and no mask of n × n is made.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    attention = layout_attention(layout, backend)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if dropout:
            raise Refused("attention dropout", dropout, allowed="0: block-sparse attention has none")
        causal = bool(kwargs.get("is_causal") or getattr(module, "is_causal", False))
        if causal and not layout.causal:
            raise Refused(f"a causal model with {layout!r}", fix="intersect the layout with layouts.causal(n)")
        if attention_mask is not None:
            _refuse_padding(attention_mask=attention_mask)
        scale = query.shape[-1] ** -0.5
        if scaling is not None and scaling != scale:
            query = query * (scaling / scale)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return attention(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _refuse_padding)


def _refuse_padding(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """A mask function in transformers' sense: no mask, and none that would have hidden a token."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Refused("an attention mask that hides tokens", fix="build it into the layout, and do not pad")


def register_timm(name: str, layout: BlockLayout, backend: str = "auto") -> type[torch.nn.Module]:
    """Make ``attn_layer=name`` available to timm's vision transformers (timm ≥ 1.0.31), and return the module class.

    The module keeps the parameter names of timm's own attention, so pretrained weights load.
    """
    from timm.layers.attention import Attention
    from timm.models import vision_transformer

    attention = layout_attention(layout, backend)

    class TimmAttention(Attention):
        def forward(
            self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
        ) -> torch.Tensor:
            if attn_mask is not None or is_causal != layout.causal or self.attn_drop.p or self.gate is not None:
                raise Refused("a mask, other causality than the layout's, attention dropout or a gate", fix="use none")
            b, n, _ = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            out = attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2)
            return self.proj_drop(self.proj(self.norm(out)))

    registry = getattr(vision_transformer, "ATTN_LAYERS", None)
    if registry is None:
        raise Refused("timm without a registry of attention layers", fix="pip install 'timm>=1.0.31'")
    registry[name] = TimmAttention
    return TimmAttention
