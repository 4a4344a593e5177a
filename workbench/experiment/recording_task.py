"""The training task whose guard run records every layer. Only child processes import this module, for it loads torch."""

import numpy as np

from workbench.diagnose.callbacks import MonitorGradients
from workbench.diagnose.gradients import GradientHistory
from workbench.experiment.stability import GRADIENT, WEIGHT
from workbench.experiment.tasks import GuardRun, OnStep, TrainTask
from workbench.hardware.facts import DeviceFacts
from workbench.trainer.callbacks import Callback
from workbench.trainer.config import TrainConfig


class ExplosionTask(TrainTask):
    """``TrainTask`` with the norms of each layer's gradient (before clipping) and weights in a guard run's trajectories.

    Only the first guard run is monitored, for a finding keeps no other's series; blocks are timed without the monitor.
    """

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None:
        super().__init__(config, facts)
        self.watching: list[Callback] = []
        self.monitored = False

    def guard_callbacks(self) -> list[Callback]:
        return self.watching

    def guard_run(self, seed: int, steps: int, on_step: OnStep) -> GuardRun:
        if self.monitored:
            self.watching = []
            return super().guard_run(seed, steps, on_step)
        self.monitored, monitor = True, MonitorGradients(every=1)
        self.watching = [monitor]
        recorded: dict[str, list[float]] = {}

        def keep(step: int, **values: float) -> None:
            history = monitor.history()
            assert history is not None
            layers = _norms(history, step)
            for name, norm in layers.items():
                recorded.setdefault(name, []).append(norm)
            on_step(step, **values, **layers)

        run = super().guard_run(seed, steps, keep)
        return run._replace(trajectories=run.trajectories | recorded)


def _norms(history: GradientHistory, step: int) -> dict[str, float]:
    """One step's norms by series. Four digits are more than a logarithmic rule needs, and a quarter of the record."""
    (row,) = np.flatnonzero(history.steps == step)
    tables = {GRADIENT: history.norm[row], WEIGHT: history.weight[row]}
    return {
        kind + layer: float(f"{norm:.4g}")
        for kind, norms in tables.items()
        for layer, norm in zip(history.layers, norms, strict=True)
    }
