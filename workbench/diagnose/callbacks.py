"""The detectors as callbacks of the trainer."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from workbench.diagnose.explosion import Explosion, find_explosion
from workbench.diagnose.gradients import GradientHistory, GradientMonitor
from workbench.diagnose.logits import AttentionLogits, LogitRow
from workbench.diagnose.scaling import ScaleRecord, ScaleWatch
from workbench.diagnose.symptom import Symptom
from workbench.diagnose.underflow import UnderflowRow, parameter_underflow, total
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


class MeterUnderflow(Callback):
    """Per step: how much of each layer's gradient underflows, and the largest logit of each attention.

    Costs about as much as the step, and waits for the device; meant for experiments and for single steps.

    Attributes:
        gradients: by step, one row per module with parameters of its own; numbers without the loss scale.
        logits: by step, one row per attention.
        scales: by step, the loss scale rounded down to a power of two.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, list[UnderflowRow]] = {}
        self.logits: dict[int, list[LogitRow]] = {}
        self.scales: dict[int, float] = {}

    @contextmanager
    def around_step(self, trainer: "Trainer", step: int) -> Iterator[None]:
        with AttentionLogits(trainer.model) as meter:
            yield
        self.logits[step] = meter.rows()

    def before_clipping(self, trainer: "Trainer", step: int) -> None:
        by_module: dict[str, list[UnderflowRow]] = {}
        for row in parameter_underflow(trainer.model):
            by_module.setdefault(row.layer.rpartition(".")[0] or row.layer, []).append(row)
        self.gradients[step] = [total(rows, module) for module, rows in by_module.items()]
        self.scales[step] = 2.0 ** math.floor(math.log2(trainer.scaler.value or 1.0))


class WatchScale(Callback):
    """The symptoms of a ``ScaleWatch`` on a trainer's steps; at the scale's floor the trainer stops by itself.

    With ``gradients`` monitored at every step, the layer that overflowed above the floor is named: of those with non-finite
    gradients the last, where a backward pass meets them first. At the floor the trainer names the operator's.
    """

    def __init__(self, *, gradients: MonitorGradients | None = None) -> None:
        self.gradients = gradients
        self._watch: ScaleWatch | None = None

    @property
    def symptoms(self) -> list[Symptom]:
        return self._watch.symptoms if self._watch else []

    def on_step(self, trainer: "Trainer", record: "StepRecord") -> None:
        if record.loss_scale is None:
            return
        if self._watch is None:
            c = trainer.config.loss_scaling
            self._watch = ScaleWatch(floor=c.floor, growth=c.growth, interval=c.interval, hysteresis=c.hysteresis)
        if record.overflow:
            layer, rank = record.overflow.module, record.overflow.rank
        else:
            layer, rank = self._overflowed(record.step) if record.skipped else "", 0
        self._watch.observe(ScaleRecord(record.step, record.loss_scale, record.skipped, layer, rank))

    def _overflowed(self, step: int) -> str:
        history = self.gradients.history() if self.gradients else None
        if history is None:
            return ""
        row = np.flatnonzero(history.steps == step)
        bad = np.flatnonzero(history.nonfinite[row[0]]) if len(row) else row
        return history.layers[bad[-1]] if len(bad) else ""
