"""The gate of every kernel: no further from float64 than twice what dense attention in the same dtype is."""

from collections.abc import Sequence

import torch

from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.layout import BlockLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("output", "grad q", "grad k", "grad v")


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
    exact = run([x.double() for x in tensors], layout, "reference")
    dense = run(tensors, layout, "dense")
    ours = run(tensors, layout, backend, **options)
    # Where every query sees a single key the gradients of q and k are zero but for rounding, in both: hence a floor.
    floor = 0.01 * torch.finfo(tensors[0].dtype).eps * float(tensors[3].double().norm())
    for name, value, rival, truth in zip(NAMES, ours, dense, exact, strict=True):
        error, bound = distance(value, truth), 2 * distance(rival, truth) + floor
        assert error <= bound, f"{name}: error {error:.2e}, twice dense attention's own is {bound:.2e}"
