"""Pipeline schedules as tables: what every rank does, in what order. No torch.

Symbols: p ranks, m micro-batches, v model chunks per rank; p·v stages. ``actions`` explains the passes F, B, I and W.
"""

from collections.abc import Iterator

from workbench.errors import Refused, nearest
from workbench.parallel.actions import Action, Kind, Row, Table
from workbench.parallel.zero_bubble import Times, zero_bubble_table

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "zb-1p", "zb-2p")
LOOPED = ("interleaved-1f1b", "looped-bfs")
V_SHAPED = ("zb-v", "dualpipe-v")
TIMED = {"zb-1p": 1, "zb-2p": 2}
"""Schedules placed by the times of the passes, and the activations that a rank may hold, over p."""
SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "zb-1p", "zb-2p")
"""Schedules that hold I and W actions, and so need a backward pass in two parts."""


def num_chunks(name: str, chunks: int | None = None) -> int:
    """Model chunks on each rank: 2 where a schedule folds the model into a V, as many as wanted (2) where it loops.

    Raises:
        Refused: no such schedule, or it cannot have so many.
    """
    if name not in NAMES:
        raise Refused("schedule", name, allowed=", ".join(NAMES), fix=nearest(name, NAMES))
    if name in LOOPED:
        if chunks is not None and chunks < 2:
            fix = f"with one chunk, {'1f1b' if name == 'interleaved-1f1b' else 'gpipe'} is the schedule"
            raise Refused(f"chunks of {name}", chunks, allowed="2 or more", fix=fix)
        return chunks or 2
    fixed = 2 if name in V_SHAPED else 1
    if chunks not in (None, fixed):
        raise Refused(
            f"chunks of {name}", chunks, allowed=str(fixed), fix=f"leave them out, or take one of {', '.join(LOOPED)}"
        )
    return fixed


def rank_of_stage(name: str, stage: int, ranks: int, chunks: int | None = None) -> int:
    """The rank that holds a stage: ``stage mod p`` in a loop; in a V, rank r holds stages r and 2p−1−r."""
    v = num_chunks(name, chunks)
    if not 0 <= stage < ranks * v:
        raise Refused("stage", stage, allowed=f"0 … {ranks * v - 1}")
    if name in V_SHAPED:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


