"""A configuration's attention function, gated, then timed alone. Only child processes import this module: it loads torch."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.experiment.tasks import Block, TrainTask
from workbench.hardware.allocations import allocations
from workbench.hardware.facts import DeviceFacts
from workbench.kernels import gate, layouts
from workbench.kernels.adapters import BlockSparseAttention
from workbench.kernels.layout import BlockLayout
from workbench.models.attention import IN_TILES, AttentionFunction, attention_function, eager
from workbench.planner.attention import score_bytes
from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import resolve_device
from workbench.trainer.meters import StepClock, StepTimes

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GATE_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Longest sequence at which the gate computes in float64."""
TURN_S = 0.02
"""About the shortest turn at one length, in seconds: short calls are repeated."""


@dataclass
class Case:
    """One length: inputs, the function, the blocks it computes, and how often a turn calls it."""

    tensors: list[Tensor]
    attend: AttentionFunction
    layout: BlockLayout
    figures: dict[str, float]
    calls: int = 1


class AttentionTask(TrainTask):
    """Blocks time the function at every length; guard runs train the configured ViT with it, as ``TrainTask`` does."""

    def __init__(
        self, config: TrainConfig, facts: DeviceFacts, *, lengths: list[int], block_size: int, batch: int, heads: int,
        head_dim: int,
    ) -> None:  # fmt: skip
        self.config, self.facts = config, facts
        self.device, self.dtype = resolve_device(config.device), DTYPES[config.precision]
        self.batch, self.block_size = batch, block_size
        self.cases = {n: self._case(n, heads, head_dim) for n in lengths}
        self.clock = StepClock(self.device)
        self.shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "value_bytes": self.dtype.itemsize}

    def _case(self, n: int, heads: int, head_dim: int) -> Case:
        generator = torch.Generator().manual_seed(n)
        shape = (self.batch, heads, n, head_dim)
        tensors = [torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(4)]
        attend = kernel_attention(self.config.model_args, n, self.block_size)
        if isinstance(attend, BlockSparseAttention):
            layout = attend.layout_of(tensors[0], tensors[1])
        else:
            layout = layouts.full(n, self.block_size)
        figures = {
            "density": layout.density,
            "csr_bytes": float(layout.csr_bytes),
            "mask_bytes": float(layout.dense_mask_bytes),
        }
        return Case(tensors, attend, layout, figures)

    def warm_up(self, steps: int) -> None:
        """Gate first, at every length where float64 is affordable; then memory, then calls that are not counted.

        Raises:
            GateFailed: output or a gradient is further from float64 than twice dense attention.
        """
        for n, case in self.cases.items():
            if n <= GATE_TOKENS[self.device.type]:
                self._gate(n, case)
        for n, case in self.cases.items():
            self._measure_memory(n, case)
            seconds = min(t.total for t in self._call(case, max(steps, 1)))
            case.calls = max(1, round(TURN_S / seconds))

    def _gate(self, n: int, case: Case) -> None:
        found = gate.check(case.attend, case.layout, case.tensors)
        if not found.passed:
            raise gate.GateFailed(f"{n} tokens: {found}")
        worst = max(gate.NAMES, key=lambda name: found.errors[name] / found.dense[name])
        case.figures |= {"error": found.errors[worst], "dense_error": found.dense[worst]}

    def _measure_memory(self, n: int, case: Case) -> None:
        case.figures |= dict(zip(("kept", "peak"), self._bytes(case.attend, case.tensors), strict=True))
        batch, heads = case.tensors[0].shape[:2]
        fits = 8 * score_bytes(batch, heads, n, self.dtype.itemsize) < self.facts.memory_bytes
        if case.layout.is_full and fits:
            case.figures["eager_kept"] = self._bytes(eager, case.tensors)[0]

    def _bytes(self, attend: AttentionFunction, tensors: list[Tensor]) -> tuple[float, float]:
        """Kept for the backward pass, and the most at once in both passes."""
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        out, peak, kept = allocations(lambda: attend(q, k, v), self.device)
        _, more, _ = allocations(lambda: torch.autograd.grad(out, (q, k, v), tensors[3]), self.device)
        return kept, max(peak, kept + more)

    def _call(self, case: Case, calls: int) -> list[StepTimes]:
        q, k, v = (x.detach().requires_grad_() for x in case.tensors[:3])
        for _ in range(calls):
            self.clock.begin()
            out = case.attend(q, k, v)
            self.clock.mark("forward")
            torch.autograd.grad(out, (q, k, v), case.tensors[3])
            self.clock.mark("backward")
        return self.clock.resolve()

    def block(self, steps: int) -> Block:
        extra: dict[str, float] = {name: float(value) for name, value in self.shape.items()}
        for n, case in self.cases.items():
            times = self._call(case, steps * case.calls)
            seconds = statistics.fmean(t.total for t in times)
            extra |= {f"{n}/{name}": value for name, value in (case.figures | {"seconds": seconds}).items()}
        parts = {name: statistics.fmean(getattr(t, name) for t in times) for name in ("forward", "backward")}
        return Block(
            step_time=seconds,
            samples_per_step=self.batch,
            anatomy={"data_wait": 0.0, **parts, "optimizer": 0.0, "other": max(seconds - sum(parts.values()), 0.0)},
            peak_memory_bytes=int(case.figures["peak"]),
            extra=extra,
        )


def kernel_attention(model_args: dict[str, Any], n: int, block_size: int) -> AttentionFunction:
    """A ViT's attention alone, for ``n`` tokens in blocks of ``block_size``; a 2-D pattern gets the squarest image."""
    name, options = model_args.get("attention", "sdpa"), dict(model_args.get("attention_args", {}))
    if name in IN_TILES:
        height = 1 << (n.bit_length() - 1) // 2
        options |= {"height": height, "width": n // height}
    if options:  # of a pattern: plain functions have neither
        options["block_size"] = block_size
    return attention_function(name, **options)
