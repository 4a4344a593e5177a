"""The detectors as callbacks of the trainer."""

from typing import TYPE_CHECKING

import numpy as np

from workbench.diagnose.explosion import Explosion, find_explosion
from workbench.diagnose.gradients import GradientHistory, GradientMonitor
from workbench.diagnose.scaling import ScaleRecord, ScaleWatch
from workbench.diagnose.symptom import Symptom
from workbench.trainer.callbacks import Callback

if TYPE_CHECKING:
    from workbench.trainer.loop import StepRecord, Trainer


class MonitorGradients(Callback):
    """A ``GradientMonitor`` on a trainer's steps, for one trainer.

    Args:
        every, updates: as for ``GradientMonitor``.
    """

    def __init__(self, *, every: int = 20, updates: bool = True) -> None:
        self.every, self.updates = every, updates
        self._monitor: GradientMonitor | None = None
        self._skipped: set[int] = set()

    def before_clipping(self, trainer: "Trainer", step: int) -> None:
        if self._monitor is None:
            self._monitor = GradientMonitor(trainer.model, every=self.every, updates=self.updates)
        self._monitor.before_clipping(step)

    def after_update(self, trainer: "Trainer", step: int) -> None:
        if self._monitor:
            self._monitor.after_update(step)

    def on_step(self, trainer: "Trainer", record: "StepRecord") -> None:
        if record.skipped:
            self._skipped.add(record.step)

    def history(self) -> GradientHistory | None:
        """Statistics of the steps so far; ``None`` before the first."""
        return self._monitor.history() if self._monitor else None

    def explosion(self) -> Explosion | None:
        """Where the run's gradients exploded, if they did; see ``find_explosion``."""
        h = self.history()
        if h is None:
            return None
        skipped = [int(step) in self._skipped for step in h.steps]
        return find_explosion(h.layers, h.steps, h.norm, h.weight if self.updates else None, skipped)


class WatchScale(Callback):
    """A ``ScaleWatch`` on a trainer's steps: ``symptoms``, and ``stop`` when going on is of no use.

    With ``gradients`` monitored at every step, the layer that overflowed is named: of those with non-finite gradients the
    last, where a backward pass meets them first.
    """

    def __init__(self, *, floor: float = 1.0, gradients: MonitorGradients | None = None) -> None:
        self.floor, self.gradients = floor, gradients
        self._watch: ScaleWatch | None = None

    @property
    def symptoms(self) -> list[Symptom]:
        return self._watch.symptoms if self._watch else []

    @property
    def stop(self) -> bool:
        return self._watch is not None and self._watch.stop

    def on_step(self, trainer: "Trainer", record: "StepRecord") -> None:
        if record.loss_scale is None:
            return
        if self._watch is None:
            constants = trainer.config.loss_scaling
            self._watch = ScaleWatch(floor=self.floor, growth=constants.growth, interval=constants.interval)
        layer = self._overflowed(record.step) if record.skipped else ""
        self._watch.observe(ScaleRecord(record.step, record.loss_scale, record.skipped, layer))

    def _overflowed(self, step: int) -> str:
        history = self.gradients.history() if self.gradients else None
        if history is None:
            return ""
        row = np.flatnonzero(history.steps == step)
        bad = np.flatnonzero(history.nonfinite[row[0]]) if len(row) else row
        return history.layers[bad[-1]] if len(bad) else ""
