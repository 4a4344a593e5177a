"""Time and memory of one training step on one device, by a roofline over its operators."""

from typing import NamedTuple

from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VitConfig
from workbench.planner import roofline
from workbench.planner.flops import forward_operators, model_flops
from workbench.planner.memory import MemoryLedger, memory_ledger, value_bytes
from workbench.planner.params import num_parameters, num_tensors

HOST_PER_OPERATOR = 2.5
"""Host time of an operator inside ``nn.Module`` and autograd, in units of the bare operator that the probe times."""
BACKWARD_CALLS = 2
"""Launches of the backward pass per launch of the forward."""
OPTIMIZER_PASSES = {("adamw", False): 21, ("adamw", True): 7, ("sgd", False): 8, ("sgd", True): 5}
"""fp32 values per parameter that an update reads and writes, by optimizer and whether it is fused. Fused AdamW: weight,
gradient and two moments in, all but the gradient out. Multi-tensor: the same in eight passes, each of which reads its
operands again."""
CLIP_PASSES = 3
"""Gradients read for their norm, then read and written to scale them."""
OPTIMIZER_LAUNCHES = {"adamw": 12, "sgd": 4}
"""Operators of a multi-tensor update and of clipping: per tensor on a CPU, per group of tensors on a GPU."""


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
    fused_optimizer: bool = False,
    facts: DeviceFacts,
) -> StepPrediction:
    """Predict one optimizer step over ``batch`` samples, in forward passes of ``micro_batch``.

    Device time is the sum over operators of the longest of arithmetic and traffic. A CPU adds the launches to it; a GPU
    computes while the host launches ahead, so its step takes the longer of the two.

    Raises:
        Refused: a precision or optimizer without a formula.
    """
    size = min(micro_batch or batch, batch)
    passes, rest = divmod(batch, size)
    memory = memory_ledger(
        vit,
        batch=size,
        precision=precision,
        optimizer=optimizer,
        fused_optimizer=fused_optimizer,
        accumulates=size < batch,
        kind=facts.kind,
    )
    device, host = _update_times(vit, optimizer, fused_optimizer, facts)
    for count, samples in ((passes, size), (1, rest)):
        if samples:
            pass_device, pass_host = _pass_times(vit, samples, precision, facts)
            device, host = device + count * pass_device, host + count * pass_host
    return StepPrediction(
        step_time=device + host if facts.kind == "cpu" else max(device, host),
        flops=model_flops(vit, batch),
        params=num_parameters(vit),
        memory=memory,
    )


def utilisation(vit: VitConfig, samples_per_s: float, facts: DeviceFacts, precision: str) -> float | None:
    """MFU of training ``vit`` at ``samples_per_s``; ``None`` where the peak of that precision is not known."""
    return roofline.utilisation(model_flops(vit) * samples_per_s, facts, precision)


def _pass_times(vit: VitConfig, batch: int, precision: str, facts: DeviceFacts) -> tuple[float, float]:
    """Seconds of the device and of the host for one forward and backward pass."""
    operators = forward_operators(vit, batch, autocast=value_bytes(precision) == 2)
    device = sum(sum(roofline.operator_seconds(o, precision, facts)) for o in operators)
    launches = sum(o.calls for o in operators) * (1 + BACKWARD_CALLS)
    return device, launches * facts.op_overhead_s * HOST_PER_OPERATOR


def _update_times(vit: VitConfig, optimizer: str, fused: bool, facts: DeviceFacts) -> tuple[float, float]:
    """Seconds of the device and of the host for clipping and the update."""
    values = num_parameters(vit) * (OPTIMIZER_PASSES[optimizer, fused] + CLIP_PASSES)
    groups = num_tensors(vit) if facts.kind == "cpu" else 8
    return values * 4 / roofline.bandwidth(facts), OPTIMIZER_LAUNCHES[optimizer] * groups * facts.op_overhead_s
