"""The gradient over several ranks as one: norm, clipping, loss scale. The plans' runs are shared with test_parallelize."""

import pytest
import torch
from torch import nn

from tests.parallel.cases import CASES, WORLD, outcome
from workbench.parallel.gradients import clip_gradients, gradient_norm, loss_weight


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.poisoned is None])
def test_the_norm_is_that_of_one_process_on_every_rank(name: str) -> None:
    for rank in range(WORLD):
        assert outcome(name, rank).norm_error < CASES[name].tolerance


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.max_norm])
def test_cases_of_clipping_do_clip(name: str) -> None:
    assert outcome(name).clipped


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.scale])
def test_an_overflow_on_one_rank_skips_the_step_on_all(name: str) -> None:
    overflowed = CASES[name].poisoned is not None
    for rank in range(WORLD):
        found = outcome(name, rank)
        assert found.skipped is overflowed
        assert (found.weight_change == 0) is overflowed
        assert found.scale == (512 if overflowed else 1024)


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
