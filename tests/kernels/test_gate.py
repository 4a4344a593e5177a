import pytest
import torch

from tests.kernels.numerics import draw
from workbench.kernels import layouts
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.gate import NAMES, check
from workbench.kernels.layout import BlockLayout

LAYOUT = layouts.window_global(100, 16, radius=1)


class Planted(torch.autograd.Function):
    """The identity, with a backward pass that is off by a share."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + ctx.share), None


def attention(wrong: int | None = None, share: float = 0.0):
    def attend(q, k, v):
        x = [Planted.apply(t, share) if i == wrong else t for i, t in enumerate((q, k, v))]
        return block_sparse_attention(*x, LAYOUT, backend="reference")

    return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_attention_passes(dtype):
    found = check(attention(), LAYOUT, draw((1, 2, 100, 24), dtype))
    assert found.passed and set(found.errors) == set(NAMES)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_backward_fails_by_name_though_the_forward_is_exact(wrong):
    found = check(attention(wrong, 1e-4), LAYOUT, draw((1, 2, 100, 24), torch.float32))
    assert list(found.failures) == [NAMES[wrong + 1]] and NAMES[wrong + 1] in str(found)


def test_a_value_that_is_not_finite_fails():
    found = check(lambda q, k, v: attention()(q, k, v) * float("nan"), LAYOUT, draw((1, 2, 100, 24), torch.float32))
    assert list(found.failures) == list(NAMES)


def test_the_wrong_pattern_fails_forward_and_backward():
    other = layouts.local(100, 16, radius=2)
    found = check(
        lambda q, k, v: block_sparse_attention(q, k, v, other, backend="reference"),
        LAYOUT,
        draw((1, 2, 100, 24), torch.float32),
    )
    assert list(found.failures) == list(NAMES)


def test_what_should_be_zero_and_is_not_fails():
    nothing = BlockLayout.from_pairs(100, 16, [], [])
    tensors = draw((1, 2, 100, 24), torch.float32)
    assert check(lambda q, k, v: block_sparse_attention(q, k, v, nothing, backend="reference"), nothing, tensors).passed
    found = check(lambda q, k, v: 1e-3 * (q + k + v), nothing, tensors)
    assert list(found.failures) == list(NAMES)
