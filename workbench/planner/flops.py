"""The operators of a ViT's training step: the FLOPs each does and the values it moves, forward and backward.

Symbols: b batch, n tokens, d width, f MLP width, h heads, t = b·n. A matrix product of (m × k) by (k × p) counts 2·m·k·p
operations; its backward pass is two products of the same size.
"""

from typing import Literal, NamedTuple

from workbench.models.config import VitConfig
from workbench.planner.attention import density

Kernel = Literal["matrix", "attention", "pointwise", "cast"]


class Operator(NamedTuple):
    """One kind of operator, all its calls in a forward pass together.

    Attributes:
        kernel: ``matrix`` and ``attention`` run on matrix units, ``pointwise`` and the ``cast`` of autocast do not.
        flops, backward_flops: operations.
        half, backward_half: elements read and written in the autocast dtype.
        full, backward_full: elements read and written in fp32 whatever the precision.
        calls: launches of the forward pass.
    """

    name: str
    kernel: Kernel
    flops: float = 0.0
    half: float = 0.0
    full: float = 0.0
    backward_flops: float = 0.0
    backward_half: float = 0.0
    backward_full: float = 0.0
    calls: int = 1

    def times(self, count: int) -> "Operator":
        """``count`` of it."""
        return Operator(
            self.name,
            self.kernel,
            flops=count * self.flops,
            half=count * self.half,
            full=count * self.full,
            backward_flops=count * self.backward_flops,
            backward_half=count * self.backward_half,
            backward_full=count * self.backward_full,
            calls=count * self.calls,
        )


def operators(vit: VitConfig, batch: int, *, autocast: bool = False, fp8: bool = False) -> list[Operator]:
    """Operators of one forward and backward pass of ``batch`` images.

    With ``autocast`` the conversions that it inserts are operators too: every weight and bias once a forward pass, the fp32
    outputs of norms on their way into a linear layer, the stream's gradient on its way into a branch. With ``fp8`` so is what
    finds each tensor's scale and applies it, pass by pass as the trainer does.
    """
    b, d, f = batch, vit.width, vit.mlp_width
    t = b * vit.num_tokens
    pixels = vit.in_channels * vit.patch_size**2
    layer = [
        _norm("norm", t * d).times(2),
        _linear("qkv", t, d, 3 * d),
        *_attention(vit, b, autocast),
        _linear("proj", t, d, d),
        _linear("fc1", t, d, f),
        Operator("gelu", "pointwise", 8 * t * f, half=2 * t * f, backward_half=3 * t * f),
        _linear("fc2", t, f, d),
        # The stream and the branch in, the stream out. Backward: two gradients are added into one.
        Operator("residual", "pointwise", t * d, half=t * d, full=2 * t * d, backward_full=3 * t * d).times(2),
        Operator("bias gradients", "pointwise", backward_half=t * (5 * d + f), calls=0),
        Operator("qkv gradient", "pointwise", backward_half=6 * t * d, calls=0),
    ]
    if vit.qk_norm:
        layer.append(_norm("qk norm", t * d).times(2))
    if autocast:
        layer.append(_cast("weight casts", 4 * d * d + 2 * d * f + 5 * d + f)._replace(calls=8))
        layer.append(_cast("activation casts", t * d).times(6 if vit.qk_norm else 2))
        layer.append(
            Operator("branch gradient casts", "cast", backward_half=2 * t * d, backward_full=2 * t * d, calls=0)
        )
    if fp8:
        layer.append(_quantisation(t * (3 * d + f) + 4 * d * d + 2 * d * f, t * (5 * d + f)))
    outside = [_cast("outer casts", pixels * d + d * vit.num_classes + t * d)._replace(calls=6)] if autocast else []
    embedding = _linear("patch embedding", b * vit.num_patches, pixels, d)
    return [
        # No gradient of the images is needed: one product backward instead of two.
        embedding._replace(backward_flops=embedding.flops, backward_half=embedding.half),
        Operator("embed", "pointwise", t * d, half=t * d, full=4 * t * d, backward_full=3 * t * d, calls=3),
        *(o.times(vit.depth) for o in layer),
        _norm("final norm", t * d),
        _linear("head", b, d, vit.num_classes),
        Operator("loss", "pointwise", full=3 * b * vit.num_classes, backward_full=3 * b * vit.num_classes, calls=2),
        *outside,
    ]


