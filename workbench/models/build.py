"""From a model's name to a module that maps images (B, C, H, W) to logits (B, classes)."""

from typing import Any

from torch import nn

from workbench.models import adapters
from workbench.models.config import VITS, check_model, vit_config
from workbench.models.resnet import ResNet
from workbench.models.vit import VisionTransformer


def build_model(name: str, *, num_classes: int, image_size: int, in_channels: int, **model_args: Any) -> nn.Module:
    """Build a registered ViT or ResNet, or a model from ``package.module:factory``, ``timm:NAME`` or ``hf:NAME``.

    Args:
        name: see above.
        num_classes, image_size, in_channels: what the data asks for.
        model_args: fields of ``VitConfig``, or keyword arguments of the factory. A ViT's ``attention`` may also be a function.

    Raises:
        Refused: unknown name, missing library, arguments that do not fit, or a factory that returns no module.
    """
    check_model(name)
    data = {"num_classes": num_classes, "image_size": image_size, "in_channels": in_channels}
    if name in VITS:
        function = model_args.pop("attention") if callable(model_args.get("attention")) else None
        return VisionTransformer(vit_config(name, **{**data, **model_args}), function)
    if name == "resnet-small":
        return adapters.call(name, ResNet, data, model_args)
    scheme, _, rest = name.partition(":")
    if scheme == "timm":
        return adapters.timm(rest, num_classes, image_size, in_channels, model_args)
    if scheme == "hf":
        return adapters.transformers(rest, num_classes, image_size, in_channels, model_args)
    return adapters.call(name, adapters.find_factory(scheme, rest), data, model_args)
