"""Bytes that one device holds during training, by formula."""

from typing import NamedTuple

from workbench.errors import Refused
from workbench.models.config import VitConfig
from workbench.planner.params import cast_parameters, num_parameters

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Of a value in the autocast region. fp8 layers take in and give out bf16."""
CAST_BYTES = {"fp32": 0, "tf32": 0, "bf16": 2, "fp16": 2, "fp8": 1}
"""Of the copy of a weight that the backward pass reads."""
OPTIMIZER_VALUES = {"adamw": 2, "sgd": 1}
"""fp32 values per parameter that the optimizer keeps: two moments for Adam, momentum for SGD."""


class MemoryLedger(NamedTuple):
    """Bytes by what they are for, and the peak over a step.

    Attributes:
        images: the global batch, all of it on the device.
        casts: half-precision copies of the weights, which the backward pass needs as well.
        transient: gradients on their way through the layer where the backward pass begins.
        update: what the optimizer holds besides while it updates.
        accumulates: whether gradients of an earlier micro-batch are there during a forward pass.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    images: float
    casts: float
    transient: float
    update: float
    accumulates: bool

    @property
    def states(self) -> float:
        """16 bytes per parameter for fp32 master weights, gradients and Adam (Rajbhandari et al. 2020)."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The peak: where the backward pass begins, or the update, whichever holds more.

        In between, activations go as gradients come, layer by layer, so that no point in the middle holds more than both ends.
        Gradients are freed after the update, and are there during the forward only when micro-batches accumulate into them.
        """
        begin = self.activations + self.casts + self.transient + (self.gradients if self.accumulates else 0.0)
        return self.parameters + self.optimizer + self.images + max(begin, self.gradients + self.update)


def activation_values(vit: VitConfig, batch: int, *, gpu_autocast: bool = False) -> tuple[float, float]:
    """Elements that the backward pass needs, in the autocast dtype and in fp32, of one forward pass.

    After Korthikanti et al. 2022, counted for our block, t = batch · tokens. In the autocast dtype t·(6d + 2f) a layer: the
    inputs of qkv and fc1 (d each), q, k and v (3d), the attention's output, which proj reads (d), GELU's input and output (f
    each). In fp32 the two norms' inputs. A flash kernel adds a log-sum-exp per row, eager attention batch · heads · tokens²
    scores. The formula tokens² · heads · parameters · 4 bytes, which one meets, has wrong dimensions: a head's scores are tokens²
    values however many parameters produce them.

    Args:
        gpu_autocast: autocast on a GPU runs softmax and norms in fp32, and so keeps eager scores and what QK-norm reads twice.
    """
    n, d, f = vit.num_tokens, vit.width, vit.mlp_width
    t = batch * n
    half = t * (6 * d + 2 * f)
    full = 2 * t * d
    if vit.qk_norm:
        # The normalised q and k, and the output once more: its layout now follows theirs, and proj copies it.
        half += 3 * t * d
        full += 2 * t * d if gpu_autocast else 0
    if vit.attention == "eager":
        half += batch * vit.heads * n * n
        full += batch * vit.heads * n * n if gpu_autocast else 0
    else:
        full += batch * vit.heads * n
    return vit.depth * half, vit.depth * full + t * d


def memory_ledger(
    vit: VitConfig,
    *,
    batch: int,
    global_batch: int | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    fused_optimizer: bool = False,
    kind: str = "cuda",
) -> MemoryLedger:
    """Bytes of a training step with ``batch`` samples per forward pass; weights, gradients and moments are fp32.

    Args:
        global_batch: samples of a step, where it has several forward passes.
        precision: of the autocast region: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        fused_optimizer: an optimizer in one kernel; a multi-tensor AdamW holds one value more per parameter as it updates.
        kind: of device, ``cpu`` or ``cuda``.

    Raises:
        Refused: a precision or optimizer without a formula.
    """
    size = value_bytes(precision)
    if optimizer not in OPTIMIZER_VALUES:
        raise Refused("optimizer", optimizer, allowed=", ".join(OPTIMIZER_VALUES))
    params = num_parameters(vit)
    half, full = activation_values(vit, batch, gpu_autocast=size == 2 and kind == "cuda")
    tokens = batch * vit.num_tokens
    # fp8 layers keep their inputs in one byte, but the attention's output is kept in bf16 by the attention besides.
    saved = vit.depth * tokens * (vit.width + vit.mlp_width) if precision == "fp8" else 0
    return MemoryLedger(
        parameters=4 * params,
        gradients=4 * params,
        optimizer=4 * OPTIMIZER_VALUES[optimizer] * params,
        activations=half * size + full * 4 - saved,
        images=4 * (global_batch or batch) * vit.in_channels * vit.image_size**2,
        casts=CAST_BYTES[precision] * cast_parameters(vit),
        transient=tokens * (2 * vit.width * 4 + 2 * vit.mlp_width * size),
        update=4 * params if optimizer == "adamw" and not fused_optimizer else 0,
        accumulates=(global_batch or batch) > batch,
    )


def value_bytes(precision: str) -> int:
    if precision not in BYTES:
        raise Refused("precision", precision, allowed=", ".join(BYTES))
    return BYTES[precision]
