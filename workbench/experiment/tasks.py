"""What a child process measures. Only child processes import this module, for it loads torch."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VITS, vit_config
from workbench.planner.predict import utilisation
from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import StepRecord, Trainer


class Block(NamedTuple):
    """One measured block: mean seconds per step, samples per step, parts of the step, peak bytes, joules per step."""

    step_time: float
    samples_per_step: float
    anatomy: dict[str, float]
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    extra: dict[str, float] = {}


class GuardRun(NamedTuple):
    """A training from one seed: validation loss and accuracy at its end, and series over its steps."""

    loss: float
    accuracy: float
    trajectories: dict[str, list[float]]


class Task(Protocol):
    """What an arm's process builds from its configuration, measures in blocks, and trains for the guard."""

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None: ...

    def warm_up(self, steps: int) -> None: ...

    def block(self, steps: int) -> Block: ...

    def guard_run(self, seed: int, steps: int, on_step: Callable[[int], None]) -> GuardRun: ...


class TrainTask:
    """Training steps of ``config``: blocks on one long run, guard runs each from fresh weights."""

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None:
        self.config, self.facts = config, facts
        # Blocks measure speed at a constant rate: a schedule that has ended would multiply the weights' changes by 0.
        self.trainer = Trainer(config.model_copy(update={"schedule": "constant"}))

    def warm_up(self, steps: int) -> None:
        self.trainer.train(steps)

    def block(self, steps: int) -> Block:
        trainer = self.trainer
        trainer.peak_memory.reset()
        joules = trainer.energy.read()
        records = trainer.train(steps)
        spent = trainer.energy.read()
        step_time = statistics.fmean(r.times.total for r in records)
        return Block(
            step_time=step_time,
            samples_per_step=self.config.global_batch,
            anatomy=_anatomy(records),
            peak_memory_bytes=trainer.peak_memory.read(),
            energy_joules=None if joules is None or spent is None else (spent - joules) / steps,
            extra=self._mfu(step_time),
        )

    def guard_run(self, seed: int, steps: int, on_step: Callable[[int], None]) -> GuardRun:
        run = Trainer(self.config.model_copy(update={"seed": seed, "steps": steps}))
        records: list[StepRecord] = []

        def keep(record: StepRecord) -> None:
            records.append(record)
            on_step(record.step)

        run.train(steps, keep)
        result = run.evaluate()
        return GuardRun(result.loss, result.accuracy, trajectories(records))

    def _mfu(self, step_time: float) -> dict[str, float]:
        if self.config.model not in VITS:
            return {}
        model: Any = self.trainer.model
        vit = vit_config(self.config.model, **model.config.model_dump())
        mfu = utilisation(vit, self.config.global_batch / step_time, self.facts, self.config.precision)
        return {} if mfu is None else {"mfu": mfu}


def trajectories(records: list[StepRecord]) -> dict[str, list[float]]:
    """Series over steps, as figures draw them; the loss scale only where there is one."""
    series = {"loss": [r.loss for r in records], "grad_norm": [r.grad_norm for r in records]}
    if records and records[0].loss_scale is not None:
        series["loss_scale"] = [r.loss_scale or 0.0 for r in records]
        series["skipped"] = [float(r.skipped) for r in records]
    return series


def _anatomy(records: list[StepRecord]) -> dict[str, float]:
    names = ("data_wait", "forward", "backward", "optimizer")
    parts = {name: statistics.fmean(getattr(r.times, name) for r in records) for name in names}
    total = statistics.fmean(r.times.total for r in records)
    return parts | {"other": max(total - sum(parts.values()), 0.0)}
