"""A planted fault changes what it says and nothing else."""

import pytest
import torch
from torch.nn import functional as F

from workbench.diagnose.logits import AttentionLogits
from workbench.errors import Refused
from workbench.models.planted import large_logits, small_gradients
from workbench.models.vit import VisionTransformer

SHAPE = {"num_classes": 10, "image_size": 8, "in_channels": 1, "patch_size": 2, "width": 16, "depth": 2, "heads": 2}


def gradients(divisor: float) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = small_gradients(divisor=divisor, **SHAPE)
    torch.nn.init.normal_(model.head.weight)
    loss = F.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4))
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def test_gradients_are_divided_and_the_loss_is_not() -> None:
    (loss, healthy), (same, small) = gradients(1.0), gradients(2.0**20)
    assert loss == same
    assert all(torch.equal(h, s * 2.0**20) for h, s in zip(healthy, small, strict=True))


def max_logits(gain: float, qk_norm: bool) -> float:
    torch.manual_seed(0)
    model = large_logits(gain=gain, qk_norm=qk_norm, **SHAPE)
    with AttentionLogits(model) as meter, torch.no_grad():
        model(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    return meter.rows()[0].max_logit


def test_attention_logits_grow_with_the_square_of_the_gain_unless_qk_norm_takes_it_out() -> None:
    assert max_logits(10.0, qk_norm=False) == pytest.approx(100 * max_logits(1.0, qk_norm=False), rel=1e-4)
    assert max_logits(10.0, qk_norm=True) == pytest.approx(max_logits(1.0, qk_norm=True), rel=1e-2)


def test_values_start_as_in_the_healthy_model() -> None:
    width = SHAPE["width"]
    torch.manual_seed(0)
    planted = large_logits(gain=3.0, **SHAPE)
    torch.manual_seed(0)
    healthy = VisionTransformer(planted.config)
    changed = {n for (n, p), q in zip(planted.named_parameters(), healthy.parameters(), strict=True) if not p.equal(q)}
    assert changed == {f"blocks.{k}.attn.qkv.weight" for k in range(2)}
    for mine, theirs in zip(planted.blocks, healthy.blocks, strict=True):
        assert torch.equal(mine.attn.qkv.weight[2 * width :], theirs.attn.qkv.weight[2 * width :])


def test_a_divisor_that_would_enlarge_gradients_is_refused() -> None:
    with pytest.raises(Refused, match="divisor"):
        small_gradients(divisor=0.5, **SHAPE)
