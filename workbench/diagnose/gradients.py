"""Gradient statistics per layer, every few steps, without making the host wait for the device.

A monitored step leaves a few numbers per parameter on the device; ``history`` reads all that were left in one transfer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from workbench.errors import Refused

Layers = tuple[str, ...]


@dataclass(frozen=True)
class GradientHistory:
    """Statistics by step (rows) and layer (columns), as numpy arrays; plain data for ``explosion`` and figures.

    Attributes:
        layers: module names in the model's order.
        steps: the monitored steps.
        norm: 2-norm of the layer's gradient, before clipping.
        largest: largest magnitude; NaN where the gradient holds one.
        nonfinite: number of NaN and infinite elements.
        update_ratio: 2-norm of the update over 2-norm of the weights before it; NaN where no update was seen, 0 for a
            skipped one. About 1e-3 is usual.
        weight: 2-norm of the layer's weights before the update; NaN where no update was seen.
    """

    layers: Layers
    steps: np.ndarray
    norm: np.ndarray
    largest: np.ndarray
    nonfinite: np.ndarray
    update_ratio: np.ndarray
    weight: np.ndarray

    def records(self) -> list[dict[str, object]]:
        """One JSON-safe record per step and layer."""
        return [
            {
                "step": int(step),
                "layer": layer,
                "norm": float(self.norm[s, k]),
                "largest": float(self.largest[s, k]),
                "nonfinite": int(self.nonfinite[s, k]),
                "update_ratio": float(self.update_ratio[s, k]),
                "weight": float(self.weight[s, k]),
            }
            for s, step in enumerate(self.steps)
            for k, layer in enumerate(self.layers)
        ]


class GradientMonitor:
    """Watches the gradients of ``model``'s trained parameters every ``every`` steps.

    ::

        loss.backward()                    # and scaler.unscale_(optimizer)
        monitor.before_clipping(step)
        clip(...); optimizer.step()
        monitor.after_update(step)         # only for the update ratio

    Steps that are not due return at once. With sharded parameters (FSDP2, tensor parallel) the statistics are the whole
    layer's, and every rank must call at the same steps.

    Args:
        every: steps from one monitored step to the next.
        updates: measure the update ratio, for which a monitored step keeps a copy of the weights until its update.
    """

    def __init__(self, model: nn.Module, *, every: int = 20, updates: bool = True) -> None:
        if every < 1:
            raise Refused("every", every, allowed="1 or more steps")
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise Refused("a gradient monitor for a model without trained parameters")
        self.every, self.updates = every, updates
        self._parameters: list[Tensor] = [p for _, p in named]
        owners = [name.rpartition(".")[0] for name, _ in named]
        self.layers: Layers = tuple(dict.fromkeys(owners))
        self._layer_of = np.array([self.layers.index(owner) for owner in owners])
        self._weights: list[Tensor] | None = None
        self._steps: list[int] = []
        self._gradients: list[Tensor] = []
        self._ratios: dict[int, Tensor] = {}
        self._read = _empty(self.layers)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    @torch.no_grad()
    def before_clipping(self, step: int) -> None:
        """Note the gradients of a due step: after ``backward`` and ``unscale_``, before clipping."""
        if not self.due(step):
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        local = [_local(g) for g in gradients]
        norms = torch.stack(torch._foreach_norm(local, 2)).float()
        squares, largest, bad = norms.square(), _largest(local), _nonfinite(local, norms)
        squares, bad = _over_shards(squares, gradients, "sum"), _over_shards(bad, gradients, "sum")
        self._gradients.append(torch.stack((squares, _over_shards(largest, gradients, "max"), bad)))
        self._steps.append(step)
        if self.updates:
            self._weights = list(torch._foreach_mul([_local(p) for p in self._parameters], 1.0))

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Note the update that a due step made: after ``optimizer.step``, or after it was skipped."""
        if self._weights is None:
            return
        before, self._weights = self._weights, None
        weights = torch.stack(torch._foreach_norm(before, 2)).float().square()
        torch._foreach_sub_(before, [_local(p) for p in self._parameters])
        updates = torch.stack(torch._foreach_norm(before, 2)).float().square()
        both = [_over_shards(squares, self._parameters, "sum") for squares in (updates, weights)]
        self._ratios[len(self._steps) - 1] = torch.stack(both)

    def history(self) -> GradientHistory:
        """Everything noted so far. Waits for the device once, if something new was noted."""
        if self._steps:
            self._read = _joined(self._read, self._resolve())
            self._steps, self._gradients, self._ratios = [], [], {}
        return self._read

    def _resolve(self) -> GradientHistory:
        unseen = torch.full((2, len(self._parameters)), torch.nan, device=self._gradients[0].device)
        ratios = [self._ratios.get(k, unseen) for k in range(len(self._steps))]
        # Statistics of one step: squares, largest, non-finite count, squared update, squared weights; per parameter.
        values = torch.cat((torch.stack(self._gradients), torch.stack(ratios)), dim=1).cpu().numpy().astype(np.float64)
        columns = [np.flatnonzero(self._layer_of == k) for k in range(len(self.layers))]
        squares, bad, update, weights = (
            np.stack([values[:, row][:, c].sum(1) for c in columns], axis=1) for row in (0, 2, 3, 4)
        )
        # np.max keeps a NaN.
        largest = np.stack([values[:, 1][:, c].max(1) for c in columns], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt(update) / np.sqrt(weights)
        steps, norm = np.array(self._steps), np.sqrt(squares)
        return GradientHistory(self.layers, steps, norm, largest, bad, ratio, np.sqrt(weights))


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm over all elements of plain and sharded tensors together, whatever their meshes; on every rank alike.

    Each shard counts once and a replica once: a rank's own shards alone would give the norm divided by about √ranks.
    """
    tensors = list(tensors)
    squares = torch.stack([torch.linalg.vector_norm(_local(t), dtype=torch.float32) for t in tensors]).square()
    return _over_shards(squares, tensors, "sum").sum().sqrt()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _largest(tensors: list[Tensor]) -> Tensor:
    """Largest magnitude of each tensor, NaN if it holds one, 0 if it is empty."""
    zero = tensors[0].new_zeros(())
    extremes = [torch.aminmax(t) if t.numel() else (zero, zero) for t in tensors]
    lows, highs = zip(*extremes, strict=True)
    return torch.stack(lows + highs).float().abs().view(2, -1).amax(dim=0)


def _nonfinite(tensors: list[Tensor], norms: Tensor) -> Tensor:
    """Number of non-finite elements of each tensor."""
    if norms.device.type == "cpu":
        # There is no device to wait for here, so only the tensors in question are counted.
        finite = norms.isfinite().tolist()
        counts = [0 if fine else int((~torch.isfinite(t)).sum()) for t, fine in zip(tensors, finite, strict=True)]
        return torch.tensor(counts, dtype=torch.float32)
    # x·0 is 0 for finite x and NaN, which is not 0, for the rest: the 0-norm counts those.
    return torch.stack(torch._foreach_norm(torch._foreach_mul(tensors, 0.0), 0)).float()


def _over_shards(values: Tensor, owners: list[Tensor], how: str) -> Tensor:
    """One value per tensor, combined over the mesh axes on which that tensor is sharded.

    Tensors that are sharded alike share a collective, so their number does not grow with the model.
    """
    alike: dict[tuple[object, tuple[int, ...]], list[int]] = {}
    for k, tensor in enumerate(owners):
        if isinstance(tensor, DTensor):
            if any(p.is_partial() for p in tensor.placements):
                raise Refused("a norm of partial sums", fix="redistribute the tensor first")
            axes = tuple(axis for axis, p in enumerate(tensor.placements) if p.is_shard())
            alike.setdefault((tensor.device_mesh, axes), []).append(k)
    for (mesh, axes), places in alike.items():
        some = values[places]
        for axis in axes:
            op = distributed.ReduceOp.SUM if how == "sum" else distributed.ReduceOp.MAX
            distributed.all_reduce(some, op=op, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        values[places] = some
    return values


def _empty(layers: Layers) -> GradientHistory:
    nothing = np.zeros((0, len(layers)))
    return GradientHistory(layers, np.zeros(0, dtype=int), nothing, nothing, nothing, nothing, nothing)


def _joined(a: GradientHistory, b: GradientHistory) -> GradientHistory:
    names = ("steps", "norm", "largest", "nonfinite", "update_ratio", "weight")
    return GradientHistory(a.layers, *(np.concatenate((getattr(a, n), getattr(b, n))) for n in names))
