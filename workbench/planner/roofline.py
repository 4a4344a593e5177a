"""How long an operator takes on a device: as long as its arithmetic or its memory traffic needs, whichever is longer."""

from workbench.hardware.facts import DeviceFacts
from workbench.planner.flops import Operator
from workbench.planner.memory import value_bytes

MATRIX_EFFICIENCY = {"datasheet": 0.8, "measured matmul": 1.0}
"""Share of the peak that a large product reaches, where the device was not there to be measured. The median over the GPUs of the
public table of maximum achievable matmul rates (ml-engineering); a measured peak is already what is reached."""
BANDWIDTH_EFFICIENCY = {"datasheet": 0.9, "measured copy": 1.0}
"""Share of the datasheet's bandwidth that a large copy reaches: 4.3 of 4.8 TB/s on an H200."""
ATTENTION_EFFICIENCY = 0.5
"""A fused attention kernel's rate over a matrix product's: between its products the softmax runs on no matrix unit. Forward and
backward of FlashAttention-2 against the same machines' products (Dao 2023; Shah et al. 2024)."""


def peak_rate(facts: DeviceFacts, precision: str) -> float | None:
    """The device's dense peak for a precision, FLOP/s, by which MFU divides; fp32's for tf32 where that is no mode of its own."""
    return facts.peak_flops.get("fp32" if precision == "tf32" and facts.kind == "cpu" else precision)


def matrix_rate(facts: DeviceFacts, precision: str) -> float:
    """What a large matrix product reaches: as measured, else a share of the peak. fp32's, where the device has no such units."""
    measured = facts.matmul_flops.get(precision)
    peak = peak_rate(facts, precision) or facts.peak_flops["fp32"]
    return measured or peak * MATRIX_EFFICIENCY[facts.peak_source]


def bandwidth(facts: DeviceFacts) -> float:
    """What a large copy reaches, bytes read and written per second."""
    return facts.copy_bandwidth or facts.memory_bandwidth * BANDWIDTH_EFFICIENCY[facts.bandwidth_source]


def operator_seconds(operator: Operator, precision: str, facts: DeviceFacts) -> tuple[float, float]:
    """Seconds of the device for the forward and the backward pass of one kind of operator, launches left out."""
    if operator.kernel == "pointwise":
        rate = matrix_rate(facts, "fp32")
    elif operator.kernel == "attention":  # fp8 is for linear layers; attention between them runs in bf16
        rate = matrix_rate(facts, "bf16" if precision == "fp8" else precision) * ATTENTION_EFFICIENCY
    else:
        rate = matrix_rate(facts, precision)
    arithmetic = operator.flops / rate
    traffic = (operator.half * value_bytes(precision) + operator.full * 4) / bandwidth(facts)
    return (
        max(arithmetic, traffic),
        max(arithmetic * operator.backward_flops, traffic * operator.backward_traffic),
    )


def utilisation(flops_per_s: float, facts: DeviceFacts, precision: str) -> float | None:
    """MFU: model FLOPs per second over the peak dense rate of the named dtype; ``None`` where that is not known."""
    peak = peak_rate(facts, precision)
    return flops_per_s / peak if peak else None
