"""The first NaN or infinity of a step: which operator made it, in which module, forward or backward.

Every floating tensor that goes into or comes out of an operator is reduced to its extremes, on the device; the step's end
reads them all at once. So a watched step costs one host synchronisation, and several small kernels per operator: watch the
steps in question, not all of a long run.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from workbench.diagnose.module_stack import OUTSIDE, ModuleStack
from workbench.errors import Refused

Policy = Literal["raise", "skip", "stop"]
Action = Literal["go on", "skip", "stop"]
NAN, PLUS, MINUS = 1, 2, 4
KINDS = {NAN: "NaN", PLUS: "+inf", MINUS: "-inf", PLUS | MINUS: "±inf"}
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operators whose result is memory that nothing was written to yet."""
CONSTANTS = {
    "full",
    "full_like",
    "new_full",
    "fill",
    "fill_",
    "scalar_tensor",
    "masked_fill",
    "masked_fill_",
    "lift_fresh",
}
"""Operators that write a number the program gave, such as a mask's minus infinity."""


@dataclass(frozen=True)
class NonFinite:
    """Where a step first went wrong.

    Attributes:
        module: qualified name of the innermost module around the operator; in backward, the one whose forward made the node.
        operator: the operator's name, such as ``exp`` or ``mm``.
        direction: ``recomputation`` is a forward that runs again inside the backward.
        kind: ``NaN``, ``+inf``, ``-inf`` or ``±inf``.
        role: ``producer``: finite values went in (or only infinities, and NaN came out); ``propagator``: the values came from
            ``source``, which held them before any operator ran.
        source: the parameter, buffer or model input that held the value; empty for a producer.
    """

    step: int
    rank: int
    direction: Literal["forward", "backward", "recomputation"]
    module: str
    operator: str
    kind: str
    role: Literal["producer", "propagator"]
    source: str = ""

    def __str__(self) -> str:
        origin = f", passed on from {self.source}" if self.source else ""
        return (
            f"first {self.kind} at step {self.step} on rank {self.rank}: {self.operator} in "
            f"{self.module or 'the root module'} ({self.direction}, {self.role}{origin})"
        )


class NonFiniteFound(RuntimeError):
    """A watched step made a NaN or an infinity that reached its result."""

    def __init__(self, found: NonFinite) -> None:
        super().__init__(str(found))
        self.found = found


