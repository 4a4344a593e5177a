"""From a model's name to a module that maps images (B, C, H, W) to logits (B, classes)."""

import importlib
import inspect
from typing import Any

from torch import Tensor, nn

from workbench.errors import Refused, nearest
from workbench.models.config import VITS, check_model, default_patch_size, vit_config
from workbench.models.resnet import ResNet
from workbench.models.vit import VisionTransformer


def build_model(name: str, *, num_classes: int, image_size: int, in_channels: int, **model_args: Any) -> nn.Module:
    """Build a registered ViT or ResNet, or a model from ``package.module:factory``, ``timm:NAME`` or ``hf:NAME``.

    Args:
        name: see above.
        num_classes, image_size, in_channels: what the data asks for.
        model_args: fields of ``VitConfig``, or keyword arguments of the factory.

    Raises:
        Refused: unknown name, missing library, arguments that do not fit, or a factory that returns no module.
    """
    check_model(name)
    data = {"num_classes": num_classes, "image_size": image_size, "in_channels": in_channels}
    if name in VITS:
        return VisionTransformer(vit_config(name, **{**data, **model_args}))
    if name == "resnet-small":
        return _call(name, ResNet, {**data, **model_args}, set(data))
    scheme, _, rest = name.partition(":")
    if scheme == "timm":
        return _timm(rest, num_classes, image_size, in_channels, model_args)
    if scheme == "hf":
        return _transformers(rest, num_classes, image_size, in_channels, model_args)
    return _call(name, _factory(scheme, rest), {**data, **model_args}, set(data))


def _factory(module_name: str, attribute: str) -> Any:
    if module_name == "__main__":
        raise Refused(
            "model factory",
            attribute,
            allowed="a factory in an importable module",
            fix="move it from the notebook to a file: arms run in processes of their own that cannot see the notebook",
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise Refused(
            "module of the model factory",
            module_name,
            allowed=f"one that can be imported ({error})",
            fix="install it, or add its folder to PYTHONPATH",
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Refused(
                f"factory in {module_name}", attribute, fix=nearest(part, [n for n in dir(found) if n[0] != "_"])
            )
        found = getattr(found, part)
    if not callable(found):
        raise Refused(f"factory in {module_name}", attribute, allowed="a function or class")
    return found


def _call(name: str, factory: Any, arguments: dict[str, Any], optional: set[str]) -> nn.Module:
    """Call a factory with those of the data's arguments that it takes, and all that the user gave."""
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for argument in set(arguments) - set(parameters) - optional:
            raise Refused(f"argument of {name}", argument, fix=nearest(argument, parameters))
        arguments = {k: v for k, v in arguments.items() if k in parameters}
    try:
        model = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise Refused(f"model {name!r} could not be built: {error}", fix="check model_args") from error
    if not isinstance(model, nn.Module):
        raise Refused(f"model factory {name!r} returned", type(model).__name__, allowed="a torch.nn.Module")
    return model


def _timm(name: str, num_classes: int, image_size: int, in_channels: int, model_args: dict[str, Any]) -> nn.Module:
    timm = _library("timm", "timm")
    if not timm.is_model(name):
        raise Refused("timm model", name, fix=nearest(name, timm.list_models()))
    arguments = {"num_classes": num_classes, "in_chans": in_channels, **model_args}
    try:
        return timm.create_model(name, img_size=image_size, **arguments)
    except TypeError:  # convolutional models take no image size
        return timm.create_model(name, **arguments)


class _Logits(nn.Module):
    """Adapts a ``transformers`` image classifier to the plain signature."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.model(pixel_values=x_BCHW).logits


def _transformers(
    kind: str, num_classes: int, image_size: int, in_channels: int, model_args: dict[str, Any]
) -> nn.Module:
    transformers = _library("transformers", "hf")
    data = {"num_labels": num_classes, "image_size": image_size, "num_channels": in_channels}
    if "patch_size" not in model_args and image_size % 16:
        data["patch_size"] = default_patch_size(image_size)
    try:
        config = transformers.AutoConfig.for_model(kind, **{**data, **model_args})
        return _Logits(transformers.AutoModelForImageClassification.from_config(config))
    except ValueError as error:
        raise Refused(
            "transformers model type",
            kind,
            allowed="one with an image classification head, such as hf:vit",
            fix=str(error)[:200],
        ) from None


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(
            f"models of {module} need that library ({error})", fix=f"pip install 'workbench[{extra}]'"
        ) from None
