"""The gate of every kernel: no further from float64 than twice what dense attention in the same dtype is."""

from collections.abc import Sequence

import torch

from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.gate import check
from workbench.kernels.layout import BlockLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and an output gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for _ in range(4)]


def run(tensors: Sequence[torch.Tensor], layout: BlockLayout, backend: str, **options: object) -> list[torch.Tensor]:
    """Output and the gradients of q, k and v."""
    q, k, v, grad = tensors
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = block_sparse_attention(q, k, v, layout, backend=backend, **options)
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    value, exact = value.detach(), exact.detach()
    assert torch.isfinite(value).all(), "a value is infinite or NaN"
    return float((value.double() - exact).norm())


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return distance(value, exact) / float(exact.detach().norm())


def assert_as_good_as_dense(
    tensors: Sequence[torch.Tensor], layout: BlockLayout, backend: str, **options: object
) -> None:
    found = check(lambda q, k, v: block_sparse_attention(q, k, v, layout, backend=backend, **options), layout, tensors)
    assert found.passed, str(found)
