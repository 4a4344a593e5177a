"""What a detector says: one fault, where and when. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One fault found in a run.

    Attributes:
        fault: its name, a few fixed words such as ``"clip before unscale"``.
        detail: what was seen, with numbers.
        step: the step at which it was seen, counted as the caller counts.
        where: module, parameter or layer; empty where the fault is the loop's.
        rank: the rank that saw it.
        fix: one thing to do about it.
    """

    fault: str
    detail: str
    step: int
    where: str = ""
    rank: int = 0
    fix: str = ""

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"step {self.step}, rank {self.rank}: {self.fault}{place}: {self.detail}{fix}"
