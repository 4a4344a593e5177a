"""Searches pipelines by simulation: where to cut the model, how many micro-batches, which schedule, within a memory limit.

All candidates do the same work, one optimizer step over ``global_batch`` samples: the fastest step has the least time per sample.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from workbench.errors import Refused
from workbench.parallel.schedules import LOOPED, NAMES, TIMED, num_chunks, schedule_table, stages_of_rank
from workbench.planner.balance import balanced, balanced_by_stage
from workbench.planner.pipeline import Compiled, check_time, compile_table, makespans, simulate

Split = Callable[[Sequence[float], int], Sequence[int]]
"""From a cost per layer and a number of stages to boundaries: the first layer of every stage but the first."""
REFINED = 5
"""How many of the best have their boundaries moved about."""


class LayerCosts(NamedTuple):
    """What one layer costs. A pass over b samples takes b times the seconds here, and ``fixed`` once.

    Attributes:
        forward, backward_input, backward_weight: seconds per sample.
        activation_bytes: kept per sample from the forward pass until the backward pass has ended.
        weight_bytes: held all the time: weights, gradients, optimizer state.
        fixed: seconds of each of the three passes that do not shrink with the micro-batch, such as launching kernels.
    """

    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: float = 0.0
    weight_bytes: float = 0.0
    fixed: float = 0.0


class Shape(NamedTuple):
    """A schedule with its chunks per rank and micro-batches per step."""

    schedule: str
    chunks: int
    microbatches: int


class Candidate(NamedTuple):
    """A pipeline that fits. Seconds, bubble and bytes are simulated.

    ``split`` is the name of what cut the model, ``moved`` where boundaries were improved since; ``boundaries`` are the first
    layers of all stages but the first; ``peak_bytes`` has one number per rank.
    """

    shape: Shape
    split: str
    boundaries: tuple[int, ...]
    makespan: float
    time_per_sample: float
    bubble_fraction: float
    peak_bytes: tuple[float, ...]


class Excluded(NamedTuple):
    """What was tried and does not work, and why; no ``split`` where none would."""

    shape: Shape
    split: str
    reason: str


class Found(NamedTuple):
    """Candidates from fastest to slowest, and the rest."""

    ranked: list[Candidate]
    excluded: list[Excluded]

    @property
    def best(self) -> Candidate:
        """Raises ``Refused`` where nothing fits, with the reason of the one that came nearest."""
        if not self.ranked:
            reasons = [e.reason for e in self.excluded]
            raise Refused(
                "pipeline: none of those tried fits", fix=f"allow more; the last was left out because {reasons[-1]}"
            )
        return self.ranked[0]


class Setting(NamedTuple):
    """What all candidates of a search share."""

    layers: Sequence[LayerCosts]
    ranks: int
    global_batch: int
    memory_limit: float
    transfer_per_sample: float
    transfer_latency: float


def search(
    layers: Sequence[LayerCosts],
    ranks: int,
    global_batch: int,
    *,
    memory_limit: float = math.inf,
    transfer_per_sample: float = 0.0,
    transfer_latency: float = 0.0,
    schedules: Sequence[str] = NAMES,
    chunks: Sequence[int] = (2, 4),
    microbatches: Sequence[int] | None = None,
    splits: dict[str, Split] | None = None,
) -> Found:
    """Simulates every combination and moves the boundaries of the best about until that helps no more.

    Args:
        ranks: devices in the pipeline.
        global_batch: samples per optimizer step.
        memory_limit: bytes of a rank for weights and activations together.
        transfer_per_sample, transfer_latency: seconds from rank to rank.
        chunks: per rank, tried where the schedule loops.
        microbatches: tried; by default all divisors of the global batch.
        splits: tried, by name; by default even in time, in bytes with what is in flight, and in layers.

    Raises:
        Refused: no layers, fewer than one sample, or a cost that is no time.
    """
    if not layers or global_batch < 1:
        raise Refused("layers and samples", (len(layers), global_batch), allowed="one or more of each")
    for layer in layers:
        for name in ("forward", "backward_input", "backward_weight", "fixed"):
            check_time(name.replace("_", " "), getattr(layer, name))
    setting = Setting(layers, ranks, global_batch, memory_limit, transfer_per_sample, transfer_latency)
    divisors = [m for m in range(1, global_batch + 1) if global_batch % m == 0]
    shapes = [(s, v) for s in schedules for v in (chunks if s in LOOPED else [num_chunks(s)])]
    ranked, excluded = [], []
    for (schedule, v), m in itertools.product(shapes, microbatches or divisors):
        for tried in _tries(setting, Shape(schedule, v, m), splits):
            if isinstance(tried, Candidate):
                ranked.append(tried)
            else:
                excluded.append(tried)
    ranked.sort(key=lambda c: c.time_per_sample)
    ranked[:REFINED] = [_refined(setting, c) for c in ranked[:REFINED]]
    distinct = {(c.shape, c.boundaries): c for c in ranked}.values()  # several may have moved to the same
    return Found(sorted(distinct, key=lambda c: c.time_per_sample), excluded)


def _tries(setting: Setting, shape: Shape, splits: dict[str, Split] | None) -> Iterator[Candidate | Excluded]:
    """One shape over all splits."""
    layers, stages = setting.layers, setting.ranks * shape.chunks
    if setting.global_batch % shape.microbatches:
        yield Excluded(shape, "", f"{shape.microbatches} micro-batches do not divide {setting.global_batch} samples")
        return
    if stages > len(layers):
        yield Excluded(shape, "", f"{stages} stages of {len(layers)} layers")
        return
    try:
        table = _table(setting, shape)
    except Refused as refused:
        yield Excluded(shape, "", str(refused))
        return
    samples = setting.global_batch // shape.microbatches
    seconds = [samples * (c.forward + c.backward_input + c.backward_weight) + 3 * c.fixed for c in layers]
    held = [[c.weight_bytes + k * samples * c.activation_bytes for c in layers] for k in table.peak_in_flight]
    cuts: dict[str, Sequence[int]] = {
        "time": balanced(seconds, stages), "bytes": balanced_by_stage(held), "layers": balanced([1.0] * len(layers), stages)
    }  # fmt: skip
    if splits:
        cuts = {name: cut(seconds, stages) for name, cut in splits.items()}
    seen: set[tuple[int, ...]] = set()
    for name, boundaries in cuts.items():
        if tuple(boundaries) not in seen:
            seen.add(tuple(boundaries))
            yield _tried(setting, shape, name, tuple(boundaries), None if shape.schedule in TIMED else table)


def _tried(
    setting: Setting, shape: Shape, split: str, boundaries: tuple[int, ...], table: Compiled | None
) -> Candidate | Excluded:
    times, activations, weights = _of_stages(setting, shape, boundaries)
    table = table or _table(setting, shape, times)
    ranks = range(setting.ranks)
    held = [sum(weights[s] for s in stages_of_rank(shape.schedule, r, len(ranks), shape.chunks)) for r in ranks]
    peaks = [w + a for w, a in zip(held, peak_activation_bytes(table, activations), strict=True)]
    worst = max(ranks, key=peaks.__getitem__)
    if peaks[worst] > setting.memory_limit:
        said = (
            f"rank {worst} needs {_gib(peaks[worst])} of {_gib(setting.memory_limit)}: {_gib(held[worst])} of weights and "
            f"{_gib(peaks[worst] - held[worst])} of activations, at most {table.peak_in_flight_of_rank[worst]} in flight"
        )
        return Excluded(shape, split, said)
    run = simulate(table, _rows(times), _transfer(setting, shape))
    per_sample = run.makespan / setting.global_batch
    return Candidate(shape, split, boundaries, run.makespan, per_sample, run.bubble_fraction, tuple(peaks))


def _table(setting: Setting, shape: Shape, times: np.ndarray | None = None) -> Compiled:
    timed = {} if times is None else {"times": _rows(times), "transfer": _transfer(setting, shape)}
    return compile_table(
        schedule_table(shape.schedule, setting.ranks, shape.microbatches, shape.chunks, **timed)  # type: ignore[arg-type]
    )


def _rows(times: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    forward, backward_input, backward_weight = (tuple(row.tolist()) for row in times)
    return forward, backward_input, backward_weight


def _transfer(setting: Setting, shape: Shape) -> float:
    return setting.transfer_latency + setting.global_batch // shape.microbatches * setting.transfer_per_sample


def _of_stages(
    setting: Setting, shape: Shape, boundaries: Sequence[int]
) -> tuple[np.ndarray, list[float], list[float]]:
    """Of every stage: seconds of its F, I and W [3, stages], bytes of a micro-batch's activations, bytes of its weights."""
    samples = setting.global_batch // shape.microbatches
    sums = np.add.reduceat(np.array(setting.layers, dtype=float), [0, *boundaries], axis=0)
    return samples * sums[:, :3].T + sums[:, 5], (samples * sums[:, 3]).tolist(), sums[:, 4].tolist()


