"""Small training runs with known faults, or none, as their monitors recorded them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.diagnose.gradients import GradientHistory, GradientMonitor
from workbench.diagnose.scaling import ScaleRecord
from workbench.models.resnet import ResNet

IMAGES, BATCH = 1500, 32


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:IMAGES, None] / 16, torch.tensor(data.target)[:IMAGES]


@dataclass
class RecordedRun:
    history: GradientHistory
    losses: list[float]
    scales: list[ScaleRecord] = field(default_factory=list)


def train(
    model: nn.Module,
    steps: int,
    *,
    rate: float = 0.05,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    half: bool = False,
    init_scale: float = 2.0**16,
    interval: int = 2000,
    seed: int = 0,
    before_step: Callable[[int], None] = lambda step: None,
) -> RecordedRun:
    """Train on digits until ``steps`` or a loss that is no number; fp16 with loss scaling if ``half``."""
    images, labels = digits()
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    update = optimizer(model.parameters(), lr=rate, **options)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", enabled=half, init_scale=init_scale, growth_interval=interval)
    monitor, generator = GradientMonitor(model, every=1), torch.Generator().manual_seed(seed)
    run = RecordedRun(monitor.history(), [])
    for step in range(steps):
        before_step(step)
        pick = torch.randint(0, IMAGES, (BATCH,), generator=generator)
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            logits = model(images[pick])
        loss = F.cross_entropy(logits.float(), labels[pick])
        scaler.scale(loss).backward()
        scale = float(scaler.get_scale())
        scaler.unscale_(update)
        monitor.before_clipping(step)
        scaler.step(update)
        scaler.update()
        monitor.after_update(step)
        update.zero_grad()
        run.losses.append(loss.item())
        run.scales.append(ScaleRecord(step, scale, skipped=half and scaler.get_scale() < scale))
        if not torch.isfinite(loss):
            break
    run.history = monitor.history()
    return run


def resnet(seed: int = 0, gain: float = 1.0) -> ResNet:
    """A small ResNet; a ``gain`` other than 1 is the fault of the case study, in ``layer4.conv1``."""
    torch.manual_seed(seed)
    model = ResNet(num_classes=10, in_channels=1, image_size=8, width=4)
    with torch.no_grad():
        model.get_parameter("layer4.conv1.weight").mul_(gain)
    return model


def mlp(seed: int = 0, depth: int = 3, width: int = 24, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width)]
    for _ in range(depth - 1):
        layers += [nn.GELU(), *([nn.LayerNorm(width)] if norm else []), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(width, 10))
