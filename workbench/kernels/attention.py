"""Block-sparse attention behind one function; the backends live in files of their own.

from workbench.kernels import layouts
from workbench.kernels.attention import block_sparse_attention

layout = layouts.window_global(65536)
out = block_sparse_attention(q, k, v, layout)        # q, k, v: (batch, heads, tokens, head_dim)
"""

import math
from importlib.util import find_spec

import torch

from workbench.errors import Refused, nearest
from workbench.kernels.choice import backend_name
from workbench.kernels.layout import BlockLayout

BACKENDS = ("reference", "dense", "flex", "fa4", "triton")


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q kᵀ, over the live blocks of ``layout``) v.

    Args:
        q, k, v: ``(batch, heads, n, head_dim)``, one shape, dtype and device. Under autocast they are cast as for dense
            attention, to the autocast dtype.
        layout: the live blocks, for ``n`` tokens; a per-head layout must have ``heads`` patterns.
        scale: positive; 1/√head_dim by default.
        return_lse: also return the log-sum-exp of each row, ``(batch, heads, n)``, natural logarithm, at least fp32.
        backend: one of :data:`BACKENDS`, or ``"auto"``: what was fastest on this device
            (:func:`workbench.kernels.choice.choose` says which, and why).
        deterministic: forbid sums in varying order in the backward pass.

    Returns:
        The output, like ``q``. A query that sees no key gets 0, a log-sum-exp of −∞, and zero gradient.

    Raises:
        Refused: (a ValueError) shapes, dtypes, devices or a layout that do not fit, or a backend that cannot do it.
    """
    q, k, v = _as_autocast(q, k, v)
    _check(q, k, v, layout)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not (scale > 0 and math.isfinite(scale)):
        raise Refused("attention scale", scale, allowed="a positive number")
    name = backend
    if backend == "auto":
        name = backend_name(str(q.device), q.dtype, q.shape[-1], layout.handle, deterministic or return_lse)
    out, lse = _run(name, q, k, v, layout, scale, return_lse, deterministic)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _run(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    scale: float,
    return_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Imports a backend when it is first used: each needs something that not every machine has."""
    if name == "reference":
        from workbench.kernels import reference

        return reference.attend(q, k, v, layout, scale)
    if name == "dense":
        from workbench.kernels import dense

        return dense.attend(q, k, v, layout, scale, return_lse=return_lse)
    if name == "flex":
        from workbench.kernels import flex

        return flex.attend(q, k, v, layout, scale)
    if name == "fa4":
        from workbench.kernels import fa4

        return fa4.attend(q, k, v, layout, scale, deterministic=deterministic)
    if name == "triton":
        if find_spec("triton") is None:
            raise Refused("the triton backend needs Triton", fix="pip install -e '.[gpu]'")
        from workbench.kernels import triton_op

        return triton_op.attend(q, k, v, layout, scale, deterministic=deterministic)
    raise Refused("attention backend", name, allowed=nearest(name, ("auto", *BACKENDS)))


def _as_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As autocast casts scaled_dot_product_attention. (An operator's own autocast rule would fix one dtype.)"""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout) -> None:
    if q.dim() != 4:
        raise Refused("shape of q", tuple(q.shape), allowed="(batch, heads, tokens, head_dim)")
    for name, x in (("k", k), ("v", v)):
        for what in ("shape", "dtype", "device"):
            ours, theirs = getattr(q, what), getattr(x, what)
            if ours != theirs:
                ours, theirs = (tuple(s) if what == "shape" else s for s in (ours, theirs))
                raise Refused(f"{what}s of q and {name} differ: q has {ours}, {name} has {theirs}")
    if not q.is_floating_point():
        raise Refused("dtype of q", str(q.dtype), allowed="a floating-point dtype")
    if 0 in q.shape:
        raise Refused("shape of q", tuple(q.shape), allowed="no dimension of length 0")
    if q.shape[2] != layout.n:
        raise Refused(f"q has {q.shape[2]} tokens but the layout is for {layout.n}", fix="build it with n = q.shape[2]")
    if layout.heads is not None and layout.heads != q.shape[1]:
        raise Refused(
            f"q has {q.shape[1]} heads but the layout has patterns for {layout.heads}",
            fix="use layout.select_heads, or a pattern that all heads share",
        )
