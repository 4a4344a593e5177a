"""Bytes by formula against those that autograd keeps, the allocator counts, and papers print."""

import csv
from pathlib import Path

import pytest
import torch

from workbench.models.build import build_model
from workbench.models.config import vit_config
from workbench.planner.memory import memory_ledger
from workbench.planner.params import cast_parameters, num_tensors

DATA = Path(__file__).parents[1] / "data"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_activation_bytes_are_those_that_autograd_keeps(attention: str, precision: str, qk_norm: bool) -> None:
    """Within 2 %: what is left out are the statistics of norms. 65 tokens, so that scores weigh in.

    With QK-norm within 8 %: the layout that a kernel gives its output in decides whether it is copied once more.
    """
    shape = {"patch_size": 4, "depth": 2, "attention": attention, "qk_norm": qk_norm}
    model = build_model("vit-micro", num_classes=10, image_size=32, in_channels=3, **shape).to(DEVICE)
    kept = _kept_bytes(model, torch.randn(8, 3, 32, 32, device=DEVICE), precision)
    ledger = memory_ledger(model.config, batch=8, precision=precision, kind=DEVICE.type)
    assert ledger.activations + ledger.casts == pytest.approx(kept, rel=0.08 if qk_norm else 0.02)


def _kept_bytes(model: torch.nn.Module, images: torch.Tensor, precision: str) -> int:
    """Bytes of every storage that the backward pass will read, weights and images aside."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), images]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in own:
            kept[where] = tensor  # held, so that no later storage takes its address
        return tensor

    autocast = torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast:
        model(images).sum()
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def test_states_are_those_of_the_published_table() -> None:
    rows = list(csv.DictReader((DATA / "model_states.csv").open()))
    vit = vit_config("vit-10b")
    ledger = memory_ledger(vit, batch=1)
    for row in rows:
        assert ledger.states / ledger.parameters * 4 * float(row["params_b"]) == pytest.approx(float(row["value"]))
    assert ledger.states / 16 == pytest.approx(10e9, rel=0.05)


def test_scores_take_memory_by_tokens_squared_and_not_by_parameters() -> None:
    def scores(**fields: int) -> float:
        eager, fused = (
            memory_ledger(vit_config("vit-b", attention=name, **fields), batch=1).activations
            for name in ("eager", "sdpa")
        )
        return eager - fused

    # Near 16: the class token is no part of the grid, and flash keeps one number a row.
    assert scores(image_size=448) == pytest.approx(16 * scores(image_size=224), rel=0.05)
    assert scores(width=1536) == scores()


def test_the_peak_is_where_the_backward_begins_or_at_the_update() -> None:
    few, many = (memory_ledger(vit_config("vit-b"), batch=b) for b in (1, 64))
    assert few.total == few.states + few.update + few.images
    assert many.total > many.states + many.update
    assert many.total == many.states - many.gradients + many.activations + many.images + many.transient


def test_gradients_are_there_during_the_forward_when_micro_batches_accumulate() -> None:
    once, often = (memory_ledger(vit_config("vit-b"), batch=64, global_batch=size) for size in (64, 128))
    assert often.total - once.total == once.gradients + once.images


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "registers": 2}])
def test_tensors_and_weights_that_autocast_converts_are_counted(fields: dict[str, object]) -> None:
    model = build_model("vit-nano", num_classes=10, image_size=8, in_channels=3, **fields)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    assert cast_parameters(model.config) == sum(p.numel() for m in layers for p in m.parameters())
    assert num_tensors(model.config) == len(list(model.parameters()))
