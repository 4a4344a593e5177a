"""Which module is computing right now: the qualified names of the module calls in progress, kept by hooks."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

OUTSIDE = "(outside the model)"


class ModuleStack:
    """A context in which ``current`` names the innermost watched module whose forward is running.

    The hooks go with the context, also when an exception leaves it. A module reachable by several names goes by its first.

    Args:
        model: the root; its own name is ``""``.
        watched: the modules to keep track of, by name; all of them when ``None``.
        on_leave: called with a module's name and output when its forward ends without an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Iterable[str] | None = None,
        on_leave: Callable[[str, Any], None] | None = None,
        on_enter: Callable[[str], None] | None = None,
    ) -> None:
        names = None if watched is None else set(watched)
        self._modules = [(n, m) for n, m in model.named_modules() if names is None or n in names]
        self._on_enter, self._on_leave = on_enter, on_leave
        self._handles: list[RemovableHandle] = []
        self._stack: list[str] = []

    @property
    def current(self) -> str:
        return self._stack[-1] if self._stack else OUTSIDE

    def __enter__(self) -> "ModuleStack":
        for name, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            # always_call: a forward that raises leaves the stack too.
            self._handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._stack = [], []

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append(name)
            if self._on_enter:
                self._on_enter(name)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
            # After an exception the output is None, and there is nothing to judge.
            if self._on_leave:
                self._on_leave(name, output)

        return hook
