"""The question an experiment asks: a workload, a baseline arm, variant arms, a protocol and a guard. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from workbench.errors import Refused, refusal
from workbench.experiment.finding import Finding, PredictionCheck
from workbench.trainer.config import MAX_STEPS, TrainConfig

TRAIN_TASK = "workbench.experiment.tasks:TrainTask"
PROCESS_SPREAD = {"cpu": 0.012, "cuda": 0.002}
"""By kind of device. 20 pairs of equal arms on two CPU cores gave 0.009, 20 slowed pairs 0.011 (``bench_protocol.py``); that of
GPUs is an assumption until it is measured alike."""


class Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **fields: Any) -> None:
        """Raises ``Refused`` for a field that is unknown or out of range."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise refusal(type(self).__name__, error, type(self).model_fields) from None


class Arm(Spec):
    """One way of doing the workload: overrides of ``TrainConfig`` fields, by name.

    ``task`` names the class that a child process builds and measures, as ``package.module:Class`` or the class itself; see
    ``workbench.experiment.tasks.Task``. Later stages bring their own tasks and keep all of the protocol.
    """

    name: str
    settings: dict[str, Any] = {}
    task: str = TRAIN_TASK
    task_args: dict[str, Any] = {}
    """Keyword arguments of the task's class beyond the configuration and the device's facts."""
    unavailable: str = ""
    """Why this arm cannot run here, if it cannot; it is then reported and not started."""

    @field_validator("task", mode="before")
    @classmethod
    def _by_name(cls, task: Any) -> Any:
        return f"{task.__module__}:{task.__qualname__}" if isinstance(task, type) else task


class Protocol(Spec):
    """How blocks are measured.

    Arms stay alive in their own processes and take turns of ``block_steps`` steps or more, in alternating order. The interval
    on the paired log-ratios is looked at a quarter, half and all the way through ``max_rounds``, each look at
    ``(1 - confidence) / 3`` so that the whole keeps ``confidence``.
    """

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    block_steps: Annotated[int, Field(ge=1)] = 5
    min_block_s: Annotated[float, Field(ge=0)] = 0.25
    """Shortest block, in seconds: where steps are short, blocks take more of them. One interruption by another process is much
    of a block of 60 ms: on two crowded cores the log-ratio of neighbouring blocks of 5 steps of 13 ms had σ = 0.42, of 40 such
    steps 0.12 to 0.28. A block counts by its mean: a median would be steadier, and blind to what stalls one step in ten."""
    max_rounds: Annotated[int, Field(ge=4)] = 48
    effect: Annotated[float, Field(gt=0)] = 0.05
    """Smallest relative difference asked for; measuring stops once the interval's half-width is under it."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    process_spread: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Standard deviation of the log-ratio between fresh pairs of processes of equal arms, which no number of rounds within one
    pair shows; ``None`` takes ``PROCESS_SPREAD`` of the device's kind."""
    budget_s: Annotated[float, Field(gt=0)] = 600.0
    arm_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest silence of one arm before it counts as timed out: its start with the warm-up, a block, a step of a guard run, or
    the evaluation at its end."""
    alive: bool = True
    """Keep all arms' processes alive; ``False`` restarts an arm for each block when they do not fit together."""

    def spread_on(self, kind: str) -> float:
        """``process_spread`` on a device of this kind."""
        return PROCESS_SPREAD.get(kind, 0.0) if self.process_spread is None else self.process_spread

    @classmethod
    def for_steps(cls, steps: int, **fields: Any) -> "Protocol":
        """The default protocol with at most ``steps`` measured steps per arm, in whole blocks and at least four of them.

        Steps so short that a block of them would end within ``min_block_s`` are measured more often.
        """
        if steps < 1:
            raise Refused("steps", steps, allowed="1 or more", fix="measure at least one step per arm")
        block = min(cls.model_fields["block_steps"].default, max(steps // 4, 1))
        return cls(block_steps=block, max_rounds=max(steps // block, 4), **fields)


class Guard(Spec):
    """The correctness condition without which a speed-up is void.

    For ``loss`` and ``accuracy``: every arm trains ``steps`` steps from the same seeds, and two one-sided t tests at
    ``confidence`` must put the paired difference to the baseline inside ``±margin`` (loss: relative; accuracy: absolute).
    ``none`` is for arms whose arithmetic is identical by construction.
    """

    kind: Literal["loss", "accuracy", "none"] = "loss"
    margin: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    seeds: Annotated[int, Field(ge=2, le=1000)] = 3
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 100
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95


class Ablation(Spec):
    """A controlled experiment. ``run()`` measures it and returns a ``Finding``."""

    name: str
    title: str
    question: str
    hypothesis: str
    claims: list[str] = []
    workload: TrainConfig = TrainConfig()
    baseline: Arm
    variants: list[Arm]
    protocol: Protocol = Protocol()
    guard: Guard = Guard()
    limits: list[str] = []

    @property
    def arms(self) -> list[Arm]:
        return [self.baseline, *self.variants]

    def predict(self) -> list[PredictionCheck]:
        """What the planner expects of each arm; nothing runs."""
        from workbench.experiment.run import predict

        return predict(self)

    def run(self, root: Path | str = "") -> Finding:
        """Measure the arms and record the finding in the batch run that this notebook belongs to, or in a new run.

        Args:
            root: folder of a new run; ``$WORKBENCH_RUNS`` or ``runs/`` when empty.
        """
        from workbench.experiment.run import run_ablation

        return run_ablation(self, root)
