"""Our Triton kernels as PyTorch operators, for autograd, torch.compile and recomputation alike.

An operator's schema has no place for a layout, so the layout travels as its handle, a number, and the caller keeps the
layout alive. A new layout is then a new number and no reason to compile again.
"""

import torch
from torch import Tensor

from workbench.errors import Refused
from workbench.kernels import triton_backward, triton_forward
from workbench.kernels.layout import BlockLayout, by_handle
from workbench.kernels.triton_common import INTERPRETED

# On Hopper the kernels lowered for it compute what they can; False, in tests and benchmarks, leaves all to the portable.
USE_LOWERED = True


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, *, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Output like ``q`` and log-sum-exp in fp32. The layout must outlive the backward pass."""
    check(q, layout)
    return _forward(q, k, v, layout.handle, scale, deterministic)


def check(q: Tensor, layout: BlockLayout) -> None:
    """Raises Refused for what the Triton kernels do not compute."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise Refused("device of the triton backend", str(q.device), allowed="cuda", fix="use backend='reference'")
    dtypes = [torch.float16, torch.bfloat16] + ([torch.float32] if INTERPRETED else [])
    if q.dtype not in dtypes:
        raise Refused("dtype of the triton backend", str(q.dtype), allowed=", ".join(map(str, dtypes)))
    if not 16 <= q.shape[-1] <= 128 or q.shape[-1] % 8:
        raise Refused("head_dim of the triton backend", q.shape[-1], allowed="multiples of 8 from 16 to 128")
    if layout.block_size not in (64, 128):
        raise Refused("block_size of the triton backend", layout.block_size, allowed="64 or 128")


def _is_lowered(q: Tensor, layout: BlockLayout) -> bool:
    if not USE_LOWERED or not q.is_cuda:
        return False
    from workbench.kernels.gluon_common import computes

    return computes(q, layout)


@torch.library.custom_op("workbench::block_sparse_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, layout: int, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    if _is_lowered(q, by_handle(layout)):
        from workbench.kernels import gluon_forward

        return gluon_forward.forward(q, k, v, by_handle(layout), scale)
    return triton_forward.forward(q, k, v, by_handle(layout), scale)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layout: int, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("workbench::block_sparse_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, layout: int,
    scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _is_lowered(q, by_handle(layout)):
        from workbench.kernels import gluon_backward

        return gluon_backward.backward(q, k, v, out, lse, grad_out, grad_lse, by_handle(layout), scale)
    return triton_backward.backward(q, k, v, out, lse, grad_out, grad_lse, by_handle(layout), scale)


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, layout: int,
    scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, ctx.layout, ctx.scale, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse = ctx.saved_tensors
    grads = _backward(q, k, v, out, lse, grad_out, grad_lse, ctx.layout, ctx.scale, ctx.deterministic)
    return *grads, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
