"""Cuts a sequence of layers into pipeline stages so that the slowest stage is as fast as can be: the exact optimum.

Pipelining splits no layer, so the heaviest layer bounds every split, and more stages do not lower that bound. Spare devices can:
a stage of cost c given r devices takes c/r by *replication* (its replicas take micro-batches in turn, which is throughput: one
micro-batch still needs c, and the weights lie on every replica) or c/r·(1 + overhead) by *tensor parallelism* (all work on each
micro-batch, weights and activations divided, the overhead being what its collectives cost).

Dynamic programming over (stages, spare devices, end), twice: first for the least slowest time, then, among all splits no slower,
for the least sum of squared times, which keeps the other stages apart from the bound too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from workbench.errors import Refused

Sharing = Literal["replication", "tensor"]
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Partition:
    """Stages as cut.

    Attributes:
        boundaries: the first layer of every stage but the first.
        stage_costs: the layers' costs, summed.
        devices: of every stage.
        stage_times: what the pipeline waits for: the cost as the stage's devices share it.
        stage_memory: of one device of every stage; ``None`` where no memory was given.
    """

    boundaries: tuple[int, ...]
    stage_costs: tuple[float, ...]
    devices: tuple[int, ...]
    stage_times: tuple[float, ...]
    stage_memory: tuple[float, ...] | None

    @property
    def slowest(self) -> float:
        return max(self.stage_times)

    @property
    def imbalance(self) -> float:
        """Slowest over mean time, less 1: by how much more than its share the pipeline's clock takes. 0 where all are 0."""
        mean = sum(self.stage_times) / len(self.stage_times)
        return max(self.slowest / mean - 1, 0.0) if mean else 0.0


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    memory: Sequence[float] | Sequence[Sequence[float]] | None = None,
    memory_limit: float = math.inf,
    devices: int | None = None,
    sharing: Sharing = "replication",
    overhead: float = 0.0,
) -> Partition:
    """Contiguous stages, none empty, whose slowest is as fast as any split's; of equal ones the most even.

    Args:
        costs: of every layer, embedding and head included: seconds, or whatever is to be balanced.
        memory: bytes of every layer, or such a row for every stage where they depend on it, as activations in flight do.
        memory_limit: bytes of one device.
        devices: to be spread over the stages, one each at least and not necessarily all; by default one each.
        sharing: what a stage does with more than one.
        overhead: of tensor parallelism, as a share of the stage's time.

    Raises:
        Refused: fewer layers or devices than stages, a cost that is none, or a limit that no split keeps.
    """
    spare = _check(costs, num_stages, devices, overhead)
    cost = _spans(costs)
    held = _memory_spans(memory, len(costs), num_stages)
    tensor = sharing == "tensor"

    def time(count: int) -> Array:
        return cost / count * (1 + overhead if tensor and count > 1 else 1.0)

    def bytes_of(stage: int, count: int) -> Array:
        return held[stage] / (count if tensor else 1)

    def within(stage: int, count: int, limit: float = math.inf) -> Array:
        times = time(count)
        return np.where((bytes_of(stage, count) <= memory_limit) & (times <= limit), times, math.inf)

    slowest, _ = _optimum(within, num_stages, spare, np.maximum)
    if math.isinf(slowest):
        least, _ = _optimum(bytes_of, num_stages, spare, np.maximum)
        raise Refused(
            "memory limit", memory_limit, allowed=f"{least:.6g} or more: no split has a smaller heaviest stage"
        )
    _, stages = _optimum(lambda s, count: np.square(within(s, count, slowest)), num_stages, spare, np.add)
    spans = [(s, count, begin, end) for s, (count, begin, end) in enumerate(stages)]
    return Partition(
        boundaries=tuple(begin for _, _, begin, _ in spans[1:]),
        stage_costs=tuple(float(cost[begin, end]) for _, _, begin, end in spans),
        devices=tuple(count for _, count, _, _ in spans),
        stage_times=tuple(float(time(count)[begin, end]) for _, count, begin, end in spans),
        stage_memory=None if memory is None else tuple(float(bytes_of(s, r)[a, b]) for s, r, a, b in spans),
    )


