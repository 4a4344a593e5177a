"""How long an operator takes on a device: as long as its arithmetic or its memory traffic needs, whichever is longer."""

from workbench.hardware.facts import DeviceFacts
from workbench.planner.flops import Operator
from workbench.planner.memory import value_bytes

MATRIX_EFFICIENCY = {"datasheet": 0.8, "measured matmul": 1.0}
"""Share of the peak that a large product reaches, where the device was not there to be measured. The median over the GPUs of the
public table of maximum achievable matmul rates (ml-engineering); a measured peak is already what is reached."""
BANDWIDTH_EFFICIENCY = {"datasheet": 0.9, "measured copy": 1.0}
"""Share of the datasheet's bandwidth that a large copy reaches: 4.3 of 4.8 TB/s on an H200."""
POINTWISE_EFFICIENCY = 0.6
"""Share of a copy's bandwidth that norms, mixed-precision additions, sums and strided copies reach: 2.3, 2.5, 1.1 and 1.6 of
4.1 TB/s on an H200, where GELU reaches 2.9 to 4.1."""
ATTENTION_EFFICIENCY = {"fp32": 0.36, "half": 0.17}
"""A fused attention kernel's rate over a matrix product's, forward and backward together, where it was not measured: on an H200
at 197 tokens and head_dim 64. Short sequences keep matrix units waiting for the softmax."""


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


def attention_rate(facts: DeviceFacts, precision: str) -> float:
    """What a fused attention kernel reaches. In fp32 it uses no TF32, whatever the mode; between fp8 layers it runs in bf16."""
    dtype = {"tf32": "fp32", "fp8": "bf16"}.get(precision, precision)
    share = ATTENTION_EFFICIENCY["fp32" if dtype == "fp32" else "half"]
    return facts.attention_flops.get(dtype) or matrix_rate(facts, dtype) * share


def operator_seconds(operator: Operator, precision: str, facts: DeviceFacts) -> float:
    """Seconds of the device for the forward and backward pass of one kind of operator, launches left out."""
    size = value_bytes(precision)
    if operator.kernel == "matrix":
        rate, speed = matrix_rate(facts, precision), bandwidth(facts)
    elif operator.kernel == "attention":
        rate, speed = attention_rate(facts, precision), bandwidth(facts)
    else:
        rate, speed = matrix_rate(facts, "fp32"), bandwidth(facts) * POINTWISE_EFFICIENCY
    forward = max(operator.flops / rate, (operator.half * size + operator.full * 4) / speed)
    return forward + max(
        operator.backward_flops / rate, (operator.backward_half * size + operator.backward_full * 4) / speed
    )


def utilisation(flops_per_s: float, facts: DeviceFacts, precision: str) -> float | None:
    """MFU: model FLOPs per second over the peak dense rate of the named dtype; ``None`` where that is not known."""
    peak = peak_rate(facts, precision)
    return flops_per_s / peak if peak else None
