"""The dtype each module computes in, by rule, and the proof of it from the operators themselves.

``module.to(torch.float32)`` does not do this: autocast casts per operator, so the operators of a module moved to fp32 still
run in half precision when an autocast region is around them. What does it is a region of the module's own.
"""

import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from workbench.diagnose.module_stack import ModuleStack
from workbench.errors import Refused, nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = "default"
NORM = re.compile(r"(Layer|RMS|Group|Batch|Instance)Norm(\d?d|Act2d)?")
"""Class names that the word ``norm`` in a rule stands for."""
PRODUCTS = re.compile(r"(mm|mv|dot|linear|convolution)(_|$)|attention")
"""Operators that autocast runs in half precision: matrix products, convolutions, fused attention."""


@dataclass
class ModulePrecision:
    """What ``apply_precision`` did: the dtype name of every module that got a region of its own; ``""`` is the root."""

    dtypes: dict[str, str]
    _modules: list[nn.Module] = field(repr=False, default_factory=list)

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            region = module.__dict__.pop("_precision_region", None)
            if region is not None:
                del module.__dict__["forward"]


@dataclass(frozen=True)
class _Region:
    """One module's autocast region. ``casts_inputs`` is off for the root, whose rule is only the default of its parts."""

    dtype: torch.dtype
    device_type: str
    casts_inputs: bool

    def enter(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return torch.autocast(self.device_type, enabled=False)
        # The cache of cast weights is keyed by weight alone: a weight used in two dtypes within one outer region would come
        # out in the wrong one. The root's region is the outermost, and keeps the cache.
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=not self.casts_inputs)


def apply_precision(model: nn.Module, rules: Mapping[str, str], device_type: str) -> ModulePrecision:
    """Make modules compute in the dtype that ``rules`` give them, whatever autocast region surrounds them.

    A rule's key is a pattern (``fnmatch``; ``*`` crosses dots) for a module's qualified name (``blocks.*.attn``) or its class
    name (``LayerNorm``); ``norm`` also stands for every normalisation layer, and ``default`` for the model as a whole. Its
    value is ``fp32``, ``bf16`` or ``fp16``. Of several rules that match one module the last wins. A module without a rule
    follows the nearest module around it that has one; a rule of a nested module holds inside that module only.

    In an fp32 region autocast is off and every operator runs in fp32 (on a GPU, in TF32 where that is switched on). In a
    half-precision region autocast is on: products run in half, and what autocast holds unsafe does not. Floating inputs are
    cast in, nested in tuples, lists and dicts too. Floating outputs are cast to the dtype of the surrounding autocast region
    or, outside any, to that of the first floating input. Weights stay as they are: fp32, for autocast to cast.

    Names in ``state_dict`` do not change. Works under ``torch.compile``, recomputation, DDP and FSDP2 (shard with fp32
    parameters, or give a module of an fp32 rule its own ``fully_shard`` with ``param_dtype=torch.float32``).

    Raises:
        Refused: a pattern that matches no module, an unknown dtype, half-precision weights under an fp32 rule, or a model
            that has rules already.
    """
    chosen = match_rules(model, rules)
    modules = dict(model.named_modules(remove_duplicate=False))
    taken = [name for name, module in modules.items() if "_precision_region" in module.__dict__]
    if taken:
        raise Refused(
            f"precision rules for a model that has some already (on {taken[0]!r})", fix="remove() those first"
        )
    for name, dtype in chosen.items():
        if "forward" in modules[name].__dict__:
            raise Refused(f"a precision rule for {name!r}, whose forward was replaced", fix="apply the rules first")
        half = [
            f"{name}.{n}" for n, p in modules[name].named_parameters() if p.dtype in (torch.float16, torch.bfloat16)
        ]
        if dtype == "fp32" and half:
            raise Refused(
                f"an fp32 rule for {name!r}, whose weights are not fp32 ({half[0].lstrip('.')})",
                fix="keep the weights in fp32; autocast casts them where they are used",
            )
    for name, dtype in chosen.items():
        module = modules[name]
        by_default = name == "" and not _matches_any("", module, rules)
        module.__dict__["_precision_region"] = _Region(DTYPES[dtype], device_type, casts_inputs=not by_default)
        # A bound method of a module-level function: copy.deepcopy then binds the copy's forward to the copy.
        module.__dict__["forward"] = types.MethodType(_forward_in_region, module)
    return ModulePrecision(chosen, [modules[name] for name in chosen])