def peak_activation_bytes(table: Compiled, bytes_of_stage: Sequence[float]) -> list[float]:
    """Most bytes of activations that each rank holds at once, when one micro-batch's take ``bytes_of_stage``."""
    peaks = []
    for row in table.table:
        held = most = 0.0
        for kind, stage, _ in row:
            if kind == "F":
                held += bytes_of_stage[stage]
                most = max(most, held)
            elif kind != "I":
                held -= bytes_of_stage[stage]
        peaks.append(most)
    return peaks


def _refined(setting: Setting, candidate: Candidate) -> Candidate:
    """Moves one boundary by one layer at a time, always the move that saves most, while one does and still fits."""
    shape = candidate.shape
    timed = shape.schedule in TIMED
    while moves := list(_neighbours(candidate.boundaries, len(setting.layers))):
        table = _table(setting, shape, _of_stages(setting, shape, candidate.boundaries)[0] if timed else None)
        times = np.stack([_of_stages(setting, shape, b)[0] for b in moves], axis=2)
        spans = makespans(table, times, _transfer(setting, shape))
        promising = [moves[k] for k in np.argsort(spans) if spans[k] < candidate.makespan * (1 - 1e-9)]
        tried = (_tried(setting, shape, "moved", b, None if timed else table) for b in promising)
        better = (t for t in tried if isinstance(t, Candidate) and t.makespan < candidate.makespan * (1 - 1e-9))
        moved = next(better, None)
        if moved is None:
            break
        candidate = moved
    return candidate


def _neighbours(boundaries: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    for k, step in itertools.product(range(len(boundaries)), (-1, 1)):
        moved = (*boundaries[:k], boundaries[k] + step, *boundaries[k + 1 :])
        if all(a < b for a, b in itertools.pairwise((0, *moved, num_layers))):
            yield moved


def _gib(value: float) -> str:
    return f"{value / 2**30:.3g} GiB"
