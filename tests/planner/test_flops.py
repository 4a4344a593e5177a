"""FLOPs by formula against those that PyTorch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.models.build import build_model
from workbench.models.config import vit_config
from workbench.planner.flops import forward_flops, model_flops, operators


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "registers": 3}])
def test_flops_are_those_that_pytorch_counts(fields: dict[str, object]) -> None:
    """With eager attention, for PyTorch's counter gives 0 for fused attention on a CPU."""
    model = build_model("vit-micro", num_classes=10, image_size=32, in_channels=3, attention="eager", **fields)
    vit = model.config
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randn(4, 3, 32, 32)).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward_flops(vit, 4) == forward.get_total_flops()
    assert model_flops(vit, 4) == forward.get_total_flops() + backward.get_total_flops()


def test_attention_is_counted_alike_whatever_computes_it() -> None:
    """And a flash kernel's recomputation of the scores is not the model's work."""
    eager, fused = (vit_config("vit-b", attention=name) for name in ("eager", "sdpa"))
    assert model_flops(eager) == model_flops(fused)


def test_autocast_adds_conversions_and_no_flops() -> None:
    vit = vit_config("vit-s")
    plain, cast = (operators(vit, 2, autocast=on) for on in (False, True))
    assert sum(o.flops for o in plain) == sum(o.flops for o in cast)
    assert sum(o.full for o in plain) < sum(o.full for o in cast)
