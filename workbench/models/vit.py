"""A pre-norm vision transformer (Dosovitskiy et al. 2021) for one device.

Shape suffixes: B batch, C channels, H W image, N tokens, D width, h heads, d head_dim, K classes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.errors import Refused
from workbench.models.attention import AttentionFunction, attention_of, token_order
from workbench.models.config import VitConfig


class Attention(nn.Module):
    """Multi-head self-attention with a pluggable kernel and optional QK-norm."""

    def __init__(self, config: VitConfig, kernel: AttentionFunction) -> None:
        super().__init__()
        self.heads, self.kernel = config.heads, kernel
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.q_norm = nn.LayerNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BND: Tensor) -> Tensor:
        B, N, _ = x_BND.shape
        q_BhNd, k_BhNd, v_BhNd = self.qkv(x_BND).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q_BhNd, k_BhNd = self.q_norm(q_BhNd).type_as(v_BhNd), self.k_norm(k_BhNd).type_as(v_BhNd)
        o_BhNd = self.kernel(q_BhNd, k_BhNd, v_BhNd)
        # Not x's width: tensor parallelism leaves this rank some of the heads.
        return self.proj(o_BhNd.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BND), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, config: VitConfig, kernel: AttentionFunction) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config, kernel)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = x_BND + self.attn(self.norm1(x_BND))
        return x_BND + self.mlp(self.norm2(x_BND))


class VisionTransformer(nn.Module):
    """Images (B, C, H, W) to logits (B, K), read off the class token.

    Args:
        attention: a function of q, k and v instead of the one that ``config.attention`` names.

    Raises:
        Refused: images of another size or number of channels than the configuration's.
    """

    order: Tensor | None

    def __init__(self, config: VitConfig, attention: AttentionFunction | None = None) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Conv2d(config.in_channels, config.width, config.patch_size, config.patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.register_tokens = (
            nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        )
        self.pos_embed = nn.Parameter(torch.empty(1, config.num_patches + 1, config.width))
        self.blocks = nn.ModuleList(Block(config, attention or attention_of(config)) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_classes)
        order = None if attention else token_order(config)
        self.register_buffer("order", order, persistent=False)
        self.class_position = 0 if order is None else config.num_patches
        self.reset_parameters()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        self._check(x_BCHW)
        x_BND = self.patch_embed(x_BCHW).flatten(2).transpose(1, 2)
        x_BND = torch.cat([self.cls_token.expand(len(x_BND), -1, -1).type_as(x_BND), x_BND], dim=1)
        x_BND = x_BND + self.pos_embed
        if self.register_tokens is not None:
            # Registers carry no position: they come after the position embedding.
            x_BND = torch.cat([x_BND, self.register_tokens.expand(len(x_BND), -1, -1).type_as(x_BND)], dim=1)
        if self.order is not None:
            x_BND = x_BND[:, self.order]
        for block in self.blocks:
            x_BND = block(x_BND)
        return self.head(self.norm(x_BND[:, self.class_position]))

    def _check(self, x_BCHW: Tensor) -> None:
        """A convolution would drop the pixels that fill no patch, in silence."""
        size, config = self.config.image_size, self.config
        if x_BCHW.shape[1:] != (config.in_channels, size, size):
            raise Refused(
                "images of shape (C, H, W)",
                tuple(x_BCHW.shape[1:]),
                allowed=f"({config.in_channels}, {size}, {size})",
                fix="build the model with the data's in_channels and image_size",
            )

    def reset_parameters(self) -> None:
        """The original's initialisation, which suits every width: Xavier for linear layers, fan-in for patches, zero head.

        A fixed standard deviation of 0.02, common for large models, leaves a narrow one almost without attention.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.patch_embed.weight, std=self.patch_embed.weight[0].numel() ** -0.5)
        assert self.patch_embed.bias is not None
        nn.init.zeros_(self.patch_embed.bias)
        for embedding in (self.cls_token, self.register_tokens, self.pos_embed):
            if embedding is not None:
                nn.init.trunc_normal_(embedding, std=0.02)
        nn.init.zeros_(self.head.weight)
