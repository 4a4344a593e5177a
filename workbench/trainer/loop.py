"""The training run: builds what a configuration asks for and takes steps."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.data.datasets import open_dataset
from workbench.data.loading import make_loader, validation_batches
from workbench.data.sources import check_source
from workbench.diagnose.nonfinite import FirstNonFinite, NonFinite
from workbench.errors import Refused
from workbench.hardware.meters import EnergyMeter, PeakMemory
from workbench.models.build import build_model
from workbench.trainer import checkpoint
from workbench.trainer.callbacks import Callback
from workbench.trainer.config import TrainConfig
from workbench.trainer.fp8 import swap_linear_layers
from workbench.trainer.meters import StepClock, StepTimes
from workbench.trainer.module_precision import apply_precision
from workbench.trainer.optim import learning_rate, make_optimizer
from workbench.trainer.precision import LossScaler, autocast, set_matmul_precision
from workbench.trainer.step import StepOutcome, accumulate_gradients, train_step

READ_EVERY, READ_AFTER_S = 32, 1.0
"""Most steps, and about the most seconds, between two reads of the device's values: rare enough to cost nothing."""


class Diverged(RuntimeError):
    """A loss or gradient stopped being finite, and no loss scale can recover it."""

    def __init__(self, record: "StepRecord") -> None:
        scale = "" if record.loss_scale is None else f" at loss scale {record.loss_scale:g}"
        said = f"loss is {record.loss}, gradient norm {record.grad_norm}{scale} at step {record.step}"
        if record.exhausted:
            said += f", the scale's floor; {record.overflow or 'the step, repeated, did not overflow again'}"
        super().__init__(said)
        self.step, self.loss = record.step, record.loss


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. ``grad_norm`` is before clipping; ``step`` counts attempts from 0, skipped ones included.

    ``exhausted``: it overflowed at the loss scale's floor; ``overflow`` says where, if a repetition of the step showed it.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float | None
    skipped: bool
    samples: int
    times: StepTimes
    exhausted: bool = False
    overflow: NonFinite | None = None

    @property
    def diverged(self) -> bool:
        """Whether going on is of no use. Overflow under a loss scale is not that: its update is skipped, its scale lowered."""
        if self.loss_scale is not None:
            return self.exhausted
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and share of right answers over the validation split."""

    loss: float
    accuracy: float
    num_samples: int


class Trainer:
    """A run of ``config``, to be advanced by ``train`` in as many pieces as one likes.

    Attributes:
        step: attempts so far, skipped ones included.
        updates: updates applied so far; the learning-rate schedule follows these.

    Raises:
        Refused: a configuration that cannot run here.
    """

    def __init__(self, config: TrainConfig, *, callbacks: Sequence[Callback] = ()) -> None:
        if config.parallel:
            raise Refused(
                "parallel", config.parallel, allowed="none: a trainer is one process", fix="use a ShardingTask"
            )
        self.config, self.callbacks = config, list(callbacks)
        self.device = resolve_device(config.device)
        set_matmul_precision(config.precision, self.device)
        torch.manual_seed(config.seed)
        info = check_source(config.data)
        self.peak_memory = PeakMemory(self.device)
        self.energy = EnergyMeter(self.device)
        if config.global_batch > info.num_train:
            raise Refused(
                "global_batch",
                config.global_batch,
                allowed=f"at most the {info.num_train} training samples of {config.data}",
            )
        channels, height, _ = info.image_shape
        self.model: nn.Module = build_model(
            config.model, num_classes=info.num_classes, image_size=height, in_channels=channels, **config.model_args
        ).to(self.device)
        if config.precision == "fp8":
            swap_linear_layers(self.model, self.device)
        if config.precision_rules:
            apply_precision(self.model, config.precision_rules, self.device.type)
        self._forward: Callable[[Tensor], Tensor] = torch.compile(self.model) if config.compile else self.model
        self._parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.model, config)
        self.scaler = LossScaler(config.loss_scaling, config.precision, self.device)
        self.loader = make_loader(
            open_dataset(config.data, "train"), config.global_batch, seed=config.seed, num_workers=config.num_workers
        )
        self.step, self.updates = 0, 0
        self._overflow: NonFinite | None = None
        self._clock = StepClock(self.device)

    def train(self, num_steps: int, on_step: Callable[[StepRecord], None] | None = None) -> list[StepRecord]:
        """Take ``num_steps`` steps from where the run is.

        Raises:
            Diverged: a loss or gradient was not finite and no loss scale can help. Noticed when values are next read, so some
                steps may have been taken after it.
        """
        set_matmul_precision(self.config.precision, self.device)  # one setting for all trainers of a process
        self.model.train()
        records: list[StepRecord] = []
        while num_steps > 0:
            block = self._take(min(num_steps, READ_EVERY))
            num_steps -= len(block)
            records += block
            for record in block:
                for callback in self.callbacks:
                    callback.on_step(self, record)
                if on_step:
                    on_step(record)
                if record.diverged:
                    raise Diverged(record)
        return records

    def _take(self, num_steps: int) -> list[StepRecord]:
        """Steps whose losses stay on the device until the last is taken; fewer than ``num_steps`` if they are slow."""
        taken: list[tuple[StepOutcome, float]] = []
        began, first = time.perf_counter(), self.step
        try:
            while len(taken) < num_steps and (not taken or time.perf_counter() - began < READ_AFTER_S):
                taken.append(self._step())
                if taken[-1][0].exhausted:
                    break
        except BaseException:
            self._drop_half_step()
            raise
        values = torch.stack([torch.stack((o.loss.float(), o.grad_norm.float())) for o, _ in taken]).tolist()
        all_times = self._clock.resolve()
        samples = self.config.global_batch
        return [
            StepRecord(
                step,
                loss,
                norm,
                rate,
                outcome.loss_scale,
                outcome.skipped,
                samples,
                times,
                outcome.exhausted,
                self._overflow if outcome.exhausted else None,
            )
            for step, ((outcome, rate), (loss, norm), times) in enumerate(
                zip(taken, values, all_times, strict=True), first
            )
        ]

    def _step(self) -> tuple[StepOutcome, float]:
        """One step, and its learning rate."""
        rate = learning_rate(self.config, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._clock.begin()
        self._clock.wait_begins()
        images, labels = next(self.loader)
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        self._clock.wait_ends()
        with ExitStack() as watched:
            for callback in self.callbacks:
                watched.enter_context(callback.around_step(self, self.step))
            outcome = train_step(
                self._forward,
                self._parameters,
                self.optimizer,
                self.scaler,
                images,
                labels,
                config=self.config,
                loss_function=self._loss,
                clock=self._clock,
                before_clipping=self._before_clipping,
            )
        if outcome.exhausted:
            self._overflow = self._find_overflow(images, labels)
        step = self.step
        self.step += 1
        self.updates += not outcome.skipped
        for callback in self.callbacks:
            callback.after_update(self, step)
        return outcome, rate

    def _before_clipping(self) -> None:
        for callback in self.callbacks:
            callback.before_clipping(self, self.step)

    def _find_overflow(self, images: Tensor, labels: Tensor) -> NonFinite | None:
        """Repeat a step that overflowed, without its update, under a finder of the operator where that began.

        With a process group all ranks do so together, for all of them are at the floor.
        """
        finder, clock = FirstNonFinite(self.model, policy="skip"), StepClock(self.device)
        clock.begin()
        with finder.watch(self.step):
            accumulate_gradients(
                self.model, self.scaler, images, labels, config=self.config, loss_function=self._loss, clock=clock
            )
        self.optimizer.zero_grad(set_to_none=True)
        return finder.found

    def _drop_half_step(self) -> None:
        """Leave nothing of an interrupted step that the next would add to; its batch counts as seen."""
        self._clock.reset()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.drop_half_step()

    def _loss(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(logits_BK, labels_B, label_smoothing=self.config.label_smoothing)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Loss and accuracy over the whole validation split, in the precision of training."""
        set_matmul_precision(self.config.precision, self.device)
        self.model.eval()
        loss, right, count = 0.0, 0, 0
        for images, labels in validation_batches(open_dataset(self.config.data, "val"), self.config.global_batch):
            images, labels = images.to(self.device), labels.to(self.device)
            with autocast(self.config.precision, self.device):
                logits = self.model(images).float()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(1) == labels).sum())
            count += len(labels)
        evaluation = Evaluation(loss / count, right / count, count)
        for callback in self.callbacks:
            callback.on_evaluate(self, evaluation)
        return evaluation

    def save(self, path: Path | str) -> None:
        """Write the run's whole state to one file, atomically. See ``checkpoint.save``."""
        checkpoint.save(self, Path(path))

    def load(self, path: Path | str) -> None:
        """Go on exactly from a saved state."""
        checkpoint.load(self, Path(path))


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    there = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in there:
        raise Refused("device", name, allowed="auto, " + ", ".join(there), fix="use device=auto")
    return torch.device(wanted)
