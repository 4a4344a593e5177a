"""Checks of a loop's numbers against a reference: accumulated gradients, and a logged gradient norm."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workbench.diagnose.gradients import total_norm
from workbench.diagnose.symptom import Symptom

MEAN_OF_MEANS = "mean of means"
ACCUMULATION = "accumulated gradient is wrong"
SHARDED_NORM = "gradient norm of one shard"
WRONG_NORM = "gradient norm is wrong"


def check_accumulation(
    model: nn.Module,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    *,
    step: int = 0,
    tolerance: float = 1e-3,
) -> Symptom | None:
    """Compare the gradients that a loop left in ``model`` with those of the whole batch at once.

    The loop must have run its forwards and backwards over ``micro_batches``, not its update, with a loss that averages over
    samples and a model that treats samples independently (no BatchNorm in training, no dropout). The gradients stay as they
    were. Costs two more passes over the batch.

    Args:
        tolerance: relative distance that rounding may explain; 1e-2 for half precision.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    observed = _flat([p.grad for p in parameters], parameters)
    sizes = [len(inputs) for inputs, _ in micro_batches]
    parts = [_gradient(model, parameters, loss_function, *micro_batch) for micro_batch in micro_batches]
    right = sum(part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True))
    assert isinstance(right, Tensor)
    if _near(observed, right, tolerance):
        return None
    if _near(observed, torch.stack(parts).mean(0), tolerance):
        detail = f"micro-batches of {sizes} samples weigh the same, so a sample of the smallest counts too much"
        return Symptom(MEAN_OF_MEANS, detail, step, fix="weight each micro-batch's loss by its share of the samples")
    ratio = float(observed.norm() / right.norm())
    cosine = float(torch.nn.functional.cosine_similarity(observed, right, dim=0))
    detail = f"{ratio:.4g} times as long as the whole batch's, cosine {cosine:.4f}"
    return Symptom(
        ACCUMULATION, detail, step, fix="scale each micro-batch's loss by its share of the samples; zero before"
    )


def check_grad_norm(
    gradients: Iterable[Tensor], logged: float, *, step: int = 0, tolerance: float = 1e-2
) -> Symptom | None:
    """Compare a logged gradient norm with the norm over all shards and meshes. Every rank must call it."""
    gradients = list(gradients)
    true = float(total_norm(gradients))
    if math.isclose(logged, true, rel_tol=tolerance) or (math.isnan(true) and math.isnan(logged)):
        return None
    squares = [_own(g).norm() ** 2 for g in gradients]
    own = float(torch.stack(squares).sum().sqrt())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    detail = f"logged {logged:.4g}, over all shards {true:.4g}"
    if math.isclose(logged, own, rel_tol=tolerance):
        ranks = max((g.device_mesh.size() for g in gradients if isinstance(g, DTensor)), default=1)
        detail += f"; it is this rank's own part, about 1/√{ranks} of the whole"
        return Symptom(SHARDED_NORM, detail, step, rank=rank, fix="reduce the squares over the shards before the root")
    return Symptom(WRONG_NORM, detail, step, rank=rank, fix="take the norm before clipping, over all parameters")


def _own(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _gradient(
    model: nn.Module, parameters: list[nn.Parameter], loss_function: Callable[[Tensor, Tensor], Tensor], *batch: Tensor
) -> Tensor:
    loss = loss_function(model(batch[0]), batch[1])
    return _flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


def _flat(gradients: Sequence[Tensor | None], parameters: list[nn.Parameter]) -> Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).detach().flatten().float() for g, p in pairs])


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())
