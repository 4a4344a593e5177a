"""Linear layers whose matrix products run in 8-bit floating point, by PyTorch's scaled matmul.

Dynamic scaling per tensor (Micikevicius et al. 2022): values and weights in E4M3, gradients in E5M2, each multiplied so that its
largest value is the format's, accumulated in fp32, given back in bf16. Weights stay fp32.

Shapes: N rows (batch × tokens), I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.errors import Refused

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Scaled matmul wants inner and outer sizes that 16 divides."""


def unavailable(device: torch.device) -> str:
    """Why fp8 products cannot run on a device; empty where they can."""
    if device.type != "cuda":
        return "fp8 matrix units are a GPU's (NVIDIA compute capability 8.9 or newer); this device is a CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"fp8 needs compute capability 8.9 or newer; {torch.cuda.get_device_name(device)} has {major}.{minor}"
    return ""


def swap_linear_layers(model: nn.Module, device: torch.device) -> int:
    """Make every linear layer whose sizes allow it, but the last, compute in fp8; how many did.

    The last layer stays in bf16: its outputs are the logits, whose error is the loss's.

    Raises:
        Refused: the device has no fp8 matrix units.
    """
    if reason := unavailable(device):
        raise Refused("precision", "fp8", allowed=reason, fix="use bf16")
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)][:-1]
    chosen = [m for m in layers if m.in_features % MULTIPLE == 0 and m.out_features % MULTIPLE == 0]
    for layer in chosen:
        layer.forward = _Forward(layer)  # type: ignore[method-assign, assignment]
    return len(chosen)


class _Forward:
    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # The last batch of a validation set may have any size; the backward multiplies over the rows.
        padding = -len(rows) % MULTIPLE
        padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
        out = fp8_linear(padded, self.layer.weight, self.layer.bias)
        return out[: len(rows)].view(*x.shape[:-1], -1)


def fp8_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with its products, forward and backward, in fp8; bf16 out."""
    out_NO: Tensor = _Fp8Product.apply(x_NI, weight_OI)
    return out_NO if bias_O is None else out_NO + bias_O.to(out_NO.dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        x8_NI, x_scale = quantise(x_NI, FORWARD)
        w8_OI, w_scale = quantise(weight_OI, FORWARD)
        ctx.save_for_backward(x8_NI, x_scale, w8_OI, w_scale)
        ctx.dtypes = x_NI.dtype, weight_OI.dtype
        return _product(x8_NI, w8_OI.t(), x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x8_NI, x_scale, w8_OI, w_scale = ctx.saved_tensors
        g8_NO, g_scale = quantise(gradients[0], GRADIENT)
        dx_NI = _product(g8_NO, _columns(w8_OI), g_scale, w_scale)
        dw_OI = _product(g8_NO.t().contiguous(), _columns(x8_NI), g_scale, x_scale)
        return dx_NI.to(ctx.dtypes[0]), dw_OI.to(ctx.dtypes[1])


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in an 8-bit format and the fp32 scalar that it is to be multiplied by again; zeros stay zeros."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


def _columns(x: Tensor) -> Tensor:
    """The same matrix, laid out by columns, as the second factor must be."""
    return x.t().contiguous().t()
