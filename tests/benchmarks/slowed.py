"""A training task with a planted slow-down, for the benchmark of the protocol."""

import statistics
import time
from typing import Any

import torch

from workbench.experiment.tasks import TrainTask


class SlowedTask(TrainTask):
    """``TrainTask`` whose forward pass does extra matrix products that cost ``SHARE`` of a step.

    Work and not sleep, so that a busy machine slows the plant as it slows the step.
    """

    SHARE = 0.10

    def warm_up(self, steps: int) -> None:
        super().warm_up(steps)
        step_time = statistics.median(r.times.total for r in self.trainer.train(20))
        self.matrix = torch.randn(96, 96)
        product = statistics.median(self._timed_product() for _ in range(300))
        self.products = max(round(self.SHARE * step_time / product), 1)
        self.trainer.model.register_forward_pre_hook(self._burn)

    def _burn(self, module: torch.nn.Module, args: Any) -> None:
        for _ in range(self.products):
            self.matrix @ self.matrix

    def _timed_product(self) -> float:
        start = time.perf_counter()
        self.matrix @ self.matrix
        return time.perf_counter() - start
