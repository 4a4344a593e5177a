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
    taken at, whether the update was skipped, and whether that happened at the scale's floor."""

    loss: Tensor
    grad_norm: Tensor
    loss_scale: float | None
    skipped: bool
    exhausted: bool


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

    ``before_clipping`` is called when the gradients are whole and unscaled.
    """
    loss = accumulate_gradients(
        model, scaler, images_BCHW, labels_B, config=config, loss_function=loss_function, clock=clock
    )
    # Unscale before clipping: the threshold is on the gradient, not on the gradient times the loss scale.
    scaler.unscale(optimizer)
    if before_clipping:
        before_clipping()
    norm = clip(parameters, config.clip_norm)
    loss_scale = scaler.value
    skipped = scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    return StepOutcome(loss, norm, loss_scale, skipped, scaler.exhausted)


def accumulate_gradients(
    model: Callable[[Tensor], Tensor],
    scaler: LossScaler,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    config: TrainConfig,
    loss_function: LossFunction,
    clock: StepClock,
) -> Tensor:
    """Forward and backward of every micro-batch; the loss over the global batch, still on the device.

    A micro-batch's loss is weighted by its share of the samples, so that the gradient is the global batch's whatever the
    split, a smaller last micro-batch included.
    """
    losses = []
    for images, labels in zip(
        images_BCHW.split(config.samples_per_forward), labels_B.split(config.samples_per_forward), strict=True
    ):
        with autocast(config.precision, images.device):
            loss = loss_function(model(images), labels) * (len(labels) / len(labels_B))
        clock.mark("forward")
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        clock.mark("backward")
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
