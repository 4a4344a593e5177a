"""What a pipeline schedule costs: its timeline, bubble and activations in flight, simulated from the time of every pass.

A rank takes its passes in the table's order; each starts when the rank is free and its input is there. Transfers between ranks
run beside the passes and take a constant time; within a rank there are none. Nothing here is measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from workbench.errors import Refused
from workbench.parallel.schedules import Action, Table, num_chunks

if TYPE_CHECKING:
    import numpy as np

Times = float | Sequence[float]


class PassTimes(NamedTuple):
    """How long the passes of one micro-batch take: one number for all stages, or one per stage. B takes I + W."""

    forward: Times = 1.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0


@dataclass(frozen=True)
class Compiled:
    """A table as numbers: its passes in an order in which each comes after what it waits for, so that one sweep times them all.

    Attributes:
        table: the rows that it came from.
        rows: for every rank, the positions of its passes in that order.
        passes: (rank, stage, kind as an index of ``"FBIW"``, position whose output it needs or -1, whether that lies on
            another rank), in that order.
        peak_in_flight: most activations held at once per stage, from a micro-batch's F until its W or B.
        peak_in_flight_of_rank: the same over all stages of a rank.
    """

    table: Table
    rows: tuple[tuple[int, ...], ...]
    passes: tuple[tuple[int, int, int, int, bool], ...]
    peak_in_flight: tuple[int, ...]
    peak_in_flight_of_rank: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.peak_in_flight)


@dataclass(frozen=True)
class Simulation:
    """One run of a table. ``start`` and ``end`` have the table's shape; times are in the unit that the pass times came in.

    ``idle`` of a rank is ``waiting`` for another rank's pass, plus ``transfer_wait`` (only the transfer was missing), plus
    ``drain`` (it had finished, another had not).
    """

    table: Table
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    transfer_wait: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_in_flight_of_rank: tuple[int, ...]

    @cached_property
    def makespan(self) -> float:
        return max(row[-1] for row in self.end)

    @property
    def drain(self) -> tuple[float, ...]:
        return tuple(self.makespan - row[-1] for row in self.end)

    @property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_of_rank(self) -> tuple[float, ...]:
        return tuple(_share(idle, self.makespan) for idle in self.idle)

    @property
    def bubble_fraction(self) -> float:
        """Idle over total: 1 − Σ busy / (ranks · makespan)."""
        return _share(sum(self.idle), len(self.table) * self.makespan)

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble rate of Qi et al. (Zero Bubble Pipeline Parallelism, ICLR 2024): ``(cost − m·(F+B+W)) / cost``.

        ``cost`` is the longest time from a rank's first pass to the end of its last. It asks what a step costs where the next one
        may begin on the first ranks while the last still work, so it is less than ``bubble_fraction``.
        """
        cost = max(end[-1] - start[0] for start, end in zip(self.start, self.end, strict=True))
        return _share(cost - max(self.busy), cost)


def simulate(
    table: Table | Compiled, times: PassTimes | tuple[Times, Times, Times], transfer: float = 0.0
) -> Simulation:
    """Times every pass of a table.

    Args:
        table: from ``schedule_table``, or of your own.
        times: of a forward pass, a backward pass for the input and one for the weights; each a number or one per stage.
        transfer: how long an activation or its gradient is on the way between two ranks.

    Raises:
        Refused: a time is negative or no number, their count is not that of the stages, or the table cannot run.
    """
    compiled = table if isinstance(table, Compiled) else compile_table(table)
    durations = pass_durations(compiled.num_stages, times)
    check_time("transfer", transfer)
    ranks = len(compiled.rows)
    ends, starts = [0.0] * len(compiled.passes), [0.0] * len(compiled.passes)
    free, busy, waiting, on_the_way = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    for k, (rank, stage, kind, source, crosses) in enumerate(compiled.passes):
        begin = free[rank]
        if crosses and (left := ends[source]) + transfer > begin:
            waiting[rank] += max(left - begin, 0.0)
            on_the_way[rank] += left + transfer - max(left, begin)
            begin = left + transfer
        duration = durations[kind][stage]
        starts[k] = begin
        ends[k] = free[rank] = begin + duration
        busy[rank] += duration
    return Simulation(
        table=compiled.table,
        start=tuple(tuple([starts[k] for k in row]) for row in compiled.rows),
        end=tuple(tuple([ends[k] for k in row]) for row in compiled.rows),
        busy=tuple(busy),
        waiting=tuple(waiting),
        transfer_wait=tuple(on_the_way),
        peak_in_flight=compiled.peak_in_flight,
        peak_in_flight_of_rank=compiled.peak_in_flight_of_rank,
    )


def makespans(table: Table | Compiled, times: "np.ndarray", transfer: "np.ndarray | float" = 0.0) -> "np.ndarray":
    """Makespans of one table under many sets of times, all in one sweep.

    Args:
        times: [3, stages, n] of F, I and W.
        transfer: one, or [n].

    Returns:
        [n]
    """
    import numpy as np

    compiled = table if isinstance(table, Compiled) else compile_table(table)
    forward, backward_input, backward_weight = times
    durations = (forward, backward_input + backward_weight, backward_input, backward_weight)
    free = np.zeros((len(compiled.rows), times.shape[2]))
    ends = np.empty((len(compiled.passes), times.shape[2]))
    for k, (rank, stage, kind, source, crosses) in enumerate(compiled.passes):
        begin = np.maximum(free[rank], ends[source] + transfer) if crosses else free[rank]
        ends[k] = free[rank] = begin + durations[kind][stage]
    return np.asarray(free.max(axis=0))


