"""The largest attention logit per layer: the quantity whose growth made ViT-22B diverge (Dehghani et al. 2023).

Logits past a few hundred make softmax one-hot, its gradient vanish and half precision overflow. QK-norm bounds them.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.diagnose.module_stack import ModuleStack
from workbench.errors import Refused

BLOCK = 512
"""Queries whose logits exist at once."""


def max_logit(q_BhNd: Tensor, k_BhNd: Tensor, scale: float | None = None) -> Tensor:
    """max |q·k|·scale over all pairs, as an fp32 scalar on the device; ``scale`` defaults to head_dim ** -0.5.

    Computed in fp32 by blocks of queries: memory of batch·heads·512·tokens. Fewer key heads than query heads are repeated.
    """
    scale = q_BhNd.shape[-1] ** -0.5 if scale is None else scale
    q_BhNd, k_BhNd = q_BhNd.detach().float(), k_BhNd.detach().float()
    if q_BhNd.shape[-3] != k_BhNd.shape[-3]:
        k_BhNd = k_BhNd.repeat_interleave(q_BhNd.shape[-3] // k_BhNd.shape[-3], dim=-3)
    largest = [(q @ k_BhNd.mT).abs().amax() for q in q_BhNd.split(BLOCK, dim=-2)]
    return torch.stack(largest).amax() * scale


@dataclass(frozen=True)
class LogitRow:
    """``module`` is the innermost module around the attention operator; ``max_logit`` the largest over its calls."""

    module: str
    max_logit: float


class AttentionLogits(TorchDispatchMode):
    """A context that meters every attention inside ``model``'s forward, whatever computes it.

    Sees fused attention operators (any whose name holds ``attention``, its first two arguments being queries and keys of
    shape (batch, heads, tokens, head_dim)) and, for attention written out, the input of a softmax over four dimensions'
    last one. Masked pairs count in the first case and not in the second. No host synchronisation until ``rows``.
    Costs as much as the attention's first product; meant for single steps.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if hasattr(model, "_orig_mod"):
            raise Refused("the attention of a compiled model", fix="meter the model before torch.compile")
        self._stack = ModuleStack(model)
        self._largest: dict[str, list[Tensor]] = {}

    def __enter__(self) -> "AttentionLogits":
        self._stack.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if "attention" in name and "backward" not in name and len(args) >= 2 and args[0].ndim == args[1].ndim == 4:
            self._note(max_logit(args[0], args[1], _argument(func, args, kwargs, "scale")))
        elif name == "_softmax" and args[0].ndim == 4 and args[1] in (-1, 3):
            scores = args[0].detach()
            # A mask's minus infinity is no logit.
            self._note(torch.where(torch.isneginf(scores), 0, scores).abs().amax().float())
        return func(*args, **kwargs)

    def rows(self) -> list[LogitRow]:
        """One row per attention, in the order of the first call."""
        if not self._largest:
            return []
        largest = torch.stack([torch.stack(found).amax() for found in self._largest.values()]).tolist()
        return [LogitRow(module, value) for module, value in zip(self._largest, largest, strict=True)]

    def _note(self, value: Tensor) -> None:
        self._largest.setdefault(self._stack.current, []).append(value)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An operator's argument by name, wherever the call put it; ``None`` if it was left to its default."""
    if name in kwargs:
        return kwargs[name]
    places = [k for k, argument in enumerate(func._schema.arguments) if argument.name == name]
    return args[places[0]] if places and places[0] < len(args) else None