def forward_flops(vit: VitConfig, batch: int = 1) -> float:
    """Matrix FLOPs of one forward pass; pointwise ones are left out, as is usual for MFU."""
    return sum(o.flops for o in operators(vit, batch) if o.kernel in ("matrix", "attention"))


def model_flops(vit: VitConfig, batch: int = 1) -> float:
    """FLOPs that a training step needs: forward and backward, 3 × the forward, without recomputation.

    That of a flash kernel's scores is recomputation too. The patch embedding's backward is one product instead of two.
    """
    return 3 * forward_flops(vit, batch) - operators(vit, batch)[0].flops


def _linear(name: str, rows: int, inputs: int, outputs: int) -> Operator:
    flops, values = 2 * rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs
    return Operator(name, "matrix", flops, half=values, backward_flops=2 * flops, backward_half=2 * values)


def _norm(name: str, size: int) -> Operator:
    """Reads the stream, writes its normalisation. Backward: reads gradient and input for the input's and for the weights'."""
    return Operator(name, "pointwise", 8 * size, full=2 * size, backward_flops=16 * size, backward_full=5 * size)


def _cast(name: str, size: int) -> Operator:
    return Operator(name, "cast", half=size, full=size, backward_half=size, backward_full=size)


def _quantisation(factors: int, gradients: int) -> Operator:
    """Absolute values, their largest, then in fp32 divided and clamped: 4 reads and writes in half precision, 6 in fp32.

    Forward of every linear layer's input and weight, backward of its output's gradient.
    """
    values = {"half": 4 * factors, "full": 6 * factors, "backward_half": 4 * gradients, "backward_full": 6 * gradients}
    return Operator("fp8 quantisation", "pointwise", calls=4 * 2 * 5, **values)


def _attention(vit: VitConfig, batch: int, autocast: bool) -> list[Operator]:
    """Scores and weighted sum: 2·b·n²·d each, and copies of what lies in another layout than the kernel wants.

    Of a block pattern only the live share of the scores is computed.

    Eager attention writes b·h·n² scores and reads them back, to scale, to normalise and to weight; autocast has softmax in
    fp32, with a conversion before and after. A fused kernel writes no scores, but computes them once more in the backward: five
    products for the forward's two (Dao et al. 2022).
    """
    n, d = vit.num_tokens, vit.width
    live = density(vit.attention, n, **vit.attention_args)
    flops, streams = 4 * batch * n * n * d * live, 4 * batch * n * d
    layout = Operator("layout copies", "pointwise", half=streams / 2, backward_half=streams / 2)
    if vit.attention != "eager":
        fused = Operator("attention", "attention", flops, half=streams)
        return [fused._replace(backward_flops=2.5 * flops, backward_half=2 * streams), layout]
    scores = batch * vit.heads * n * n
    products = Operator("attention products", "matrix", flops, half=streams + 2 * scores, calls=2)
    scale = Operator("scale", "pointwise", scores, half=2 * scores, backward_half=2 * scores)
    softmax = Operator("softmax", "pointwise", 5 * scores, half=2 * scores, backward_half=3 * scores)
    if autocast:
        softmax = softmax._replace(half=0, backward_half=0, full=2 * scores, backward_full=3 * scores)
    return [
        products._replace(backward_flops=2 * flops, backward_half=2 * products.half),
        scale,
        softmax,
        *([_cast("softmax casts", scores).times(2)] if autocast else []),
        layout.times(2),
    ]
