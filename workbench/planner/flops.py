"""The operators of one ViT forward pass: the FLOPs each does, the values it moves, and what its backward pass costs.

Symbols: b batch, n tokens, d width, f MLP width, h heads, t = b·n. A matrix product of (m × k) by (k × p) counts 2·m·k·p
operations; its backward pass is two products of the same size.
"""

from typing import Literal, NamedTuple

from workbench.models.config import VitConfig

Kernel = Literal["matrix", "attention", "pointwise"]


class Operator(NamedTuple):
    """One kind of operator, all its calls in a forward pass together.

    Attributes:
        kernel: ``matrix`` and ``attention`` run on matrix units, ``pointwise`` does not.
        flops: of the forward pass.
        half: elements read and written in the autocast dtype.
        full: elements read and written in fp32 whatever the precision.
        calls: launches.
        backward_flops, backward_traffic: the backward pass's share, as a multiple of the forward's.
    """

    name: str
    kernel: Kernel
    flops: float
    half: float
    full: float
    calls: int = 1
    backward_flops: float = 2.0
    backward_traffic: float = 2.0

    def times(self, count: int) -> "Operator":
        """``count`` of it."""
        return self._replace(
            flops=self.flops * count, half=self.half * count, full=self.full * count, calls=self.calls * count
        )


def forward_operators(vit: VitConfig, batch: int, *, autocast: bool = False) -> list[Operator]:
    """Operators of one forward pass of ``batch`` images.

    With ``autocast`` the conversions that it inserts are operators too: every weight and bias once a forward pass, and the
    fp32 outputs of the norms on their way into a linear layer.
    """
    b, d, f = batch, vit.width, vit.mlp_width
    t = b * vit.num_tokens
    pixels = vit.in_channels * vit.patch_size**2
    layer = [
        _norm("norm", t * d).times(2),
        _linear("qkv", t, d, 3 * d),
        *_attention(vit, b),
        _linear("proj", t, d, d),
        _linear("fc1", t, d, f),
        Operator("gelu", "pointwise", 8 * t * f, 2 * t * f, 0, backward_traffic=1.5),
        _linear("fc2", t, f, d),
        # Each value: the stream and the branch in, the stream out. Backward: two gradients are added into one.
        Operator("residual", "pointwise", t * d, t * d, 2 * t * d, backward_traffic=1.0).times(2),
    ]
    if vit.qk_norm:
        layer.append(_norm("qk norm", t * d).times(2))
    if autocast:
        layer.append(_cast("input casts", t * d).times(2))
        layer.append(_cast("weight casts", 4 * d * d + 2 * d * f + 5 * d + f)._replace(calls=8))
    outside = [_cast("outer casts", pixels * d + d * vit.num_classes + t * d)._replace(calls=6)] if autocast else []
    return [
        _linear("patch embedding", b * vit.num_patches, pixels, d),
        Operator("embed", "pointwise", t * d, t * d, 4 * t * d, calls=3, backward_traffic=1.0),
        *(o.times(vit.depth) for o in layer),
        _norm("final norm", t * d),
        _linear("head", b, d, vit.num_classes),
        Operator("loss", "pointwise", 5 * b * vit.num_classes, 0, 3 * b * vit.num_classes, calls=2),
        *outside,
    ]


def forward_flops(vit: VitConfig, batch: int = 1) -> float:
    """Matrix FLOPs of one forward pass; pointwise ones are left out, as is usual for MFU."""
    return sum(o.flops for o in forward_operators(vit, batch) if o.kernel != "pointwise")


def model_flops(vit: VitConfig, batch: int = 1) -> float:
    """FLOPs that a training step needs: forward and backward, 3 × the forward, without recomputation.

    That of flash attention's scores is recomputation too. The patch embedding needs no gradient of its input, so its
    backward is one product instead of two.
    """
    embedding = forward_operators(vit, batch)[0].flops
    return 3 * forward_flops(vit, batch) - embedding


def _linear(name: str, rows: int, inputs: int, outputs: int) -> Operator:
    return Operator(name, "matrix", 2 * rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs, 0)


def _norm(name: str, size: int) -> Operator:
    """Reads the stream, writes its normalisation. Backward: reads gradient and input, twice, for input and weights."""
    return Operator(name, "pointwise", 8 * size, 0, 2 * size, backward_traffic=2.5)


def _cast(name: str, size: int) -> Operator:
    return Operator(name, "pointwise", 0, size, size, backward_traffic=1.0)


def _attention(vit: VitConfig, batch: int) -> list[Operator]:
    """Scores and weighted sum: 2·b·n²·d each.

    Eager attention writes b·h·n² scores and reads them back, to scale, to normalise and to weight. A fused kernel does not,
    but computes them once more in the backward: five products for the forward's two (Dao et al. 2022).
    """
    n, d = vit.num_tokens, vit.width
    flops = 4 * batch * n * n * d
    streams = 4 * batch * n * d
    scores = batch * vit.heads * n * n
    if vit.attention == "eager":
        return [
            Operator("attention products", "matrix", flops, streams + 2 * scores, 0, calls=2),
            Operator("scale and softmax", "pointwise", 6 * scores, 4 * scores, 0, calls=2, backward_traffic=1.25),
        ]
    return [Operator("attention", "attention", flops, streams, 0, backward_flops=2.5)]
