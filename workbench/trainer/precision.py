"""The dtype that a step computes in, and the loss scale that keeps fp16 gradients from vanishing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed

from workbench.errors import Refused
from workbench.trainer.config import LossScaling, Precision
from workbench.trainer.loss_scale import LossScale

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What is not an fp8 product runs in bf16 around it."""


def set_matmul_precision(precision: Precision, device: torch.device) -> None:
    """TF32 for fp32 matrix products when asked for, and else off: a baseline called fp32 is fp32."""
    if precision == "tf32" and device.type != "cuda":
        raise Refused(
            "precision",
            "tf32",
            allowed="fp32, bf16 or fp16 on this device",
            fix="TF32 is a mode of NVIDIA matrix units; use fp32",
        )
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The region in which operators run in half precision; weights stay fp32. Nothing for fp32 and tf32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


class LossScaler:
    """Loss scaling for fp16 over ``torch.amp.GradScaler``; does nothing in other precisions.

    One step is ``scale`` → backward → ``unscale`` → clipping → ``step``. ``step`` skips the update when ``unscale`` found a
    non-finite gradient, which is the scaler's way of finding the largest scale, not a fault. With a process group all ranks
    skip when one of them found such a gradient, so that weights and scales stay equal.

    The scale follows from the skips, which the host learns anyway: it is kept here, and reading it waits for nothing.
    """

    def __init__(self, config: LossScaling, precision: Precision, device: torch.device) -> None:
        self.enabled = precision == "fp16" and config.mode != "none"
        self._scale = LossScale(config)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=config.init, enabled=self.enabled)
        # It makes its state on the device at first use; what resets or restores it should find it there.
        self._scaler.scale(torch.zeros(1, device=device))

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.unscale_(optimizer)
        if self.enabled and distributed.is_available() and distributed.is_initialized():
            for found in self._scaler._found_inf_per_device(optimizer).values():
                distributed.all_reduce(found, distributed.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights unless a gradient was not finite; whether the update was skipped."""
        if not self.enabled:
            optimizer.step()
            return False
        # GradScaler.step returns the optimizer's result, None on a skip as on success; the found-inf flag is what tells.
        found = self._scaler._found_inf_per_device(optimizer)
        skipped = any(flag.item() > 0 for flag in found.values())
        self._scaler.step(optimizer)
        self._scale.update(skipped)
        self._scaler.update(self._scale.value)
        return skipped

    def drop_half_step(self) -> None:
        """Forget what was unscaled and found in a step that did not reach its end; the scale stays."""
        if self.enabled:
            self._scaler.update(self._scale.value)

    @property
    def value(self) -> float | None:
        """The scale of the step to come; ``None`` where the loss is not scaled."""
        return self._scale.value if self.enabled else None

    @property
    def exhausted(self) -> bool:
        """Whether the last step overflowed at the floor, where the scale cannot be lowered any more."""
        return self._scale.exhausted

    def state_dict(self) -> dict[str, Any]:
        """Empty where the loss is not scaled."""
        return self._scale.state_dict() if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self._scale.load_state_dict(state)
            self._scaler.update(self._scale.value)


def clip(parameters: list[Tensor], max_norm: float | None) -> Tensor:
    """Clip the gradients' global 2-norm to ``max_norm``; the norm before clipping, as a scalar tensor.

    A non-finite norm leaves the gradients untouched: scaling by it would turn every gradient to 0 or NaN and hide the layer
    where it began.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if max_norm is not None:
        # A norm of 0 clips nothing.
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.nan_to_num(0.0, 0.0), foreach=True)
    return norm
