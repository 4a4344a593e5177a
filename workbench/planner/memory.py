"""Bytes that one device holds during training, by formula."""

from typing import NamedTuple

from workbench.models.config import VitConfig

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
OPTIMIZER_VALUES = {"adamw": 2, "sgd": 1}
"""fp32 values per parameter that the optimizer keeps: two moments for Adam, momentum for SGD."""


class MemoryLedger(NamedTuple):
    """Bytes by what they are for. The peak is near the end of the forward pass or of the backward; both hold nearly all."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    casts: float
    """Half-precision copies of the weights that autocast keeps for the backward."""

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def states(self) -> float:
        """16 bytes per parameter for fp32 master weights, gradients and Adam (Rajbhandari et al. 2020)."""
        return self.parameters + self.gradients + self.optimizer


def num_parameters(vit: VitConfig) -> int:
    """Exact count of our ViT: per layer 4d² + 2df + 9d + f, with norms and biases; embeddings and head besides."""
    d, f = vit.width, vit.mlp_width
    attention = 4 * d * d + 4 * d + (4 * vit.head_dim if vit.qk_norm else 0)
    layer = attention + 2 * d * f + f + d + 4 * d
    patches = vit.in_channels * vit.patch_size**2 * d + d
    embeddings = d * (1 + vit.registers + vit.num_patches + 1)
    return vit.depth * layer + patches + embeddings + 2 * d + d * vit.num_classes + vit.num_classes


def activation_values(vit: VitConfig, batch: int) -> tuple[float, float]:
    """Elements that the backward pass needs, in the autocast dtype and in fp32.

    After Korthikanti et al. 2022, counted for our block. In the autocast dtype: the inputs of the four linear layers (d, d,
    d, f), q, k, v and the attention's output with its log-sum-exp, and GELU's input (f); eager attention keeps the b·h·n²
    scores and their softmax besides. In fp32: the residual stream into the two norms.
    """
    tokens = batch * vit.num_tokens
    d, f = vit.width, vit.mlp_width
    half = tokens * (2 * d + 3 * d + d + 2 * f)
    if vit.qk_norm:
        half += 2 * tokens * d
    full = tokens * 2 * d
    scores = batch * vit.heads * vit.num_tokens**2
    half += 2 * scores if vit.attention == "eager" else 0
    full += 0 if vit.attention == "eager" else batch * vit.heads * vit.num_tokens
    return vit.depth * half, vit.depth * full + tokens * 2 * d


def memory_ledger(vit: VitConfig, *, batch: int, precision: str = "fp32", optimizer: str = "adamw") -> MemoryLedger:
    """Bytes of a training step with ``batch`` samples per forward pass; weights, gradients and moments are fp32.

    Args:
        precision: of the autocast region: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    """
    params = num_parameters(vit)
    half, full = activation_values(vit, batch)
    size = BYTES[precision]
    return MemoryLedger(
        parameters=4 * params,
        gradients=4 * params,
        optimizer=4 * OPTIMIZER_VALUES[optimizer] * params,
        activations=half * size + full * 4,
        casts=params * 2 if size == 2 else 0,
    )