def match_rules(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """The modules that ``rules`` give a dtype of their own, by name.

    Left out are those whose nearest ruled ancestor has the same dtype, since its region holds for them already.

    Raises:
        Refused: a pattern that matches no module, or an unknown dtype.
    """
    for pattern, dtype in rules.items():
        if dtype not in DTYPES:
            raise Refused(f"precision of {pattern!r}", dtype, allowed=", ".join(DTYPES))
    modules: dict[str, nn.Module] = dict(model.named_modules())
    ruled: dict[str, str] = {"": rules[DEFAULT]} if DEFAULT in rules else {}
    for pattern, dtype in rules.items():
        matched = [name for name, module in modules.items() if _matches(pattern, name, module)]
        if not matched and pattern != DEFAULT:
            kinds = {type(module).__name__ for module in modules.values()}
            raise Refused(
                f"precision rule {pattern!r}, which matches no module",
                allowed="a pattern of module names or class names, 'norm' or 'default'",
                fix=nearest(pattern, (kinds | set(modules)) - {""}),
            )
        ruled.update(dict.fromkeys(matched, dtype))
    several = _shared(model)
    return {name: dtype for name, dtype in ruled.items() if name in several or _inherited(name, ruled) != dtype}


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    if pattern == "norm" and NORM.fullmatch(kind):
        return True
    # The root has no name: "*" means its parts, and only its class name reaches it.
    return bool(name and fnmatchcase(name, pattern)) or ((bool(name) or pattern == kind) and fnmatchcase(kind, pattern))


def _matches_any(name: str, module: nn.Module, rules: Mapping[str, str]) -> bool:
    return any(_matches(pattern, name, module) for pattern in rules if pattern != DEFAULT)


def _inherited(name: str, ruled: Mapping[str, str]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in ruled:
            return ruled[name]
    return None


def _shared(model: nn.Module) -> set[str]:
    """First names of modules that hang in the tree in several places, and so have several ancestries."""
    first: dict[nn.Module, str] = {}
    several = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if first.setdefault(module, name) != name:
            several.add(first[module])
    return several


def _forward_in_region(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region: _Region = self._precision_region  # type: ignore[assignment]
    around = _dtype_around(region.device_type, (args, kwargs))
    if region.casts_inputs:
        args, kwargs = _cast((args, kwargs), region.dtype)
    with region.enter():
        output = type(self).forward(self, *args, **kwargs)
    return output if around is None else _cast(output, around)


def _dtype_around(device_type: str, inputs: Any) -> torch.dtype | None:
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return next((x.dtype for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()), None)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values)


@dataclass(frozen=True)
class DtypeRow:
    """Dtypes that the operators of one module's forward computed in.

    ``operators`` maps an operator's name to how often it ran per dtype of its floating inputs (several at once are joined:
    ``float32+float16``). Casts and views compute nothing and are counted apart or not at all.
    """

    module: str
    wanted: str
    operators: dict[str, dict[str, int]]
    casts: int

    @property
    def holds(self) -> bool:
        """fp32: every operator took fp32. Half: every matrix product, convolution and attention took that dtype, the rest
        being autocast's to choose. A module in which no operator ran proves nothing and does not hold."""
        wanted = str(DTYPES[self.wanted]).removeprefix("torch.")
        judged = [d for op, d in self.operators.items() if self.wanted == "fp32" or PRODUCTS.search(op)]
        return bool(self.operators) and all(dtype == wanted for dtypes in judged for dtype in dtypes)

    @property
    def dtypes(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for counts in self.operators.values():
            total.update(counts)
        return dict(total)


def dtype_report(
    model: nn.Module, batch: Any, rules: Mapping[str, str], forward: Callable[[nn.Module, Any], Any] | None = None
) -> list[DtypeRow]:
    """The dtypes inside every module that ``rules`` match, from one forward of ``model`` as it is, without gradients.

    Nothing is applied here: a model to which other means were applied is judged by the same rules. The caller's autocast
    region counts. An operator belongs to the innermost matched module around it. ``forward`` defaults to ``model(batch)``.

    Raises:
        Refused: as ``match_rules``; or a compiled model, whose operators cannot be seen.
    """
    chosen = match_rules(model, rules)
    if hasattr(model, "_orig_mod"):
        raise Refused("dtype report of a compiled model", fix="report on the model before torch.compile")
    watch = _DtypeWatch(stack := ModuleStack(model, chosen))
    with torch.no_grad(), stack, watch:
        forward(model, batch) if forward else model(batch)
    return [
        DtypeRow(name, dtype, {op: dict(c) for op, c in watch.operators.get(name, {}).items()}, watch.casts[name])
        for name, dtype in chosen.items()
    ]


class _DtypeWatch(TorchDispatchMode):
    """Counts operators by module, name and dtype of floating inputs, below autocast: what the kernels really get."""

    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()
        self.stack = stack
        self.operators: dict[str, dict[str, Counter[str]]] = {}
        self.casts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        dtypes = sorted(set(_floating_dtypes((args, kwargs))), reverse=True)
        if name in ("_to_copy", "copy_", "clone"):
            self.casts[self.stack.current] += name == "_to_copy"
        elif dtypes and not func.is_view:
            counts = self.operators.setdefault(self.stack.current, {}).setdefault(name, Counter())
            counts["+".join(dtypes)] += 1
        return func(*args, **(kwargs or {}))


def _floating_dtypes(values: Any) -> Iterator[str]:
    for x in tree_leaves(values):
        # A number held in a tensor (a scale, an epsilon) takes the dtype of what it multiplies.
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim:
            yield str(x.dtype).removeprefix("torch.")
