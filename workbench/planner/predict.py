"""Time and memory of one training step on one device, by a roofline over its operators."""

from typing import NamedTuple

from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VitConfig
from workbench.planner import roofline
from workbench.planner.flops import model_flops, operators
from workbench.planner.memory import MemoryLedger, memory_ledger, value_bytes
from workbench.planner.params import num_parameters, num_tensors

HOST_PER_OPERATOR = {"cpu": 11.0, "cuda": 4.0}
"""Host time of an operator inside ``nn.Module`` and autograd, in units of the bare operator that the probe times: of a ViT of
width 8 to 64, whose arithmetic takes no time."""
HOST_PER_CAST = 2.0
"""The same for a conversion that autocast inserts."""
BACKWARD_CALLS = 2
"""Launches of the backward pass per launch of the forward."""
OPTIMIZER_PASSES = {("adamw", False): 21, ("adamw", True): 7, ("sgd", False): 8, ("sgd", True): 5}
"""fp32 values per parameter that an update reads and writes, by optimizer and whether it is fused. Fused AdamW: weight,
gradient and two moments in, all but the gradient out. Multi-tensor: the same in eight passes, each of which reads its
operands again."""
CLIP_PASSES, UNSCALE_PASSES = 3, 2
"""Gradients read for their norm, then read and written to scale them; with fp16 once more to take the loss scale out."""
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

    A CPU computes and launches in turn. A GPU computes while the host launches ahead, so a pass takes the longer of the two;
    the update, few launches and much traffic, begins when the last gradient is there.

    Raises:
        Refused: a precision or optimizer without a formula.
    """
    size = min(micro_batch or batch, batch)
    memory = memory_ledger(
        vit,
        batch=size,
        global_batch=batch,
        precision=precision,
        optimizer=optimizer,
        fused_optimizer=fused_optimizer,
        kind=facts.kind,
    )
    passes, rest = divmod(batch, size)
    times = [_pass_times(vit, size, precision, facts)] * passes
    times += [_pass_times(vit, rest, precision, facts)] if rest else []
    times.append(_update_times(vit, precision, optimizer, fused_optimizer, facts))
    return StepPrediction(
        step_time=sum(sum(t) if facts.kind == "cpu" else max(t) for t in times),
        flops=model_flops(vit, batch),
        params=num_parameters(vit),
        memory=memory,
    )


def utilisation(vit: VitConfig, samples_per_s: float, facts: DeviceFacts, precision: str) -> float | None:
    """MFU of training ``vit`` at ``samples_per_s``; ``None`` where the peak of that precision is not known."""
    return roofline.utilisation(model_flops(vit) * samples_per_s, facts, precision)


def _pass_times(vit: VitConfig, batch: int, precision: str, facts: DeviceFacts) -> tuple[float, float]:
    """Seconds of the device and of the host for one forward and backward pass."""
    listed = operators(vit, batch, autocast=value_bytes(precision) == 2, fp8=precision == "fp8")
    device = sum(roofline.operator_seconds(o, precision, facts) for o in listed)
    launches = sum(o.calls * (HOST_PER_CAST if o.kernel == "cast" else HOST_PER_OPERATOR[facts.kind]) for o in listed)
    return device, launches * (1 + BACKWARD_CALLS) * facts.op_overhead_s


def _update_times(
    vit: VitConfig, precision: str, optimizer: str, fused: bool, facts: DeviceFacts
) -> tuple[float, float]:
    """Seconds of the device and of the host for clipping and the update."""
    passes = OPTIMIZER_PASSES[optimizer, fused] + CLIP_PASSES + (UNSCALE_PASSES if precision == "fp16" else 0)
    groups = num_tensors(vit) if facts.kind == "cpu" else 8
    seconds = num_parameters(vit) * passes * 4 / roofline.bandwidth(facts)
    return seconds, OPTIMIZER_LAUNCHES[optimizer] * groups * facts.op_overhead_s