def _optimum(
    weight: Callable[[int, int], Array], num_stages: int, spare: int, combine: np.ufunc
) -> tuple[float, list[tuple[int, int, int]]]:
    """The least ``combine`` over stages of ``weight(stage, devices)[begin, end]``, and (devices, begin, end) of its stages."""
    ends = np.arange(weight(0, 1).shape[0])
    best = np.full((spare + 1, len(ends)), math.inf)  # by spare devices used and end
    best[0, 0] = 0.0
    choices = []
    for stage in range(num_stages):
        after = np.full_like(best, math.inf)
        choice = np.zeros((*best.shape, 2), dtype=int)  # spare devices of this stage, its begin
        for extra in range(spare + 1):
            weights = weight(stage, extra + 1)
            for used in range(spare + 1 - extra):
                total = combine(best[used][:, None], weights)
                begin = total.argmin(axis=0)
                least = total[begin, ends]
                better = least < after[used + extra]
                after[used + extra][better] = least[better]
                choice[used + extra][better] = np.stack([np.full_like(begin, extra), begin], axis=1)[better]
        choices.append(choice)
        best = after
    used, end = int(best[:, -1].argmin()), len(ends) - 1
    value, stages = float(best[used, end]), []
    for choice in reversed(choices):
        extra, begin = (int(v) for v in choice[used, end])
        stages.append((extra + 1, begin, end))
        used, end = used - extra, begin
    return value, stages[::-1]


def _spans(values: Sequence[float]) -> Array:
    """Sums over layers ``[begin, end)``; infinite where that is empty. Added up span by span: a difference of running sums
    would lose small layers beside large ones."""
    spans = np.full((len(values) + 1, len(values) + 1), math.inf)
    for begin in range(len(values)):
        spans[begin, begin + 1 :] = np.cumsum(values[begin:])
    return spans


def _memory_spans(
    memory: Sequence[float] | Sequence[Sequence[float]] | None, num_layers: int, num_stages: int
) -> list[Array]:
    if memory is None:
        return [np.zeros((num_layers + 1, num_layers + 1))] * num_stages
    by_stage = np.ndim(memory) == 2
    if np.shape(memory) != ((num_stages, num_layers) if by_stage else (num_layers,)):
        allowed = f"one value for each of {num_layers} layers, or a row of them for each of {num_stages} stages"
        raise Refused("memory of shape", np.shape(memory), allowed=allowed)
    for value in np.ravel(memory):
        _check_value("memory of a layer", float(value))
    rows = np.broadcast_to(memory, (num_stages, num_layers))
    if by_stage:
        return [_spans(row.tolist()) for row in rows]
    return [_spans(rows[0].tolist())] * num_stages


def _check(costs: Sequence[float], num_stages: int, devices: int | None, overhead: float) -> int:
    """The devices beyond one per stage."""
    if num_stages < 1:
        raise Refused("stages", num_stages, allowed="1 or more")
    if len(costs) < num_stages:
        raise Refused(
            "stages",
            num_stages,
            allowed=f"at most the {len(costs)} layers",
            fix="a layer is not split: take fewer stages",
        )
    for cost in costs:
        _check_value("cost of a layer", cost)
    _check_value("overhead", overhead)
    if devices is not None and devices < num_stages:
        raise Refused("devices", devices, allowed=f"{num_stages} or more, one for each stage")
    return 0 if devices is None else devices - num_stages


def _check_value(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise Refused(name, value, allowed="0 or more, finite")


def spans_of(boundaries: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """(first layer, layer after the last) of every stage."""
    return list(pairwise((0, *boundaries, num_layers)))
