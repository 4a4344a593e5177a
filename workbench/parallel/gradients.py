"""Gradients that lie on several ranks, treated as the one gradient that they are: norm, clipping, loss scale, accumulation."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- norm and clipping


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of the whole gradient, as one process would compute it; a float64 scalar on the mesh's device.

    Parameters may be plain, or DTensors of different meshes: each share's squares are summed over the axes that it is split
    along, and over no axis that holds copies. Every rank must call it, with the same parameters.
    """
    # By parameter, not by gradient: a rank without a gradient must take part in the sums all the same.
    shares: dict[tuple[tuple[str, dist.ProcessGroup], ...], list[Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for parameter in parameters:
        grads = shares[_split_along(parameter)]
        if isinstance(parameter, DTensor):
            device = _device(parameter.device_mesh)
        elif parameter.device.type != "cpu":
            device = parameter.device
        if parameter.grad is not None:
            grads.append(local(_whole(parameter.grad)))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, grads in shares.items():
        squares = _sum_of_squares(grads, device)
        for _, group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale the gradient down to ``max_norm``; the norm before.

    A non-finite norm leaves the gradients as they are: scaling would turn all of them to 0 or NaN and hide where it began.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    if max_norm is not None:
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for (device, dtype), grads in _by_kind(parameters).items():
            torch._foreach_mul_(grads, factor.to(device, dtype if dtype == torch.float64 else torch.float32))
    return norm


def _split_along(parameter: Tensor) -> tuple[tuple[str, dist.ProcessGroup], ...]:
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    split = [mesh.get_group(dim) for dim, p in enumerate(placements) if not p.is_replicate() and mesh.size(dim) > 1]
    return tuple((group.group_name, group) for group in split)


def _whole(grad: Tensor) -> Tensor:
    """A gradient whose sum over ranks is still open has no norm yet: close it."""
    if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
        return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    return grad


def _sum_of_squares(grads: list[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_kind = defaultdict(list)
    for grad in grads:
        by_kind[grad.device, grad.dtype].append(grad)
    for (_, dtype), some in by_kind.items():
        # Half-precision squares overflow at 256.
        norms = torch._foreach_norm(some, 2, dtype=dtype if dtype == torch.float64 else torch.float32)
        total += torch.stack(norms).double().square().sum().to(device)
    return total


def _by_kind(parameters: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """This rank's gradients by device and dtype, as the foreach kernels want them."""
    found = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            found[grad.device, grad.dtype].append(grad)
    return found


def _device(mesh: DeviceMesh) -> torch.device:
    return (
        torch.device(mesh.device_type, torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device("cpu")
    )


# ---- loss scale


class MeshGradScaler(torch.amp.GradScaler):
    """``GradScaler`` for gradients on several ranks and meshes: an overflow on one rank skips the step on all."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found: dict[torch.device, Tensor] = {}
        for (device, _), grads in _by_kind(parameters).items():
            flag = found.setdefault(device, torch.zeros_like(found_inf, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        any_found = torch.stack([flag.to(found_inf.device) for flag in found.values()]).amax(0) if found else found_inf
        if dist.is_initialized():
            dist.all_reduce(any_found, op=dist.ReduceOp.MAX)
        # A rank without a gradient has a flag too: it must skip with the others.
        return {device: any_found.to(device) for device in found or {found_inf.device: found_inf}}

    def found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients just unscaled overflowed anywhere, so that ``step`` will skip."""
        return any(flag.item() > 0 for flag in self._found_inf_per_device(optimizer).values())


# ---- accumulation


@contextmanager
def accumulate(model: nn.Module, last: bool, *, sync_each: bool = False) -> Iterator[None]:
    """Around forward *and* backward of one micro-batch: gradients cross between ranks only after the last one.

    DDP decides in the forward whether the backward will reduce, so a context around the backward alone reduces still.

    Args:
        sync_each: reduce after every micro-batch. With FSDP it costs traffic and saves memory: otherwise each rank holds the
            gradient of the whole model until the last.
    """
    sync = last or sync_each
    if isinstance(model, DistributedDataParallel):
        if sync:
            yield
        else:
            with model.no_sync():
                yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
        return
    yield


def loss_weight(samples: int, global_samples: int, ranks: int) -> float:
    """What a micro-batch's mean loss counts for, so that the gradient is the mean over the global batch's samples.

    DDP and FSDP average over the ranks, hence the factor: the plain mean of means is wrong wherever sizes differ.
    """
    return samples * ranks / global_samples
