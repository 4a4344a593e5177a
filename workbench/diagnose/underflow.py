"""How much of a gradient fp16 would lose: shares and histograms by binary exponent, from one count per layer.

An fp16 number (IEEE 754 binary16) is subnormal, and loses bits, under 2^-14; under 2^-25 it rounds to zero; from 65520 on it
rounds to infinity. All shares follow from a histogram of exponents, at any loss scale that is a power of two.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from workbench.errors import Refused

LOWEST, HIGHEST = -149, 127
"""Exponents of fp32: the smallest subnormal is 2^-149, the largest number is just under 2^128."""
NUM_BINS = HIGHEST - LOWEST + 1
ZERO, NONFINITE = NUM_BINS, NUM_BINS + 1
SUBNORMAL_BELOW, ZERO_BELOW, INFINITE_FROM = -14, -25, 16
CHUNK = 2**24
"""Elements counted at once: fp32 counts are exact up to here."""


def exponent_counts(values: Tensor) -> Tensor:
    """How many elements have each exponent: int64 of ``NUM_BINS + 2``, the last two for zeros and for non-finite ones.

    Bin ``k`` holds the numbers of magnitude in [2^(k-149), 2^(k-148)). No host synchronisation.
    """
    local = values.to_local() if isinstance(values, DTensor) else values
    counts = torch.zeros(NUM_BINS + 2, dtype=torch.int64, device=local.device)
    for chunk in local.detach().float().flatten().split(CHUNK):
        # frexp gives a mantissa in [0.5, 1); an exponent of ours is one less.
        exponent = torch.frexp(chunk).exponent - 1
        place = torch.where(chunk == 0, ZERO, exponent.clamp(LOWEST, HIGHEST) - LOWEST)
        place = torch.where(torch.isfinite(chunk), place, NONFINITE)
        counts += torch.histc(place.float(), NUM_BINS + 2, 0, NUM_BINS + 1).to(torch.int64)
    return counts


@dataclass(frozen=True)
class UnderflowRow:
    """One layer's gradient. ``counts`` as from ``exponent_counts``; shares are of its finite elements.

    A scale moves exponents, so shares at several scales come from one measurement. A magnitude of exactly 2^-25, a tie that
    rounds to zero, counts as kept.
    """

    layer: str
    counts: np.ndarray

    @property
    def elements(self) -> int:
        return int(self.counts.sum())

    @property
    def nonfinite(self) -> int:
        return int(self.counts[NONFINITE])

    @property
    def zero(self) -> float:
        """Share of elements that are exactly zero already."""
        return self._share(self.counts[ZERO])

    def subnormal(self, scale: float = 1.0) -> float:
        """Share that fp16 would hold with fewer bits, at a loss scale of ``scale``."""
        return self._share(self._between(ZERO_BELOW, SUBNORMAL_BELOW, scale))

    def flushed(self, scale: float = 1.0) -> float:
        """Share that is not zero and would become zero in fp16."""
        return self._share(self._between(LOWEST, ZERO_BELOW, scale))

    def overflowed(self, scale: float = 1.0) -> float:
        """Share that would become infinite in fp16: from 2^16 on, since the histogram cannot see 65520."""
        return self._share(self._between(INFINITE_FROM, HIGHEST + 1, scale))

    def histogram(self) -> dict[int, int]:
        """Elements by exponent, over the occupied range; zeros and non-finite elements apart."""
        there = np.flatnonzero(self.counts[:NUM_BINS])
        return {} if not len(there) else {int(k) + LOWEST: int(self.counts[k]) for k in range(there[0], there[-1] + 1)}

    def _between(self, low: int, high: int, scale: float) -> int:
        """Elements whose scaled exponent lies in [low, high); ``low`` of ``LOWEST`` means no lower end."""
        mantissa, shift = math.frexp(scale)
        if mantissa != 0.5:
            raise Refused("loss scale", scale, allowed="powers of two", fix=f"use {2.0 ** (shift - 1):g}")
        first = 0 if low == LOWEST else low - (shift - 1) - LOWEST
        last = NUM_BINS if high > HIGHEST else high - (shift - 1) - LOWEST
        return int(self.counts[max(first, 0) : max(min(last, NUM_BINS), 0)].sum())

    def _share(self, count: int) -> float:
        finite = self.elements - self.nonfinite
        return float(count) / finite if finite else 0.0


def parameter_underflow(model: nn.Module, *, grads_scaled_by: float = 1.0) -> list[UnderflowRow]:
    """One row per parameter that has a gradient, whose numbers are of the gradient *without* the loss scale.

    Parameters' gradients are fp32 under autocast, but each came out of a product in half precision: what was flushed there
    is an exact zero here. One host synchronisation. Sharded gradients give this rank's shard.

    Args:
        grads_scaled_by: the loss scale that the gradients still carry; 1 after ``unscale_``.
    """
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return _rows({name: exponent_counts(grad) for name, grad in named}, grads_scaled_by)


def total(rows: Iterable[UnderflowRow], layer: str = "all layers") -> UnderflowRow:
    return UnderflowRow(layer, np.sum([row.counts for row in rows], axis=0))


class OutputGradients:
    """A context that counts the gradients of modules' *outputs*, in the dtype in which they flow back.

    Here underflow happens: in fp16 a flushed element stops the gradient of everything below it. Costs a pass over each
    gradient; meant for single steps. The hooks go with the context.

    Args:
        modules: names of the modules to watch; those without children when ``None``.
    """

    def __init__(self, model: nn.Module, modules: Iterable[str] | None = None) -> None:
        there = dict(model.named_modules())
        names = [n for n, m in there.items() if not any(m.children())] if modules is None else list(modules)
        self._modules = {name: there[name] for name in names}
        self._counts: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "OutputGradients":
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._watch(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def rows(self, *, grads_scaled_by: float = 1.0) -> list[UnderflowRow]:
        """One row per module that a gradient reached, in forward order of the model; summed over the calls."""
        return _rows({n: self._counts[n] for n in self._modules if n in self._counts}, grads_scaled_by)

    def _watch(self, name: str) -> Any:
        def count(grad: Tensor) -> None:
            found = exponent_counts(grad)
            self._counts[name] = self._counts[name] + found if name in self._counts else found

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(count)

        return hook


def _rows(counts: Mapping[str, Tensor], scaled_by: float) -> list[UnderflowRow]:
    if not counts:
        return []
    table = torch.stack(list(counts.values())).cpu().numpy()
    mantissa, shift = math.frexp(scaled_by)
    if mantissa != 0.5:
        raise Refused("loss scale of the gradients", scaled_by, allowed="powers of two", fix="measure after unscale_")
    table[:, :NUM_BINS] = _shifted(table[:, :NUM_BINS], shift - 1)
    return [UnderflowRow(name, row) for name, row in zip(counts, table, strict=True)]


def _shifted(table: np.ndarray, down: int) -> np.ndarray:
    """Bins moved towards smaller exponents by ``down``; what falls off an end is kept in its last bin."""
    places = np.clip(np.arange(NUM_BINS) - down, 0, NUM_BINS - 1)
    moved = np.zeros_like(table)
    np.add.at(moved.T, places, table.T)
    return moved
