"""What only a GPU can show: that nothing waits for it, and that its own backward thread is attributed right.

pytest tests/diagnose/test_on_gpu.py
"""

import pytest
import torch
from torch import nn

from workbench.diagnose.gradients import GradientMonitor
from workbench.diagnose.logits import AttentionLogits
from workbench.diagnose.nonfinite import FirstNonFinite
from workbench.diagnose.underflow import exponent_counts
from workbench.models.build import build_model
from workbench.trainer.module_precision import apply_precision, dtype_report

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = build_model("vit-nano", num_classes=10, image_size=32, in_channels=3).cuda()
    # The head starts at zero, which stops all gradients at it.
    nn.init.normal_(model.get_parameter("head.weight"), std=0.02)
    return model


def images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, device="cuda")


def test_the_meters_never_wait_for_the_device() -> None:
    model = vit()
    monitor, counts = GradientMonitor(model, every=1), []
    model(images()).square().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            monitor.before_clipping(step)
            monitor.after_update(step)
        counts += [exponent_counts(p.grad) for p in model.parameters() if p.grad is not None]
        with AttentionLogits(model) as meter:
            model(images())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert monitor.history().norm.shape[0] == 3 and len(meter.rows()) == 4
    assert sum(int(c.sum()) for c in counts) == sum(p.numel() for p in model.parameters())


def test_nonfinite_elements_are_counted_on_the_device() -> None:
    model = vit()
    model(images()).square().mean().backward()
    grad = model.get_parameter("blocks.1.mlp.fc1.weight").grad
    assert grad is not None
    grad[0, :3] = torch.nan
    monitor = GradientMonitor(model, every=1)
    monitor.before_clipping(0)
    history = monitor.history()
    assert history.nonfinite[0, history.layers.index("blocks.1.mlp.fc1")] == 3 == history.nonfinite.sum()


def test_a_backward_producer_is_named_though_another_thread_runs_it() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 0).abs().sqrt()

    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), Root(), nn.Linear(4, 2)).cuda()
    finder = FirstNonFinite(model, policy="skip")
    with finder.watch(0):
        model(torch.randn(3, 4, device="cuda")).sum().backward()
    assert finder.found is not None
    assert (finder.found.module, finder.found.direction, finder.found.role) == ("2", "backward", "producer")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_attention_runs_in_fp32_inside_half_precision(dtype: str) -> None:
    rules = {"default": dtype, "blocks.*.attn": "fp32", "norm": "fp32"}
    model = vit()
    apply_precision(model, rules, "cuda")
    report = dtype_report(model, images(), rules)
    assert all(row.holds for row in report), [row for row in report if not row.holds]
    model(images()).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
