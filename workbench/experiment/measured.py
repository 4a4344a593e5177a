"""One arm while it is measured, and the result it leaves."""

import math
import statistics
from typing import Any

from workbench.experiment.ablation import Arm
from workbench.experiment.arms import ArmProcess
from workbench.experiment.finding import Anatomy, ArmResult, ArmStatus, Measurement
from workbench.trainer.config import TrainConfig


class MeasuredArm:
    """Blocks by round, guard runs by seed, and how the arm stands.

    Attributes:
        status: ``completed`` until something ends the arm.
        blocks: fields of ``tasks.Block`` by number of the round.
        guard_runs: fields of ``tasks.GuardRun`` with their ``seed``.
        trajectories: series of the first guard run, as far as it got.
    """

    def __init__(self, arm: Arm, config: TrainConfig, process: ArmProcess) -> None:
        self.arm, self.config, self.process = arm, config, process
        self.name = arm.name
        self.status: ArmStatus = "unavailable" if arm.unavailable else "completed"
        self.error = arm.unavailable
        self.blocks: dict[int, dict[str, Any]] = {}
        self.guard_runs: list[dict[str, Any]] = []
        self.trajectories: dict[str, list[float]] = {}

    @property
    def step_seconds(self) -> float:
        """Median step time so far; 0 before the first block."""
        return statistics.median(b["step_time"] for b in self.blocks.values()) if self.blocks else 0.0

    def log_ratios(self, variant: "MeasuredArm") -> list[tuple[int, float]]:
        """Round and log-ratio of the variant's throughput to this arm's, for the rounds in which both were measured."""
        rounds = sorted(self.blocks.keys() & variant.blocks.keys())
        return [(r, math.log(_throughput(variant.blocks[r]) / _throughput(self.blocks[r]))) for r in rounds]

    def result(self) -> ArmResult:
        return ArmResult(
            name=self.name,
            settings=self.arm.settings,
            status=self.status,
            error=self.error,
            measurement=self._measurement() if self.blocks else None,
            trajectories=self.guard_runs[0]["trajectories"] if self.guard_runs else self.trajectories,
            evaluations=[{k: g[k] for k in ("seed", "loss", "accuracy")} for g in self.guard_runs],
        )

    def _measurement(self) -> Measurement:
        blocks = list(self.blocks.values())
        extra = {k: statistics.median(b["extra"][k] for b in blocks) for k in blocks[0]["extra"]}
        peaks = [b["peak_memory_bytes"] for b in blocks if b["peak_memory_bytes"] is not None]
        joules = [b["energy_joules"] for b in blocks if b["energy_joules"] is not None]
        return Measurement(
            step_time=self.step_seconds,
            samples_per_s=statistics.median(map(_throughput, blocks)),
            anatomy=Anatomy(**{k: statistics.median(b["anatomy"][k] for b in blocks) for k in blocks[0]["anatomy"]}),
            block_step_times=[b["step_time"] for b in blocks],
            peak_memory_bytes=max(peaks) if peaks else None,
            mfu=extra.pop("mfu", None),
            energy_joules=statistics.median(joules) if joules else None,
            extra=extra,
        )


def _throughput(block: dict[str, Any]) -> float:
    return block["samples_per_step"] / block["step_time"]
