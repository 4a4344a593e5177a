"""What a history of loss scales says: healthy calibration, a scale that halves for ever, a scale that was lost.

Dynamic loss scaling looks for the largest scale that does not overflow (Micikevicius et al. 2018), so a skipped step is its
way of measuring: at the start, one per halving from the initial scale, and later about one per growth interval.
Imports no torch.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.diagnose.symptom import Symptom
from workbench.errors import Refused

HALVES_FOR_EVER = "loss scale halves for ever"
SCALE_LOST = "loss scale was lost"
SKIPS_TOO_OFTEN = "too many skipped steps"


@dataclass(frozen=True)
class ScaleRecord:
    """One step: the scale it was taken at, whether its update was skipped, and what overflowed first, if known."""

    step: int
    scale: float
    skipped: bool
    layer: str = ""
    rank: int = 0


class ScaleWatch:
    """Follows the loss scale step by step; ``stop`` says that going on would be of no use.

    It finds

    - *halves for ever*: a skipped step at the floor, or ``patience`` skipped steps in a row after training was under way.
      ``stop`` is then set, and the symptom names the layer and rank that overflowed first in that run of skips;
    - *was lost*: a scale that rose by more than one growth since the step before, as after a resume without the scaler's
      state: the updates of a second calibration are burnt;
    - *too many skipped steps*: once the first calibration is over, more than twice what one failed growth per interval
      explains, over the last ten intervals or 200 steps, whichever is more.

    The first calibration, whose skips come before the first update, is quiet however long it is, down to the floor.

    Args:
        floor: smallest scale worth training with. Below 1 the loss is scaled *down*: then overflow, not underflow, is the
            trouble, and scaling is no cure.
        growth, interval, hysteresis: the scaler's constants.
        patience: skipped steps in a row that calibration under way does not need.
    """

    def __init__(
        self, *, floor: float = 1.0, growth: float = 2.0, interval: int = 2000, hysteresis: int = 1, patience: int = 8
    ) -> None:
        if not floor > 0 or not growth > 1 or interval < 1 or hysteresis < 1 or patience < 2:
            values = (floor, growth, interval, hysteresis, patience)
            allowed = "floor > 0, growth > 1, interval ≥ 1, hysteresis ≥ 1, patience ≥ 2"
            raise Refused("loss scale watch", values, allowed=allowed)
        self.floor, self.growth, self.interval, self.hysteresis = floor, growth, interval, hysteresis
        self.patience = patience + hysteresis - 1
        self.stop = False
        self.symptoms: list[Symptom] = []
        self._row: list[ScaleRecord] = []
        self._last: ScaleRecord | None = None
        self._updates = 0
        self._recent: deque[bool] = deque(maxlen=max(10 * interval, 200))

    def observe(self, record: ScaleRecord) -> Symptom | None:
        """Take note of a step; a symptom when this step is the one that shows it."""
        found = self._lost(record)
        self._row = [*self._row, record] if record.skipped else []
        found = found or self._halving(record)
        if not record.skipped:
            self._updates += 1
        if self._updates:
            found = found or self._often(record)
        self._last = record
        if found:
            self.symptoms.append(found)
        return found

    def _lost(self, record: ScaleRecord) -> Symptom | None:
        if self._last is None or record.scale <= self._last.scale * self.growth * (1 + 1e-6):
            return None
        detail = f"scale went from {self._last.scale:g} to {record.scale:g} in one step"
        return Symptom(SCALE_LOST, detail, record.step, rank=record.rank, fix="save and load the scaler's state_dict")

    def _halving(self, record: ScaleRecord) -> Symptom | None:
        if self.stop or not record.skipped:
            return None
        at_floor = record.scale <= self.floor
        if not at_floor and not (self._updates and len(self._row) >= self.patience):
            return None
        self.stop = True
        first = next((r for r in self._row if r.layer), self._row[0])
        why = f"at the floor of {self.floor:g}" if at_floor else "after training was under way"
        layer = (
            f"first overflow in {first.layer} on rank {first.rank}" if first.layer else "overflowing layer not recorded"
        )
        detail = f"{len(self._row)} skipped steps in a row, {why}; {layer}"
        fix = "stop; give that layer fp32, a lower learning rate or clipping, or train in bf16"
        return Symptom(HALVES_FOR_EVER, detail, record.step, where=first.layer, rank=first.rank, fix=fix)

    def _often(self, record: ScaleRecord) -> Symptom | None:
        self._recent.append(record.skipped)
        window = len(self._recent)
        if window < (self._recent.maxlen or 0):
            return None
        # One failed growth per interval, and its regrowth takes another: twice that, and what chance adds to a count.
        expected = 2 * self.hysteresis * window / self.interval
        limit = expected + 3 * math.sqrt(expected)
        skips = sum(self._recent)
        if skips <= max(limit, 5):
            return None
        self._recent.clear()
        detail = f"{skips} of {window} steps skipped, where growth every {self.interval} explains {expected:.0f}"
        return Symptom(SKIPS_TOO_OFTEN, detail, record.step, rank=record.rank, fix="a longer growth interval")


def judge_scaling(records: Iterable[ScaleRecord], **constants: float) -> list[Symptom]:
    """All symptoms of a recorded history; ``constants`` as for ``ScaleWatch``."""
    watch = ScaleWatch(**constants)  # type: ignore[arg-type]
    for record in records:
        watch.observe(record)
    return watch.symptoms