@lru_cache(maxsize=64)
def compile_table(table: Table) -> Compiled:
    """Puts a table's passes in an order in which they can run.

    Raises:
        Refused: a pass stands twice, comes before its own forward or input pass, or the ranks wait for one another for ever.
    """
    if not table or not all(table):
        raise Refused("schedule table", allowed="one pass or more on every rank")
    stages = 1 + max(stage for row in table for _, stage, _ in row)
    microbatches = 1 + max(i for row in table for _, _, i in row)
    rank_of = {stage: rank for rank, row in enumerate(table) for _, stage, _ in row}
    # Passes by number: all F, then all I or B, then all W, each by stage, then by micro-batch.
    size = stages * microbatches
    position = [-1] * (3 * size)
    passes: list[tuple[int, int, int, int, bool]] = []
    at = [0] * len(table)
    waiting_for: dict[int, int] = {}  # the pass that a stopped rank needs
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        row = table[rank]
        for action in row[at[rank] :]:
            kind, stage, i = action
            number = stage * microbatches + i
            source = -1
            if kind == "F":
                source = number - microbatches if stage else -1
            else:
                own, number = (number, number + size) if kind != "W" else (number + size, number + 2 * size)
                if position[own] < 0:
                    raise Refused(
                        f"schedule table: rank {rank} has {_say(action)} before the pass of its own that it needs"
                    )
                if kind != "W" and stage < stages - 1:
                    source = number + microbatches
            if source >= 0 and position[source] < 0:
                waiting_for[source] = rank
                break
            if position[number] >= 0:
                raise Refused(f"schedule table: {_say(action)} stands twice")
            position[number] = len(passes)
            if kind == "B":
                position[number + size] = len(passes)
            crosses = source >= 0 and rank_of[stage - 1 if kind == "F" else stage + 1] != rank
            passes.append((rank, stage, "FBIW".index(kind), position[source] if source >= 0 else -1, crosses))
            at[rank] += 1
            if number in waiting_for:
                ready.append(waiting_for.pop(number))
    if waiting_for:
        stuck = sorted((rank, _say(table[rank][at[rank]])) for rank in waiting_for.values())
        said = ", ".join(f"rank {rank} waits before {what}" for rank, what in stuck)
        raise Refused(
            f"schedule table that deadlocks: {said}", fix="put what these need before what its own rank waits for"
        )
    rows: list[list[int]] = [[] for _ in table]
    for k, (rank, *_) in enumerate(passes):
        rows[rank].append(k)
    return Compiled(table, tuple(map(tuple, rows)), tuple(passes), *_peaks(table, stages))


def _peaks(table: Table, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    of_stage, of_rank = [0] * stages, []
    for row in table:
        held = [0] * stages
        total = most = 0
        for kind, stage, _ in row:
            if kind == "I":
                continue
            step = 1 if kind == "F" else -1
            held[stage] += step
            total += step
            if step > 0:
                of_stage[stage] = max(of_stage[stage], held[stage])
                most = max(most, total)
        of_rank.append(most)
    return tuple(of_stage), tuple(of_rank)


def pass_durations(stages: int, times: PassTimes | tuple[Times, Times, Times]) -> tuple[list[float], ...]:
    """Seconds per stage of F, B, I and W, each checked."""
    forward, backward_input, backward_weight = (
        _per_stage(name, value, stages) for name, value in zip(PassTimes._fields, times, strict=True)
    )
    whole = [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
    return forward, whole, backward_input, backward_weight


def _per_stage(name: str, value: Times, stages: int) -> list[float]:
    many = [float(v) for v in value] if isinstance(value, Iterable) else [float(value)] * stages
    if len(many) != stages:
        raise Refused(f"{name} times", len(many), allowed=f"one, or one for each of {stages} stages")
    for v in many:
        check_time(name.replace("_", " "), v)
    return many


def check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise Refused(f"{name} time", value, allowed="0 or more, finite")


def closed_form(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> tuple[str, float] | None:
    """The bubble fraction by formula, where stages are equal and transfers free: its formula and value.

    (p−1)/(m+p−1) for GPipe and 1F1B; (p−1)/(v·m+p−1) where v chunks loop (Narayanan et al. 2021, which counts it over the ideal
    time m instead; Lamy-Poirier 2022). ``None`` where it depends on how F, I and W compare, or the loop does not fill.
    """
    p, m, v = ranks, microbatches, num_chunks(name, chunks)
    if name in ("gpipe", "1f1b"):
        return "(p−1)/(m+p−1)", (p - 1) / (m + p - 1)
    if name in ("interleaved-1f1b", "looped-bfs") and m >= p:
        return "(p−1)/(v·m+p−1)", (p - 1) / (v * m + p - 1)
    return None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _say(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.microbatch} in stage {action.stage}"
