"""Other people's models: a factory in any importable module, timm's by name, transformers' by type. Nothing is downloaded."""

import importlib
import inspect
from typing import Any

from torch import Tensor, nn

from workbench.errors import Refused, nearest
from workbench.models.config import default_patch_size


def find_factory(module_name: str, attribute: str) -> Any:
    """The callable that ``module_name:attribute`` names.

    Raises:
        Refused: the module cannot be imported, has no such attribute, or the attribute cannot be called.
    """
    if module_name == "__main__":
        raise Refused(
            "model factory",
            attribute,
            allowed="a factory in an importable module",
            fix="move it from the notebook to a file: arms run in processes of their own that cannot see the notebook",
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module's own code raises
        raise Refused(
            "module of the model factory",
            module_name,
            allowed=f"one that can be imported ({type(error).__name__}: {error})",
            fix="install it, or add its folder to PYTHONPATH",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_")]
            raise Refused(f"factory in {module_name}", attribute, fix=nearest(part, names))
        found = getattr(found, part)
    if not callable(found):
        raise Refused(f"factory in {module_name}", attribute, allowed="a function or class")
    return found


def call(name: str, factory: Any, data: dict[str, Any], model_args: dict[str, Any]) -> nn.Module:
    """Call a factory with those of the data's arguments that it takes, and all that the user gave.

    Raises:
        Refused: an argument that the factory does not take, one that it misses, or a result that is no module.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin has no signature to look at
        raise Refused("model factory", name, allowed="a function or class written in Python") from None
    takes = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for argument in model_args:
            if argument not in takes:
                raise Refused(f"argument of {name}", argument, fix=nearest(argument, takes))
        data = {k: v for k, v in data.items() if k in takes}
    arguments = {**data, **model_args}
    missing = [n for n, p in parameters.items() if n in takes and p.default is p.empty and n not in arguments]
    if missing:
        raise Refused(f"argument {missing[0]!r} of {name} is not given", fix="give it in model_args")
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise Refused(f"model factory {name!r} returned", type(model).__name__, allowed="a torch.nn.Module")
    return model


def timm(name: str, num_classes: int, image_size: int, in_channels: int, model_args: dict[str, Any]) -> nn.Module:
    """A model of timm, untrained. Models with a fixed input size are built for the data's."""
    library = _library("timm", "timm")
    if not library.is_model(name):
        raise Refused("timm model", name, fix=nearest(name, library.list_models()))
    arguments = {"num_classes": num_classes, "in_chans": in_channels}
    known = library.get_pretrained_cfg(name)
    if known is not None and known.fixed_input_size:
        arguments["img_size"] = image_size
    try:
        return library.create_model(name, pretrained=False, **{**arguments, **model_args})
    except Exception as error:  # each model checks its arguments in its own way
        raise Refused(
            f"timm model {name!r} for images of {image_size} could not be built: {type(error).__name__}: {error}"[:500],
            fix="check model_args; a small image needs a small patch_size",
        ) from error


class _Logits(nn.Module):
    """Adapts a ``transformers`` image classifier to the plain signature."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.model(pixel_values=x_BCHW).logits


def transformers(
    kind: str, num_classes: int, image_size: int, in_channels: int, model_args: dict[str, Any]
) -> nn.Module:
    """An image classifier of transformers by its model type, such as ``vit``, with untrained weights.

    A configuration there keeps whatever it is given, a misspelt name too: only its own fields are let through.
    """
    library = _library("transformers", "hf")
    try:
        fields = library.AutoConfig.for_model(kind).to_dict()
    except (KeyError, ValueError) as error:
        raise Refused("transformers model type", kind, fix=str(error).splitlines()[0][:200]) from error
    for argument in model_args:
        if argument not in fields:
            raise Refused(f"argument of hf:{kind}", argument, fix=nearest(argument, fields))
    if "num_channels" not in fields:
        raise Refused("transformers model type", kind, allowed="one for images, such as hf:vit")
    arguments: dict[str, Any] = {"num_labels": num_classes, "num_channels": in_channels}
    if "image_size" in fields:
        arguments["image_size"] = image_size
    if isinstance(patch := fields.get("patch_size"), int) and image_size % patch:
        arguments["patch_size"] = default_patch_size(image_size)
    try:
        config = library.AutoConfig.for_model(kind, **{**arguments, **model_args})
        return _Logits(library.AutoModelForImageClassification.from_config(config))
    except Exception as error:  # each model checks its configuration in its own way
        raise Refused(f"transformers model {kind!r} could not be built: {error}"[:500], fix="try hf:vit") from error


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a torchvision of another build fails in its own way
        raise Refused(
            f"models of {module} need that library ({type(error).__name__}: {error})",
            fix=f"pip install -e '.[{extra}]'",
        ) from error
