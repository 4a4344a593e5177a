"""Training tasks whose first guard run records every layer. Only child processes import this module, for it loads torch."""

from collections.abc import Callable

import numpy as np

from workbench.diagnose.callbacks import MeterUnderflow, MonitorGradients
from workbench.experiment.recorded import FLUSHED, GRADIENT, LOGIT, WEIGHT, ZERO
from workbench.experiment.tasks import GuardRun, OnStep, TrainTask
from workbench.hardware.facts import DeviceFacts
from workbench.trainer.callbacks import Callback
from workbench.trainer.config import TrainConfig

Series = Callable[[int], dict[str, float]]


class RecordingTask(TrainTask):
    """``TrainTask`` with series by layer in a guard run's trajectories, one value per step.

    Only the first guard run is watched, for a finding keeps no other's series; blocks are timed without the watcher.
    """

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None:
        super().__init__(config, facts)
        self.watching: list[Callback] = []
        self.recorded = False

    def recorder(self) -> tuple[Callback, Series]:
        """What watches the run, and what it then knows of a step."""
        raise NotImplementedError

    def guard_callbacks(self) -> list[Callback]:
        return self.watching

    def guard_run(self, seed: int, steps: int, on_step: OnStep) -> GuardRun:
        if self.recorded:
            self.watching = []
            return super().guard_run(seed, steps, on_step)
        self.recorded = True
        watcher, of_step = self.recorder()
        self.watching = [watcher]
        recorded: dict[str, list[float]] = {}

        def keep(step: int, **values: float) -> None:
            layers = {name: _short(value) for name, value in of_step(step).items()}
            for name, value in layers.items():
                recorded.setdefault(name, []).append(value)
            on_step(step, **values, **layers)

        run = super().guard_run(seed, steps, keep)
        return run._replace(trajectories=run.trajectories | recorded)


class ExplosionTask(RecordingTask):
    """Records the norms of each layer's gradient and weights."""

    def recorder(self) -> tuple[Callback, Series]:
        monitor = MonitorGradients(every=1)

        def norms(step: int) -> dict[str, float]:
            history = monitor.history()
            assert history is not None
            (row,) = np.flatnonzero(history.steps == step)
            tables = {GRADIENT: history.norm[row], WEIGHT: history.weight[row]}
            return {
                kind + layer: float(norm)
                for kind, norms in tables.items()
                for layer, norm in zip(history.layers, norms, strict=True)
            }

        return monitor, norms


class NumericsTask(RecordingTask):
    """Records how much of each layer's gradient underflows, and each attention's largest logit."""

    def recorder(self) -> tuple[Callback, Series]:
        meter = MeterUnderflow()

        def numbers(step: int) -> dict[str, float]:
            gradients, logits = meter.gradients[step], meter.logits[step]
            return (
                {ZERO + row.layer: row.zero for row in gradients}
                | {FLUSHED + row.layer: row.flushed(meter.scales[step]) for row in gradients}
                | {LOGIT + row.module: row.max_logit for row in logits}
            )

        return meter, numbers


def _short(value: float) -> float:
    """Four digits are more than a figure or a logarithmic rule needs, and a quarter of the record."""
    return float(f"{value:.4g}")
