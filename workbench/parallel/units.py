"""What a model's parts are to a parallel plan: the units that FSDP shards, and how tensor parallelism splits each layer.

Names are patterns over a module's path, matched part by part: ``blocks.*.mlp.fc1``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from workbench.errors import Refused


@dataclass(frozen=True)
class Units:
    """One model's table. Only ``blocks`` is needed where no plan splits tensors."""

    blocks: str
    """The repeated blocks: each is an FSDP unit, recomputed and compiled on its own; the root takes the rest."""
    fused: Mapping[str, int] = field(default_factory=dict)
    """Linear layers that hold several side by side (q, k and v): each part is split by heads on its own."""
    colwise: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    """Modules on (batch, heads, …) with weights that all heads share: their gradients are summed over the heads' ranks."""
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes that count heads, or features of all heads: divided by the tensor degree."""

    def under(self, prefix: str) -> "Units":
        """The same table for a model that lies inside another one, at ``prefix``."""
        if not prefix:
            return self

        def at(name: str) -> str:
            return f"{prefix}.{name}"

        return replace(
            self,
            blocks=at(self.blocks),
            fused={at(name): parts for name, parts in self.fused.items()},
            colwise=tuple(map(at, self.colwise)),
            rowwise=tuple(map(at, self.rowwise)),
            per_head=tuple(map(at, self.per_head)),
            heads={at(name): attributes for name, attributes in self.heads.items()},
        )


TABLE = {
    "workbench.models.vit.VisionTransformer": Units(
        blocks="blocks.*",
        fused={"blocks.*.attn.qkv": 3},
        colwise=("blocks.*.mlp.fc1",),
        rowwise=("blocks.*.attn.proj", "blocks.*.mlp.fc2"),
        per_head=("blocks.*.attn.q_norm", "blocks.*.attn.k_norm"),
        heads={"blocks.*.attn": ("heads",)},
    ),
    "transformers.models.vit.modeling_vit.ViTForImageClassification": Units(
        blocks="vit.layers.*",
        colwise=tuple(f"vit.layers.*.{layer}" for layer in ("attention.[qkv]_proj", "mlp.fc1")),
        rowwise=tuple(f"vit.layers.*.{layer}" for layer in ("attention.o_proj", "mlp.fc2")),
    ),
    "timm.models.vision_transformer.VisionTransformer": Units(blocks="blocks.*"),
}


def units_of(model: nn.Module) -> Units:
    """The table of a known model, also where a wrapper holds it.

    Raises:
        Refused: a model that has none.
    """
    for prefix, module in model.named_modules():
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        if name in TABLE:
            return TABLE[name].under(prefix)
    raise Refused(
        "model to parallelize",
        type(model).__qualname__,
        allowed="one with a table of units: " + ", ".join(name.rpartition(".")[2] for name in TABLE),
        fix="pass units=Units(blocks='path.of.the.blocks.*')",
    )


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of everything that the pattern names, in the model's order."""
    wanted = pattern.split(".")
    for name, module in list(model.named_modules()):
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name, module


def blocks_of(model: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    """Raises:
    Refused: the table's pattern names nothing in this model.
    """
    found = list(matching(model, units.blocks))
    if not found:
        raise Refused("pattern of the blocks", units.blocks, allowed="a path in the model", fix="see named_modules()")
    return found


class SplitLinear(nn.Module):
    """A linear layer of several parts as so many layers, so that each can be split by heads; the output is the same.

    A contiguous share of the fused rows would give one rank all of q and half of k.
    """

    def __init__(self, fused: nn.Linear, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for index in range(parts):
            rows = fused.out_features // parts
            part = nn.Linear(fused.in_features, rows, fused.bias is not None, device="meta")
            mine = slice(index * rows, (index + 1) * rows)
            for name, whole in fused.named_parameters():
                value = whole.detach()[mine].clone()
                part.register_parameter(name, nn.Parameter(value, requires_grad=whole.requires_grad))
            self.parts.append(part)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
