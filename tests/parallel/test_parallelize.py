"""Every plan on four ranks against one process: loss, gradients, norm, clipping, overflow, weights after the step."""

import pytest
import torch
from torch import nn

from tests.parallel.cases import CASES, WORLD, outcome
from workbench.errors import Refused
from workbench.models.build import build_model
from workbench.parallel.units import SplitLinear, Units, blocks_of, matching, units_of


@pytest.mark.parametrize("name", CASES)
def test_a_plan_gives_the_loss_and_gradients_of_one_process(name: str) -> None:
    case = CASES[name]
    for rank in range(WORLD):
        found = outcome(name, rank)
        assert found.loss_error < case.tolerance
        if case.poisoned is None:
            assert max(found.gradient_errors.values()) < case.tolerance, found.gradient_errors


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.poisoned is None])
def test_a_plan_makes_the_update_of_one_process(name: str) -> None:
    for rank in range(WORLD):
        found = outcome(name, rank)
        assert found.weight_change > 1e-4
        assert found.weight_error < CASES[name].tolerance


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


def test_the_parts_of_a_fused_layer_are_the_layer() -> None:
    fused = nn.Linear(8, 24)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(SplitLinear(fused, 3)(x), fused(x))


def test_a_split_layer_stays_frozen() -> None:
    assert not any(p.requires_grad for p in SplitLinear(nn.Linear(8, 24).requires_grad_(False), 3).parameters())


def test_patterns_match_part_by_part() -> None:
    model = build_model("vit-nano", num_classes=4, image_size=8, in_channels=3)
    assert [name for name, _ in matching(model, "blocks.*")] == [f"blocks.{i}" for i in range(4)]
    assert [name for name, _ in matching(model, "blocks.[12].mlp.fc*")] == [
        f"blocks.{i}.mlp.fc{j}" for i in (1, 2) for j in (1, 2)
    ]


def test_a_wrapped_model_is_found_in_the_table() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build_model("vit-nano", num_classes=4, image_size=8, in_channels=3)

    units = units_of(Wrapper())
    assert units.blocks == "inner.blocks.*" and "inner.blocks.*.attn.proj" in units.rowwise


def test_an_unknown_model_is_refused_with_the_way_out() -> None:
    with pytest.raises(Refused, match=r"Units\(blocks="):
        units_of(nn.Linear(2, 2))


def test_a_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(Refused, match=r"layers\.\*"):
        blocks_of(nn.Linear(2, 2), Units(blocks="layers.*"))
