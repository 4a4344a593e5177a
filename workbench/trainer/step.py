"""One optimizer step over one global batch: the few lines that everything else is built around."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.trainer.config import TrainConfig
from workbench.trainer.meters import StepClock
from workbench.trainer.precision import LossScaler, autocast, clip

LossFunction = Callable[[Tensor, Tensor], Tensor]


class StepOutcome(NamedTuple):
    """Loss over the global batch and gradient norm before clipping, still on the device; the loss scale that the step was
    taken at, and whether the update was skipped."""

    loss: Tensor
    grad_norm: Tensor
    loss_scale: float | None
    skipped: bool


def train_step(
    model: Callable[[Tensor], Tensor],
    parameters: list[Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    config: TrainConfig,
    loss_function: LossFunction,
    clock: StepClock,
    before_clipping: Callable[[], None] | None = None,
) -> StepOutcome:
    """Forward and backward over micro-batches, clip, update.

    A micro-batch's loss is weighted by its share of the samples, so that the gradient is the global batch's whatever the
    split, a smaller last micro-batch included. ``before_clipping`` is called when the gradients are whole and unscaled.
    """
    device = images_BCHW.device
    losses = []
    for images, labels in zip(
        images_BCHW.split(config.samples_per_forward), labels_B.split(config.samples_per_forward), strict=True
    ):
        with autocast(config.precision, device):
            loss = loss_function(model(images), labels) * (len(labels) / len(labels_B))
        clock.mark("forward")
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        clock.mark("backward")
    # Unscale before clipping: the threshold is on the gradient, not on the gradient times the loss scale.
    scaler.unscale(optimizer)
    if before_clipping:
        before_clipping()
    norm = clip(parameters, config.clip_norm)
    # Read here, where the host waits for the gradients anyway to learn whether one overflowed: no second wait.
    loss_scale = scaler.value
    skipped = scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    return StepOutcome(torch.stack(losses).sum() if len(losses) > 1 else losses[0], norm, loss_scale, skipped)
