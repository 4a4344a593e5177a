"""Zero-bubble schedules placed by measured times within a memory limit: ``zb-1p`` and ``zb-2p``.

The heuristic of Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 3.1, which needs no solver: forward passes fill
the time before the first backward pass; then one F and one I in turn, with a W where one fits in a gap, where the gap would else
be the longest of all ranks, and where memory has run out; what is left of W comes last. Three choices are left open, all their
combinations are tried, and the shortest is kept.
"""

import math
from functools import lru_cache
from itertools import count, product

from workbench.parallel.actions import Action, Kind, Table

Times = float | tuple[float, ...]
CHOICES = list(product((True, False), (True, False), (True, False)))
KINDS: tuple[Kind, ...] = ("F", "I", "W")


@lru_cache(maxsize=64)
def zero_bubble_table(
    ranks: int,
    microbatches: int,
    times: tuple[Times, Times, Times] = (1.0, 1.0, 1.0),
    transfer: float = 0.0,
    *,
    limit: float,
    kept_for_weights: float = 1.0,
) -> Table:
    """The best table found.

    Args:
        times: of F, I and W, each a number or one per rank, in one unit with ``transfer``.
        limit: activations of a micro-batch that a rank may hold, p for ``zb-1p`` and 2p for ``zb-2p``.
        kept_for_weights: share of an activation that is kept from I until W.
    """
    tried = [_Placement(ranks, microbatches, times, transfer, limit, kept_for_weights, choices) for choices in CHOICES]
    best = min(tried, key=lambda placement: placement.longest_span())
    return best.table()


class _Placement:
    """Rows in the making, with the clock of every rank.

    Args:
        choices: whether the first backward pass finds its rank idle rather than late; whether a rank far ahead of the next may
            leave a forward pass out for now; whether a gap too short for a W gets one though other ranks have longer gaps.
    """

    def __init__(
        self, p: int, m: int, times: tuple[Times, Times, Times], transfer: float, limit: float, kept: float,
        choices: tuple[bool, bool, bool],
    ) -> None:  # fmt: skip
        self.p, self.m, self.transfer, self.limit = p, m, transfer, limit
        per_rank = ((t,) * p if isinstance(t, int | float) else t for t in times)
        self.cost: dict[Kind, tuple[float, ...]] = dict(zip(KINDS, per_rank, strict=True))
        self.memory: dict[Kind, float] = {"F": 1.0, "I": kept - 1.0, "W": -kept}
        self.keep_idle, self.may_skip, self.always_fill = choices
        self.rows: list[list[Kind]] = [[] for _ in range(p)]
        self.ends: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(p)] for kind in KINDS}
        self.clock, self.gaps, self.held = [0.0] * p, [0.0] * p, [0.0] * p
        self.done: dict[Kind, list[int]] = {kind: [0] * p for kind in KINDS}
        self._warm_up()
        for _ in range(1, m):
            for rank in self._ranks_to_advance():
                self._place_when_due("F", rank)
            for rank in reversed(range(p)):
                self._place_when_due("I", rank)
        for rank in range(p):
            self._place_weights(rank, m)

    def longest_span(self) -> float:
        return max(self.clock[r] - self.ends["F"][r][0] + self.cost["F"][r] for r in range(self.p))

    def table(self) -> Table:
        """Micro-batches pass in order, so a row's kinds number them."""
        counters = [{kind: count() for kind in KINDS} for _ in range(self.p)]
        return tuple(
            tuple([Action(kind, rank, next(counters[rank][kind])) for kind in row])
            for rank, row in enumerate(self.rows)
        )

    def _warm_up(self) -> None:
        """One F on every rank, more of them until the first gradient can have come back, then the first I."""
        for rank in range(self.p):
            self._place("F", rank)
        more = [0] * self.p
        sent = self.clock[-1] + self.cost["I"][-1]  # when the rank after has done its first I
        for rank in reversed(range(self.p - 1)):
            clock, due = self.clock[rank], sent + self.transfer
            while 1 + more[rank] < min(self.m, int(self.limit)):
                if clock + self.cost["F"][rank] > due if self.keep_idle else clock >= due:
                    break
                clock += self.cost["F"][rank]
                more[rank] += 1
            sent = max(clock, due) + self.cost["I"][rank]
        for rank in range(1, self.p):  # each stays a forward pass ahead of the next
            if 1 + more[rank] < self.m:
                more[rank] = min(more[rank], max(more[rank - 1] - 1, 0))
        for rank in range(self.p):
            for _ in range(more[rank]):
                self._place("F", rank)
        for rank in reversed(range(self.p)):
            self._place("I", rank)

    def _ranks_to_advance(self) -> list[int]:
        """Those that take a forward pass in this round: from the last one upward, until one does not."""
        first = self.p
        while first and self.done["F"][first - 1] < self.m and not self._leaves_out(first - 1):
            first -= 1
        return list(range(first, self.p))

    def _leaves_out(self, rank: int) -> bool:
        """Whether a rank two forward passes or more ahead had better wait for the next gradient, and loses nothing by it."""
        if not self.may_skip or rank == self.p - 1 or self.done["F"][rank] < self.done["F"][rank + 1] + 2:
            return False
        due = self.clock[rank + 1] + self.cost["F"][rank + 1] + self.cost["I"][rank + 1] + self.transfer
        clock = self.clock[rank]
        if clock >= due:
            return True
        over = self.held[rank] + self.memory["F"] - self.limit
        first_w = (
            max(math.ceil(over / -self.memory["W"] - 1e-9), 0) if self.memory["W"] else 0
        )  # passes that must make room
        if clock + self.cost["F"][rank] + first_w * self.cost["W"][rank] <= due:
            return False
        return due - clock <= max(self.gaps) - self.gaps[rank]

    def _place_when_due(self, kind: Kind, rank: int) -> None:
        """A pass, with W before it to make room, and where the rank would else stand idle."""
        while self.held[rank] + self.memory[kind] > self.limit + 1e-9:
            self._place("W", rank)
        due = self._due(kind, rank)
        while self._owes(rank) and self.clock[rank] + self.cost["W"][rank] <= due:
            self._place("W", rank)
        gap = due - self.clock[rank]
        if gap > 0 and self._owes(rank) and (self.always_fill or gap > max(self.gaps) - self.gaps[rank]):
            self._place("W", rank)
        if kind == "I" and rank == 0 and self.done["F"][0] == self.m:  # nobody waits for what is left of rank 0
            self._place_weights(0, self.done["I"][0])
        self._place(kind, rank)

    def _place_weights(self, rank: int, until: int) -> None:
        while self.done["W"][rank] < until:
            self._place("W", rank)

    def _owes(self, rank: int) -> bool:
        return self.done["W"][rank] < self.done["I"][rank]

    def _due(self, kind: Kind, rank: int) -> float:
        """When the next pass of this kind can start, as far as the neighbour is concerned."""
        if kind == "W":
            return 0.0
        neighbour = rank - 1 if kind == "F" else rank + 1
        if not 0 <= neighbour < self.p:
            return 0.0
        return self.ends[kind][neighbour][self.done[kind][rank]] + self.transfer

    def _place(self, kind: Kind, rank: int) -> None:
        start = max(self.clock[rank], self._due(kind, rank))
        if self.rows[rank]:
            self.gaps[rank] += start - self.clock[rank]
        self.clock[rank] = start + self.cost[kind][rank]
        self.rows[rank].append(kind)
        self.ends[kind][rank].append(self.clock[rank])
        self.held[rank] += self.memory[kind]
        self.done[kind][rank] += 1
