"""Model names and shapes, as plain data without torch, so that planners and command lines can reason about them.

Sizes and their sources: tiny and s from Touvron et al. 2021; b, l and h from Dosovitskiy et al. 2021; 1b is ViT-g (Zhai
et al. 2022: width 1408, depth 40, MLP 6144); 22b from Dehghani et al. 2023 (width 6144, depth 48, 48 heads, MLP 24576);
3b, 10b and 32b are ours, at the same proportions. nano and micro are for CPUs.
"""

import sys
from importlib.machinery import PathFinder
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.errors import Refused, nearest, refusal

PositiveInt = Annotated[int, Field(gt=0)]


class VitConfig(BaseModel):
    """Shape of a pre-norm vision transformer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    patch_size: PositiveInt = 16
    image_size: PositiveInt = 224
    in_channels: PositiveInt = 3
    num_classes: PositiveInt = 1000
    qk_norm: bool = False
    """Layer norm on queries and keys, which bounds the attention logits (Dehghani et al. 2023)."""
    registers: Annotated[int, Field(ge=0)] = 0
    """Extra learned tokens without a patch (Darcet et al. 2024)."""
    gelu: Literal["exact", "tanh"] = "exact"
    attention: str = "sdpa"
    """Name in ``workbench.models.attention``, or a block pattern: ``adaptive`` or a builder of ``workbench.kernels.layouts``."""
    attention_args: dict[str, Any] = {}
    """Of a block pattern: its ``block_size``, ``backend`` and own options. The sides of 2-D patterns come from the image."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> "VitConfig":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}")
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Patches, the class token and the registers."""
        return self.num_patches + 1 + self.registers


def _shape(width: int, depth: int, heads: int, mlp_width: int | None = None, patch_size: int = 16) -> dict[str, int]:
    mlp = mlp_width or 4 * width
    return {"width": width, "depth": depth, "heads": heads, "mlp_width": mlp, "patch_size": patch_size}


VITS: dict[str, dict[str, int]] = {
    "vit-nano": _shape(64, 4, 4),
    "vit-micro": _shape(128, 5, 4),
    "vit-tiny": _shape(192, 12, 3),
    "vit-s": _shape(384, 12, 6),
    "vit-b": _shape(768, 12, 12),
    "vit-l": _shape(1024, 24, 16),
    "vit-h": _shape(1280, 32, 16, patch_size=14),
    "vit-1b": _shape(1408, 40, 16, 6144, patch_size=14),
    "vit-3b": _shape(2304, 46, 18, 9216, patch_size=14),
    "vit-10b": _shape(4096, 50, 32, patch_size=14),
    "vit-22b": _shape(6144, 48, 48, 24576, patch_size=14),
    "vit-32b": _shape(7168, 52, 56, 28672, patch_size=14),
}
OTHERS = ("resnet-small",)
ADAPTERS = {"timm": "timm", "hf": "transformers"}
"""Library by scheme; the extra that installs it has the scheme's name."""


def vit_config(name: str, **overrides: Any) -> VitConfig:
    """The shape of a named ViT. A patch size that does not fit a small image is replaced by ``default_patch_size``'s.

    Raises:
        Refused: unknown name or field, or a shape that does not fit.
    """
    if name not in VITS:
        raise Refused("model", name, allowed="a registered ViT", fix=nearest(name, VITS))
    fields: dict[str, Any] = {**VITS[name], **overrides}
    image_size = fields.get("image_size")
    if "patch_size" not in overrides and isinstance(image_size, int) and image_size % fields["patch_size"]:
        fields["patch_size"] = default_patch_size(image_size)
    for field in overrides:
        if field not in VitConfig.model_fields:
            raise Refused(f"field of {name}", field, fix=nearest(field, VitConfig.model_fields))
    try:
        return VitConfig(**fields)
    except ValidationError as error:
        raise refusal(name, error) from None


def default_patch_size(image_size: int) -> int:
    """The largest patch up to 16 that divides the image and leaves at least 4 patches along each side."""
    return max(p for p in range(1, 17) if image_size % p == 0 and (image_size // p >= 4 or p == 1))


def check_model(name: str) -> None:
    """Refuse a model name that nothing could build, before anything starts and without loading torch."""
    if name in VITS or name in OTHERS:
        return
    scheme, colon, rest = name.partition(":")
    if colon and scheme in ADAPTERS and rest:
        library = ADAPTERS[scheme]
        if not _is_importable(library):
            raise Refused(
                "model", name, allowed=f"{scheme}: where {library} is installed", fix=f"pip install -e '.[{scheme}]'"
            )
        return
    if colon and rest and all(part.isidentifier() for part in [*scheme.split("."), *rest.split(".")]):
        if not _is_importable(scheme):
            raise Refused(
                "model", name, allowed="a module that can be imported", fix=f"add the folder of {scheme} to PYTHONPATH"
            )
        return
    raise Refused(
        "model",
        name,
        allowed='a registered name, "package.module:factory", "timm:NAME" or "hf:NAME"',
        fix=nearest(name, [*VITS, *OTHERS]),
    )


def _is_importable(module: str) -> bool:
    """Whether a module lies on the path, the folder that Python was started in included. Runs none of its code."""
    if module in sys.modules:
        return True
    path: list[str] | None = ["", *sys.path]
    for depth, part in enumerate(module.split(".")):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return depth == 0 and part in sys.builtin_module_names
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    return True
