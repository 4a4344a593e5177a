"""Weights that are no numbers any more: what a checkpoint must not keep in place of a good one."""

import torch
from torch import Tensor, nn


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Names of parameters with a NaN or infinity, and of buffers with a NaN: running statistics fed an infinity hold one.

    An infinity in a buffer may be meant, as in attention masks. Of a sharded tensor, the part on this rank is looked at.
    """
    parameters = [name for name, p in model.named_parameters() if not torch.isfinite(_here(p)).all()]
    return parameters + [name for name, b in model.named_buffers() if torch.isnan(_here(b)).any()]


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
