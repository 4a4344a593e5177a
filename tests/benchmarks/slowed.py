"""A training task with a planted slow-down, for the benchmark of the protocol."""

import time
from typing import Any

import torch

from workbench.experiment.tasks import Block, TrainTask


class SlowedTask(TrainTask):
    """``TrainTask`` whose forward pass does extra matrix products that cost ``SHARE`` of a step.

    Work and not sleep, so that a busy machine slows the plant as it slows the step. ``extra["planted"]`` of a block is what it
    really cost: seconds of the extra products over seconds of the rest.
    """

    SHARE = 0.10

    def warm_up(self, steps: int) -> None:
        super().warm_up(steps)
        self.matrix, self.products = torch.randn(96, 96), 20
        self.trainer.model.register_forward_pre_hook(self._burn)
        for _ in range(
            3
        ):  # in place and in proportion: alone, a short product escapes the interruptions of a long step
            self.burnt = 0.0
            total = sum(record.times.total for record in self.trainer.train(40))
            self.products = max(round(self.products * self.SHARE * (total - self.burnt) / self.burnt), 1)

    def block(self, steps: int) -> Block:
        self.burnt = 0.0
        block = super().block(steps)
        return block._replace(extra={**block.extra, "planted": self.burnt / (block.step_time * steps - self.burnt)})

    def _burn(self, module: torch.nn.Module, args: Any) -> None:
        start = time.perf_counter()
        for _ in range(self.products):
            self.matrix @ self.matrix
        self.burnt += time.perf_counter() - start
