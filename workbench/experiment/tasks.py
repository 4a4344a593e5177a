"""What a child process measures. Only child processes import this module, for it loads torch."""

import contextlib
import os
import statistics
import time
from typing import Any, NamedTuple, Protocol

import psutil

from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VITS, vit_config
from workbench.planner.predict import utilisation
from workbench.trainer.callbacks import Callback
from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import StepRecord, Trainer

READ_AHEAD = 2
"""Batches that each worker of a ``DataLoader`` holds ready: its default ``prefetch_factor``."""
REST_S = 0.1
"""Workers whose CPU time stood still this long are at rest."""


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


class OnStep(Protocol):
    """Called after each step of a guard run, as a sign of life; ``values`` are that step's entries of the trajectories."""

    def __call__(self, step: int, **values: float) -> None: ...


class Task(Protocol):
    """What an arm's process builds from its configuration, measures in blocks, and trains for the guard."""

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None: ...

    def warm_up(self, steps: int) -> None: ...

    def block(self, steps: int) -> Block: ...

    def guard_run(self, seed: int, steps: int, on_step: OnStep) -> GuardRun: ...


class TrainTask:
    """Training steps of ``config``: blocks on one long run, guard runs each from fresh weights."""

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None:
        self.config, self.facts = config, facts
        if facts.kind == "cpu" and not config.num_workers:
            keep_to_cores(facts.threads)
        # Blocks measure speed at a constant rate: a schedule that has ended would multiply the weights' changes by 0.
        self.trainer = Trainer(config.model_copy(update={"schedule": "constant"}))

    def warm_up(self, steps: int) -> None:
        self.trainer.train(steps)

    def block(self, steps: int) -> Block:
        trainer = self.trainer
        # Batches that workers read ahead while the arm was idle would hide its data wait: use them up first.
        trainer.train(READ_AHEAD * self.config.num_workers)
        trainer.peak_memory.reset()
        joules = trainer.energy.read()
        records = trainer.train(steps)
        spent = trainer.energy.read()
        if self.config.num_workers:
            wait_for_workers()
        step_time = statistics.fmean(r.times.total for r in records)
        return Block(
            step_time=step_time,
            samples_per_step=self.config.global_batch,
            anatomy=_anatomy(records),
            peak_memory_bytes=trainer.peak_memory.read(),
            energy_joules=None if joules is None or spent is None else (spent - joules) / steps,
            extra=self._mfu(step_time),
        )

    def guard_run(self, seed: int, steps: int, on_step: OnStep) -> GuardRun:
        keep_to_cores(len(CORES))
        if hasattr(self, "trainer"):
            del self.trainer  # the blocks are over: an arm that fits should not be out of memory with two models
        run = Trainer(self.config.model_copy(update={"seed": seed, "steps": steps}))
        run.callbacks += self.guard_callbacks()
        records: list[StepRecord] = []

        def keep(record: StepRecord) -> None:
            records.append(record)
            on_step(record.step, **_values(record))

        for _ in range(steps):  # one by one, so that each is heard of: the parent takes a long silence for a hang
            run.train(1, keep)
        result = run.evaluate()
        return GuardRun(result.loss, result.accuracy, trajectories(records))

    def guard_callbacks(self) -> list[Callback]:
        """What watches the next guard run."""
        return []

    def _mfu(self, step_time: float) -> dict[str, float]:
        if self.config.model not in VITS:
            return {}
        model: Any = self.trainer.model
        vit = vit_config(self.config.model, **model.config.model_dump())
        mfu = utilisation(vit, self.config.global_batch / step_time, self.facts, self.config.precision)
        return {} if mfu is None else {"mfu": mfu}


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_to_cores(number: int) -> None:
    """Compute on the last cores, as every arm does whose blocks are compared: one virtual core can be 5 % slower than the next
    for minutes. Called before the first operator, for threads inherit it.
    """
    if CORES:
        os.sched_setaffinity(0, CORES[-number:])


def wait_for_workers(limit_s: float = 10.0) -> None:
    """Wait until the processes below this one rest: they read ahead after a block, and would slow the next arm's."""
    deadline, before = time.monotonic() + limit_s, -1.0
    while before != (before := _cpu_seconds_of_children()) and time.monotonic() < deadline:
        time.sleep(REST_S)


def _cpu_seconds_of_children() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def trajectories(records: list[StepRecord]) -> dict[str, list[float]]:
    """Series over steps, as figures draw them; the loss scale only where there is one."""
    steps = [_values(r) for r in records]
    return {name: [values[name] for values in steps] for name in (steps[0] if steps else ())}


def _values(record: StepRecord) -> dict[str, float]:
    values = {"loss": record.loss, "grad_norm": record.grad_norm}
    if record.loss_scale is not None:
        values |= {"loss_scale": record.loss_scale, "skipped": float(record.skipped)}
    return values


def _anatomy(records: list[StepRecord]) -> dict[str, float]:
    names = ("data_wait", "forward", "backward", "optimizer")
    parts = {name: statistics.fmean(getattr(r.times, name) for r in records) for name in names}
    total = statistics.fmean(r.times.total for r in records)
    # On a GPU the host's wait overlaps the device's work: no more of it counts than what the phases leave of the step.
    parts["data_wait"] = min(parts["data_wait"], max(total - sum(parts.values()) + parts["data_wait"], 0.0))
    return parts | {"other": max(total - sum(parts.values()), 0.0)}
