"""Norm, clipping and weights of a gradient on one rank; over several ranks they are in test_parallelize."""

import pytest
import torch
from torch import nn

from workbench.parallel.gradients import clip_gradients, gradient_norm, loss_weight


def test_the_norm_of_plain_parameters_is_torchs() -> None:
    model = nn.Linear(7, 3).double()
    model(torch.randn(5, 7, dtype=torch.float64)).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradient_norm(model.parameters()), expected)


def test_half_precision_gradients_have_a_finite_norm() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert gradient_norm([parameter]).item() == pytest.approx(120000, rel=1e-3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_clipping_leaves_a_gradient_that_is_not_finite_as_it_is(bad: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, bad])
    assert not clip_gradients([parameter], 1.0).isfinite()
    assert parameter.grad[0] == 3


def test_a_gradient_of_zero_is_clipped_to_zero() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    assert clip_gradients([parameter], 1.0) == 0 and not parameter.grad.any()


def test_weights_of_uneven_parts_make_the_mean_over_samples() -> None:
    losses = [torch.rand(size, dtype=torch.float64) for size in (3, 1, 5, 2)]  # two micro-batches of two ranks
    ranks = [losses[:2], losses[2:]]
    per_rank = [sum(part.mean() * loss_weight(len(part), 11, 2) for part in mine) for mine in ranks]
    torch.testing.assert_close(sum(per_rank) / 2, torch.cat(losses).mean())
