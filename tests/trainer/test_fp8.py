import pytest
import torch

from workbench.errors import Refused
from workbench.trainer.fp8 import fp8_linear, quantise, swap_linear_layers


def test_products_and_gradients_are_those_of_fp32_to_eight_bits() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(32, 64, requires_grad=True),
        torch.randn(48, 64, requires_grad=True),
        torch.randn(48, requires_grad=True),
    )
    upstream = torch.randn(32, 48)
    leaves = (x, weight, bias)
    exact = torch.nn.functional.linear(*leaves)
    wanted = torch.autograd.grad(exact, leaves, upstream)
    found_out = fp8_linear(*leaves)
    found = torch.autograd.grad(found_out, leaves, upstream.bfloat16())
    for a, b in zip((exact, *wanted), (found_out, *found), strict=True):
        assert 1e-5 < (a - b).norm() / a.norm() < 0.06 or a.shape == bias.shape


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_scale_brings_any_magnitude_into_range(factor: float, dtype: torch.dtype) -> None:
    x = torch.tensor([-1.0, 0.5, 0.25, 0.0]) * factor
    values, scale = quantise(x, dtype)
    if factor > 1e-12:
        assert torch.allclose(values.float() * scale, x, rtol=0.13)
    assert torch.isfinite(values.float()).all()


def test_a_device_without_fp8_units_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="CPU"):
        swap_linear_layers(torch.nn.Linear(16, 16), torch.device("cpu"))