def stages_of_rank(name: str, rank: int, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The stages that a rank holds, in the model's order."""
    v = num_chunks(name, chunks)
    return (rank, 2 * ranks - 1 - rank) if name in V_SHAPED else tuple(rank + ranks * c for c in range(v))


def schedule_table(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    times: tuple[Times, Times, Times] = (1.0, 1.0, 1.0),
    transfer: float = 0.0,
    kept_for_weights: float = 1.0,
) -> Table:
    """One row of actions per rank, in order of execution.

    ``gpipe``: Huang et al. 2019. ``1f1b``: PipeDream-Flush, Narayanan et al. 2021, whose interleaving over v chunks is
    ``interleaved-1f1b``. ``looped-bfs``: Breadth-First Pipeline Parallelism, Lamy-Poirier 2022. ``zb-h1``, ``zb-h2``: Qi et al.,
    Zero Bubble Pipeline Parallelism, ICLR 2024. ``zb-v``: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    ``dualpipe-v``: DeepSeek's DualPipe cut in half, Sea AI 2025; what it overlaps stands here as F, then B. ``zb-1p``, ``zb-2p``:
    Zero Bubble's heuristic within the activations of p or 2p micro-batches, the one kind of table that depends on ``times``.

    Args:
        ranks: p, the devices in the pipeline.
        microbatches: m, per optimizer step.
        chunks: v, of schedules that loop; 2 by default.
        times: of F, I and W, each a number or one per rank, for ``zb-1p`` and ``zb-2p``.
        transfer: between ranks, in the unit of ``times``, for the same two.
        kept_for_weights: share of an activation that is still held from I until W, for the same two. Qi et al. count 32 of
            34 + 5·a·s/h bytes (a heads, s tokens, width h); everything, the default, is what autograd holds at worst.

    Raises:
        Refused: they do not fit the schedule, with the nearest that do.
    """
    v = num_chunks(name, chunks)
    _check(name, ranks, microbatches)
    p, m = ranks, microbatches
    if name in TIMED:
        if not 0 <= kept_for_weights <= 1:
            raise Refused("share of an activation kept for the weights' pass", kept_for_weights, allowed="0 … 1")
        return zero_bubble_table(p, m, times, transfer, limit=TIMED[name] * p, kept_for_weights=kept_for_weights)
    rows: dict[str, Iterator[Row]] = {
        "gpipe": (_gpipe(r, m) for r in range(p)),
        "1f1b": (_one_f_one_b(r, p, m) for r in range(p)),
        "interleaved-1f1b": (_interleaved(r, p, m, v) for r in range(p)),
        "looped-bfs": (_looped_bfs(r, p, m, v) for r in range(p)),
        "zb-h1": (_split_backward(r, m, warmup=p - r, delay=r) for r in range(p)),
        "zb-h2": (_split_backward(r, m, warmup=2 * (p - r) - 1, delay=2 * r) for r in range(p)),
        "zb-v": (_zero_bubble_v(r, p, m) for r in range(p)),
        "dualpipe-v": (_DualPipeV(r, p, m).row() for r in range(p)),
    }
    return tuple(rows[name])


def _check(name: str, ranks: int, microbatches: int) -> None:
    if ranks < 1:
        raise Refused("ranks of the pipeline", ranks, allowed="1 or more")
    if microbatches < 1:
        raise Refused("micro-batches", microbatches, allowed="1 or more")
    if name == "interleaved-1f1b" and microbatches % ranks:
        below = microbatches - microbatches % ranks
        near = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise Refused(
            f"micro-batches of {name} on {ranks} ranks",
            microbatches,
            allowed=f"multiples of {ranks}",
            fix=f"take {near}",
        )
    if name == "dualpipe-v" and microbatches < 2 * ranks:
        raise Refused(
            f"micro-batches of {name} on {ranks} ranks", microbatches, allowed=f"{2 * ranks} or more (two per rank)",
            fix=f"take {2 * ranks}, or zb-v, which takes any number",
        )  # fmt: skip


def _gpipe(stage: int, m: int) -> Row:
    return (*(Action("F", stage, i) for i in range(m)), *(Action("B", stage, i) for i in range(m)))


def _one_f_one_b(stage: int, p: int, m: int) -> Row:
    forward = [Action("F", stage, i) for i in range(m)]
    backward = [Action("B", stage, i) for i in range(m)]
    return tuple(_alternate(forward, backward, warmup=p - stage - 1))


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> Iterator[Action]:
    """``warmup`` forward passes, then one forward and one backward in turn, then the backward passes left."""
    warmup = min(warmup, len(forward))
    yield from forward[:warmup]
    for f, b in zip(forward[warmup:], backward, strict=False):
        yield f
        yield b
    yield from backward[len(forward) - warmup :]


def _interleaved(rank: int, p: int, m: int, v: int) -> Row:
    """Micro-batches go in groups of p through the rank's first chunk, then its next one, …; backward through them in reverse."""

    def passes(kind: Kind, order: list[int]) -> list[Action]:
        groups = [range(g, g + p) for g in range(0, m, p)]
        return [Action(kind, rank + p * chunk, i) for group in groups for chunk in order for i in group]

    upward = list(range(v))
    warmup = 2 * (p - rank - 1) + (v - 1) * p
    return tuple(_alternate(passes("F", upward), passes("B", upward[::-1]), warmup))


def _looped_bfs(rank: int, p: int, m: int, v: int) -> Row:
    stages = [rank + p * chunk for chunk in range(v)]
    forward = [Action("F", stage, i) for stage in stages for i in range(m)]
    return (*forward, *(Action("B", stage, i) for stage in reversed(stages) for i in reversed(range(m))))


def _split_backward(stage: int, m: int, warmup: int, delay: int) -> Row:
    """1F1B with its backward pass in two: W stands ``delay`` micro-batches after its I, so that the last ones fill the end."""
    row = [Action("F", stage, i) for i in range(min(warmup, m))]
    for i in range(m):
        row.append(Action("I", stage, i))
        if i >= delay:
            row.append(Action("W", stage, i - delay))
        if i + warmup < m:
            row.append(Action("F", stage, i + warmup))
    row += [Action("W", stage, i) for i in range(max(m - delay, 0), m)]
    return tuple(row)


class _Passes:
    """A rank's row in the making; every kind of pass of a chunk takes micro-batches in order."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages = stages
        self.actions: list[Action] = []
        self.done = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def add(self, kinds: str, chunk: int) -> None:
        """One pass of each kind, in the order given; B counts as I and W."""
        for kind in kinds:
            counted = "IW" if kind == "B" else kind
            self.actions.append(Action(kind, self.stages[chunk], self.done[counted[0], chunk]))  # type: ignore[arg-type]
            for part in counted:
                self.done[part, chunk] += 1


def _zero_bubble_v(rank: int, p: int, m: int) -> Row:
    """Without bubble where F, I and W take equally long. With fewer than 2p−1 micro-batches it is the table of 2p−1, thinned."""
    full = max(m, 2 * p - 1)
    row = _Passes((rank, 2 * p - 1 - rank))
    for _ in range(2 * (p - rank) - 1):
        row.add("F", 0)
    for _ in range(rank):
        row.add("F", 1)
        row.add("F", 0)
    for _ in range(p - rank):
        row.add("FIW", 1)
    while row.done["F", 1] < full:
        if row.done["F", 0] < full:
            row.add("F", 0)
        row.add("IW", 0)
        row.add("FIW", 1)
    for _ in range(rank):
        row.add("I", 0)
        row.add("I", 1)
    for _ in range(p - rank):
        row.add("IW", 0)
    row.add("W" * (full - row.done["W", 1]), 1)
    row.add("W" * (full - row.done["W", 0]), 0)
    return tuple(a for a in row.actions if a.microbatch < m)


class _DualPipeV(_Passes):
    """DualPipeV in its eight steps, as its authors number them (README and ``dualpipev.py`` of deepseek-ai/DualPipe)."""

    def __init__(self, rank: int, p: int, m: int) -> None:
        super().__init__((rank, 2 * p - 1 - rank))
        self.rank, self.p, self.m = rank, p, m
        self.owed: list[int] = []  # chunks whose W passes wait, oldest first

    def row(self) -> Row:
        after = self.p - self.rank - 1
        for _ in range(2 * after):  # 1
            self.add("F", 0)
        for _ in range(self.rank + 1):  # 2
            self.add("F", 0)
            self.add("F", 1)
        for _ in range(after):  # 3
            self.add("IWF", 1)
        for _ in range(self.m - 2 * self.p + self.rank + 1):  # 4, the main one
            self.add("F", 0)
            self.add("B", 1)
            self.add("F", 1)
            self.add("B", 0)
        for _ in range(after):  # 5
            self.add("BF", 1)
            self.add("B", 0)
        # 6: whole passes in its first half, from where W waits to fill steps 7 and 8
        for k in range(2 * (self.rank + 1)):
            self._backward(1 - k % 2, whole=k <= self.rank)
        for _ in range(after):  # 7
            self._owed_weights()
            self._backward(0, whole=False)
        for _ in range(self.rank + 1):  # 8
            self._owed_weights()
        return tuple(self.actions)

    def _backward(self, chunk: int, *, whole: bool) -> None:
        self.add("B" if whole else "I", chunk)
        if not whole:
            self.owed.append(chunk)

    def _owed_weights(self) -> None:
        self.add("W", self.owed.pop(0))
