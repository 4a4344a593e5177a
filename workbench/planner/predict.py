"""Time of one training step on one device, by a roofline over its operators."""

from typing import NamedTuple

from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VitConfig
from workbench.planner.memory import BYTES, OPTIMIZER_VALUES, MemoryLedger, memory_ledger, num_parameters
from workbench.planner.operators import Operator, forward_operators, model_flops

MATRIX_EFFICIENCY = {"datasheet": 0.7, "measured matmul": 1.0}
"""Share of the peak that a large product reaches: 0.7–0.87 of datasheets in the public max-achievable-matmul tables; a
measured peak is already what is reached."""
PYTHON_PER_OPERATOR = 2.5
"""Host time of an operator inside ``nn.Module`` and autograd, in units of the bare operator that the probe times."""
BACKWARD_CALLS = 2
OPTIMIZER_LAUNCHES = {"adamw": 12, "sgd": 4}
"""Operators of a multi-tensor optimizer step and of gradient clipping, per tensor group."""


class StepPrediction(NamedTuple):
    """Seconds, FLOPs, count and bytes of one optimizer step."""

    step_time: float
    flops: float
    params: int
    memory: MemoryLedger


def predict_step(
    vit: VitConfig,
    *,
    batch: int,
    micro_batch: int | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    facts: DeviceFacts,
) -> StepPrediction:
    """Predict one optimizer step over ``batch`` samples, in forward passes of ``micro_batch``.

    An operator takes the longest of its arithmetic, its memory traffic and its launch. The backward pass takes twice the
    forward's arithmetic and traffic. Autocast adds the conversions of weights and inputs.
    """
    size = min(micro_batch or batch, batch)
    passes, rest = divmod(batch, size)
    seconds = passes * _pass_time(vit, size, precision, facts) + (
        _pass_time(vit, rest, precision, facts) if rest else 0.0
    )
    params = num_parameters(vit)
    return StepPrediction(
        step_time=seconds + _optimizer_time(params, vit, optimizer, facts),
        flops=model_flops(vit, batch),
        params=params,
        memory=memory_ledger(vit, batch=size, precision=precision, optimizer=optimizer),
    )


def peak_rate(facts: DeviceFacts, precision: str) -> float | None:
    """The device's dense rate for a precision, FLOP/s; fp32's where tf32 is not a mode of its own."""
    fallback = "fp32" if precision == "tf32" and facts.kind == "cpu" else precision
    return facts.peak_flops.get(fallback)


def utilisation(vit: VitConfig, samples_per_s: float, facts: DeviceFacts, precision: str) -> float | None:
    """MFU: model FLOPs per second over the peak dense rate of the named dtype; ``None`` where that is not known."""
    peak = peak_rate(facts, precision)
    return model_flops(vit) * samples_per_s / peak if peak else None


def _pass_time(vit: VitConfig, batch: int, precision: str, facts: DeviceFacts) -> float:
    return sum(_operator_time(o, precision, facts) for o in forward_operators(vit, batch))


def _operator_time(o: Operator, precision: str, facts: DeviceFacts) -> float:
    """Forward and backward seconds of one kind of operator."""
    rate = peak_rate(facts, precision if o.matrix else "fp32") or facts.peak_flops["fp32"]
    arithmetic = o.flops / (rate * MATRIX_EFFICIENCY[facts.peak_source])
    traffic = o.values * (BYTES[precision] if o.matrix else 4) / facts.memory_bandwidth
    launch = o.calls * facts.op_overhead_s * PYTHON_PER_OPERATOR
    casts = (
        o.casts * 6 / facts.memory_bandwidth + o.calls * 2 * facts.op_overhead_s
        if BYTES[precision] == 2 and o.casts
        else 0.0
    )
    forward = max(arithmetic, traffic, launch) + casts
    backward = max(2 * arithmetic, 2 * traffic, BACKWARD_CALLS * launch) + casts
    return forward + backward


def _optimizer_time(params: int, vit: VitConfig, optimizer: str, facts: DeviceFacts) -> float:
    """Traffic: weights and gradients read, weights and moments read and written; clipping reads the gradients once more."""
    values = params * (4 + 2 * OPTIMIZER_VALUES[optimizer])
    tensors = 12 * vit.depth + 8
    launches = OPTIMIZER_LAUNCHES[optimizer] * (tensors if facts.kind == "cpu" else 8) * facts.op_overhead_s
    return max(values * 4 / facts.memory_bandwidth, launches)