class FirstNonFinite:
    """Watches steps of ``model`` for their first non-finite value.

    ::

        finder = FirstNonFinite(model, policy="skip")
        with finder.watch(step):
            loss = loss_function(model(images), labels)
            loss.backward()
        if finder.action == "go on":
            optimizer.step()

    Infinities that a module absorbs, its outputs being finite, are not reported: a mask before a softmax is healthy. With a
    process group all ranks take the same action, for which every rank must watch the step; ``found`` is then the first of
    the lowest rank that found one.

    Args:
        policy: ``raise`` raises ``NonFiniteFound`` at the end of the watched step; ``skip`` and ``stop`` set ``action``.
        rank: defaults to the process group's, or 0.

    Attributes:
        found: the last watched step's first non-finite value, ``None`` if there was none.
        action: what the loop should do after the last watched step.
    """

    def __init__(self, model: nn.Module, *, policy: Policy = "raise", rank: int | None = None) -> None:
        if policy not in ("raise", "skip", "stop"):
            raise Refused("policy", policy, allowed="raise, skip or stop")
        if hasattr(model, "_orig_mod"):
            raise Refused("the operators of a compiled model", fix="watch the model before torch.compile")
        self.model, self.policy = model, policy
        self.rank = rank if rank is not None else _rank()
        self.found: NonFinite | None = None
        self.action: Action = "go on"

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Watch the forwards and backwards of one step; the gradients must still be there at its end."""
        self.found, self.action = None, "go on"
        recorder = _Recorder(self.model)
        with recorder:
            yield
        # Not reached when an exception flies: the hooks are gone then, and the exception is the news.
        found = recorder.first()
        mine = replace(found, step=step, rank=self.rank) if found else None
        self.found = _agree(mine)
        if self.found:
            if self.policy == "raise":
                raise NonFiniteFound(self.found)
            self.action = self.policy


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _agree(mine: NonFinite | None) -> NonFinite | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    everyone: list[NonFinite | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return next((found for found in everyone if found), None)


@dataclass
class _Operation:
    name: str
    module: str
    direction: Literal["forward", "backward", "recomputation"]
    inputs: slice
    outputs: slice


@dataclass
class _Call:
    """One module's forward: the operations from ``first`` to ``last`` (not included) are its own or its children's."""

    first: int
    last: int
    outputs: slice


class _Recorder(TorchDispatchMode):
    """Records one step: per operator and per module call, where the extremes of its tensors are kept."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stack = ModuleStack(model, on_enter=self._entered, on_leave=self._left)
        self.extremes: list[Tensor] = []
        self.operations: list[_Operation] = []
        self.calls: list[_Call] = []
        self._open: list[int] = []
        self._nodes: list[tuple[int, str]] = []
        self._given: dict[str, slice] = {}
        self._root_handle: Any = None

    def __enter__(self) -> "_Recorder":
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            self._given[name] = self._note([tensor])
        self._root_handle = self.model.register_forward_pre_hook(self._inputs_given, with_kwargs=True)
        self.stack.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.__exit__(*error)
        self._root_handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        if node is None:
            # The node that autograd made for this operator has the number before the next one's.
            self._nodes.append((torch.autograd._get_sequence_nr() - 1, self.stack.current))
        name = func.overloadpacket.__name__
        if func.is_view or name in UNWRITTEN:
            return func(*args, **kwargs)
        # Before the call: an operator may overwrite its input.
        before = self._note(tree_leaves((args, kwargs)))
        output = func(*args, **kwargs)
        if node is None:
            where, direction = self.stack.current, "forward"
        elif self._open:
            where, direction = self.stack.current, "recomputation"
        else:
            where, direction = self._module_of(node), "backward"
        after = self._note(tree_leaves(output))
        self.operations.append(_Operation(name, where, direction, before, after))  # type: ignore[arg-type]
        return output

    def first(self) -> NonFinite | None:
        """The first non-finite value that reached something: a module's output or a gradient. Synchronises once."""
        gradients = self._note([p.grad for p in self.model.parameters() if p.grad is not None])
        flags = _flags(self.extremes)
        state = [(_union(flags, o.inputs), _union(flags, o.outputs)) for o in self.operations]
        absorbed = self._absorbed(flags)
        spoilt = bool(_union(flags, gradients)) or gradients.start == gradients.stop
        source = self._source(flags)
        for direction in ("forward", "backward"):
            candidates = [
                k
                for k, o in enumerate(self.operations)
                if (o.direction == "backward") == (direction == "backward")
                and state[k][1]
                and not absorbed[k]
                and (spoilt or (o.module != OUTSIDE and o.direction == "forward"))
            ]
            for k in candidates:
                if self._produces(self.operations[k].name, *state[k]):
                    return self._report(k, state, "producer")
                if source and self.operations[k].name not in CONSTANTS:
                    return self._report(k, state, "propagator", source)
        return None

    @staticmethod
    def _produces(name: str, before: int, after: int) -> bool:
        if name in CONSTANTS:
            return False
        return not before or (bool(after & NAN) and not before & NAN)

    def _report(
        self, k: int, state: list[tuple[int, int]], role: Literal["producer", "propagator"], source: str = ""
    ) -> NonFinite:
        o, flags = self.operations[k], state[k][1]
        kind = "NaN" if flags & NAN else KINDS[flags]
        return NonFinite(-1, 0, o.direction, o.module, o.name, kind, role, source)

    def _absorbed(self, flags: list[int]) -> list[bool]:
        """Whether some module call around an operation gave only finite outputs."""
        absorbed = [False] * len(self.operations)
        for call in self.calls:
            if call.outputs.start < call.outputs.stop and not _union(flags, call.outputs):
                absorbed[call.first : call.last] = [True] * (call.last - call.first)
        return absorbed

    def _source(self, flags: list[int]) -> str:
        """What held a value before any operator ran. Minus infinity alone is a mask, unless a parameter holds it."""
        bad = {name: _union(flags, where) for name, where in self._given.items()}
        parameters = {name for name, _ in self.model.named_parameters()}
        return next((name for name, flag in bad.items() if flag & ~MINUS or (flag and name in parameters)), "")

    def _note(self, values: Iterable[Any]) -> slice:
        """Keep the extremes of the floating tensors among ``values``; where they are kept."""
        start = len(self.extremes)
        for x in values:
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and not is_traceable_wrapper_subclass(x):
                self.extremes.append(torch.stack(torch.aminmax(x.detach())).float())
        return slice(start, len(self.extremes))

    def _inputs_given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        with torch._C._DisableTorchDispatch():
            self._given.setdefault("the model's input", self._note(tree_leaves((args, kwargs))))

    def _entered(self, name: str) -> None:
        self._open.append(len(self.operations))

    def _left(self, name: str, output: Any) -> None:
        if not self._open:
            return
        with torch._C._DisableTorchDispatch():
            outputs = self._note(tree_leaves(output))
        self.calls.append(_Call(self._open.pop(), len(self.operations), outputs))

    def _module_of(self, node: Any) -> str:
        """The module whose forward made an autograd node; for a parameter's accumulation, that parameter's."""
        variable = getattr(node, "variable", None)
        if variable is not None:
            names = (n for n, p in self.model.named_parameters() if p is variable)
            return next(names, OUTSIDE).rpartition(".")[0]
        number = node._sequence_nr()
        place = bisect_left(self._nodes, (number, ""))
        return self._nodes[place][1] if place < len(self._nodes) else OUTSIDE


def _flags(extremes: list[Tensor]) -> list[int]:
    if not extremes:
        return []
    device = extremes[0].device
    low, high = torch.stack([e.to(device) for e in extremes]).unbind(1)
    nan, plus, minus = low.isnan() | high.isnan(), high == torch.inf, low == -torch.inf
    return (nan * NAN + plus * PLUS + minus * MINUS).tolist()


def _union(flags: list[int], where: slice) -> int:
    union = 0
    for flag in flags[where]:
        union |= flag
    return union
