"""The operators of one ViT forward pass: how many FLOPs each does and how many values it moves.

Symbols: b batch, n tokens, d width, h heads, f MLP width, L depth, s patches. A matrix product of (m × k) by (k × p) counts
2·m·k·p operations. The backward pass of a matrix product is two products of the same size, so twice the forward's.
"""

from typing import NamedTuple

from workbench.models.config import VitConfig


class Operator(NamedTuple):
    """One kind of operator in the forward pass.

    Attributes:
        flops: of all calls together.
        values: read plus written by all calls together, counted in tensor elements.
        calls: how many times it is launched.
        matrix: whether matrix units do it, in the autocast dtype.
        casts: elements of weights and inputs that autocast converts for it.
    """

    name: str
    flops: float
    values: float
    calls: int
    matrix: bool
    casts: float = 0.0


def forward_operators(vit: VitConfig, batch: int) -> list[Operator]:
    """Operators of one forward pass of ``batch`` images."""
    b, n, d, f, depth = batch, vit.num_tokens, vit.width, vit.mlp_width, vit.depth
    tokens = b * n
    pixels = vit.in_channels * vit.patch_size**2
    layers = [
        _linear("qkv", tokens, d, 3 * d),
        *_attention(vit, b),
        _linear("proj", tokens, d, d),
        _linear("fc1", tokens, d, f),
        Operator("gelu", 8 * tokens * f, 2 * tokens * f, 1, False),
        _linear("fc2", tokens, f, d),
        Operator("norm", 2 * 8 * tokens * d, 2 * 2 * tokens * d, 2, False),
        Operator("residual", 2 * tokens * d, 2 * 3 * tokens * d, 2, False),
    ]
    if vit.qk_norm:
        layers.append(Operator("qk norm", 2 * 8 * tokens * d, 2 * 2 * tokens * d, 2, False))
    repeated = [
        o._replace(flops=o.flops * depth, values=o.values * depth, calls=o.calls * depth, casts=o.casts * depth)
        for o in layers
    ]
    return [
        _linear("patch embedding", b * vit.num_patches, pixels, d),
        Operator("embed", tokens * d, 3 * tokens * d, 3, False),
        *repeated,
        Operator("final norm", 8 * tokens * d, 2 * tokens * d, 1, False),
        _linear("head", b, d, vit.num_classes),
        Operator("loss", 5 * b * vit.num_classes, 3 * b * vit.num_classes, 2, False),
    ]


def forward_flops(vit: VitConfig, batch: int = 1) -> float:
    """Matrix FLOPs of one forward pass; the elementwise ones are left out, as is usual for MFU."""
    return sum(o.flops for o in forward_operators(vit, batch) if o.matrix)


def model_flops(vit: VitConfig, batch: int = 1) -> float:
    """FLOPs that a training step needs: forward and backward, 3 × the forward, without recomputation.

    The patch embedding needs no gradient of its input, so its backward is one product instead of two.
    """
    embedding = forward_operators(vit, batch)[0].flops
    return 3 * forward_flops(vit, batch) - embedding


def _linear(name: str, rows: int, inputs: int, outputs: int) -> Operator:
    values = rows * (inputs + outputs) + inputs * outputs
    return Operator(name, 2 * rows * inputs * outputs, values, 1, True, casts=inputs * outputs + rows * inputs)


def _attention(vit: VitConfig, batch: int) -> list[Operator]:
    """Scores and weighted sum, 2·b·n²·d each. Eager attention also writes b·h·n² scores and reads them back, four times over.

    Scores are b·h·n² values whatever the model's parameter count is: no formula for attention memory has parameters in it.
    """
    n, d = vit.num_tokens, vit.width
    flops = 4 * batch * n * n * d
    streams = 4 * batch * n * d
    scores = batch * vit.heads * n * n
    if vit.attention == "eager":
        products = Operator("attention products", flops, streams + 2 * scores, 2, True)
        return [products, Operator("softmax", 5 * scores, 4 * scores, 2, False)]
    return [Operator("attention", flops, streams, 1, True)]
