"""Healthy vision transformers with one fault planted in each, for experiments whose right answer is known.

The stability case's planted ResNet is ``resnet.badly_initialised``. Take ``package.module:factory`` as the model's name.
"""

from typing import Any

import torch
from torch import Tensor

from workbench.errors import Refused
from workbench.models.config import vit_config
from workbench.models.vit import VisionTransformer


class _SmallGradients(VisionTransformer):
    divisor: float

    def forward(self, x_BCHW: Tensor) -> Tensor:
        # In fp32, as a loss is: the logits' own gradient is divided before it becomes a number of 16 bits.
        logits_BK = super().forward(x_BCHW).float()
        if logits_BK.requires_grad:
            logits_BK.register_hook(lambda grad_BK: grad_BK / self.divisor)
        return logits_BK


def small_gradients(*, divisor: float, **fields: Any) -> VisionTransformer:
    """vit-nano whose every gradient is ``divisor`` times too small, as if the loss were divided by it; its values are not.

    So does the mean over a batch that is ``divisor`` times as large. The fault is in the range of the numbers alone: in fp32
    the model learns as the healthy one does under an optimizer that does not mind the gradient's scale.
    """
    if not divisor >= 1:
        raise Refused("divisor", divisor, allowed="1, the healthy model, or more")
    model = _SmallGradients(vit_config("vit-nano", **fields))
    model.divisor = divisor
    return model


def large_logits(*, gain: float, **fields: Any) -> VisionTransformer:
    """vit-nano whose projections to queries and keys start ``gain`` times too large: attention logits, gain² times.

    With ``qk_norm`` the layer norms divide the gain out again. A gain of 1 is the healthy model.
    """
    model = VisionTransformer(vit_config("vit-nano", **fields))
    with torch.no_grad():
        for name, weight_OI in model.named_parameters():
            if name.endswith("attn.qkv.weight"):
                weight_OI[: 2 * model.config.width].mul_(gain)
    return model
