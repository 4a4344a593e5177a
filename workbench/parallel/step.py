"""One optimizer step of a parallelized model over this rank's micro-batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import Refused
from workbench.parallel.gradients import MeshGradScaler, accumulate, clip_gradients, loss_weight
from workbench.parallel.mesh import data_parallel_group


class StepOutcome(NamedTuple):
    """Mean loss over the global batch and norm of its gradient before clipping, on the device; whether the update was
    skipped for an overflow."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss_function: Callable[[Tensor, Tensor], Tensor],
    mesh: DeviceMesh,
    *,
    global_samples: int | None = None,
    max_norm: float | None = None,
    scaler: MeshGradScaler | None = None,
    sync_each: bool = False,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    before_clipping: Callable[[], None] | None = None,
) -> StepOutcome:
    """Forward and backward over the micro-batches, clip, update, clear.

    Sizes may differ between micro-batches and between ranks, the number of micro-batches may not: every forward and backward
    is a meeting of all ranks. Ranks along ``tensor`` must be given the same samples.

    Args:
        loss_function: logits and labels to the mean over the samples given.
        global_samples: of all ranks together. Where not given the ranks count them, which the host waits for.
        sync_each: see ``accumulate``.
        before_clipping: called when the gradients are whole and unscaled.

    Raises:
        Refused: no micro-batch, or another number of them than another rank has.
    """
    group = data_parallel_group(mesh)
    if global_samples is None:
        global_samples = _count_samples(micro_batches, group, mesh.device_type)
    losses = []
    for index, (inputs, labels) in enumerate(micro_batches):
        with accumulate(model, last=index == len(micro_batches) - 1, sync_each=sync_each):
            with autocast():
                loss = loss_function(model(inputs), labels) * loss_weight(len(labels), global_samples, group.size())
            (scaler.scale(loss) if scaler else loss).backward()
        losses.append(loss.detach())

    total = torch.stack(losses).sum() / group.size()
    dist.all_reduce(total, group=group)
    if scaler:
        scaler.unscale_(optimizer)
    if before_clipping:
        before_clipping()
    norm = clip_gradients([p for g in optimizer.param_groups for p in g["params"]], max_norm)
    skipped = _update(optimizer, scaler)
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(total, norm, skipped)


def _update(optimizer: torch.optim.Optimizer, scaler: MeshGradScaler | None) -> bool:
    if scaler is None:
        optimizer.step()
        return False
    skipped = scaler.found_inf(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return skipped


def _count_samples(micro_batches: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup, device_type: str) -> int:
    """Samples of all ranks. A rank with fewer micro-batches would leave the others waiting in a forward for ever."""
    mine = torch.tensor([len(micro_batches), sum(len(labels) for _, labels in micro_batches)], device=device_type)
    every = mine.new_empty(2 * group.size())
    dist.all_gather_into_tensor(every, mine, group=group)
    steps, samples = every.view(-1, 2).T.tolist()
    if not steps[0] or len(set(steps)) > 1:
        raise Refused(
            "numbers of micro-batches on the ranks",
            steps,
            allowed="the same on all, one or more",
            fix="let their sizes differ instead",
        )
    return sum(samples)
