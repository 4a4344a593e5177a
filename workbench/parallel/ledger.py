"""Every allocation and release of a run on one device, and what the bytes at its peak were for.

Works on fake tensors, of which nothing is allocated, as on real ones. An operator's own scratch memory stays unseen, since only
its results pass through the dispatcher.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.parallel.caching import CachingAllocator

Kind = Literal["parameters", "gradients", "optimizer", "activations", "gathered", "host", "workspace"]
PLAIN = {Tensor, nn.Parameter, FakeTensor}


class Event(NamedTuple):
    """Bytes that storage ``number`` took, or with a negative size gave back."""

    number: int
    size: int
    stream: int


class Peak(NamedTuple):
    """The moment when most bytes were allocated.

    Attributes:
        allocated: by the caching allocator's count, with its rounding.
        reserved: the most that the allocator ever held, with what lay free in its segments.
        breakdown: bytes asked for by kind; ``rounding`` is what the allocator adds.
        phase: what the run was doing.
        host: the most bytes of kind ``host`` at one time, which are not on the device.
    """

    allocated: int
    reserved: int
    breakdown: dict[str, int]
    phase: str
    host: int


class Ledger(TorchDispatchMode):
    """A mode that writes down the storages of ``device_type`` as operators make them and as they are freed or resized.

    Attributes:
        kind: what new storages are for, unless ``assign`` says otherwise, now or later.
        phase: the part of the run; may be set at any time.
        stream: the stream that new storages belong to.
        closed: while true, nothing new is written down.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.kind: Kind = "activations"
        self.phase, self.stream, self.closed = "", 0, False
        self._events: list[Event] = []
        self._phases: list[tuple[int, str]] = []
        self._kinds: list[Kind] = []
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._watchers: dict[int, weakref.finalize] = {}

    def __enter__(self) -> "Ledger":
        self._resize = torch.UntypedStorage.resize_
        ledger = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = ledger._resize(storage, size)
            ledger._resized(storage, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented  # a DTensor, say: what it does to its parts comes by here again
        result = func(*args, **(kwargs or {}))
        if not self.closed:
            self.note(result)
        return result

    def note(self, tensors: Any) -> None:
        """Write down the storages of tensors that are not yet known, at the size they have."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device_type:
                self._number(tensor.untyped_storage())

    def assign(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what storages are for; the last word counts, for the whole of their lives."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = getattr(tensor, "_local_tensor", tensor)
            if local.device.type == self.device_type:
                self._kinds[self._number(local.untyped_storage())] = kind

    @contextmanager
    def during(self, *, kind: Kind | None = None, phase: str | None = None) -> Iterator[None]:
        """Within, what is new is of this kind, and the run is in this phase."""
        before = self.kind, self.phase
        self.kind, self.phase = kind or self.kind, before[1] if phase is None else phase
        self._phases.append((len(self._events), self.phase))
        try:
            yield
        finally:
            self.kind, self.phase = before
            self._phases.append((len(self._events), self.phase))

    @property
    def live(self) -> int:
        """Bytes asked for and not given back."""
        return sum(self._sizes.values())

    def peak(self, workspace: int = 0, *, since: str = "") -> Peak:
        """Replay the run through the caching allocator.

        Args:
            workspace: bytes that libraries hold besides, all the time.
            since: begin where this phase first does, with what is alive then: how a model is built before it lies as it is
                trained is another question.
        """
        allocator = CachingAllocator()
        allocator.allocate(workspace)
        first = next((at for at, phase in self._phases if phase == since), 0)
        blocks: dict[int, Any] = {}
        best, when, host, most_on_host = -1, -1, 0, 0
        alive = self._alive_at(first)
        for at, event in enumerate([*alive, *self._events[first:]], first - len(alive)):
            if self._kinds[event.number] == "host":
                host += event.size
                most_on_host = max(most_on_host, host)
            elif event.size < 0:
                allocator.release(blocks.pop(event.number))
            else:
                blocks[event.number] = allocator.allocate(event.size, event.stream)
                if allocator.allocated > best:
                    best, when = allocator.allocated, at
        breakdown = self._breakdown(when) | {"workspace": workspace}
        breakdown["rounding"] = best - sum(breakdown.values())
        phase = next((p for at, p in reversed(self._phases) if at <= when), "")
        return Peak(best, allocator.reserved, breakdown, phase, most_on_host)

    def _alive_at(self, moment: int) -> list[Event]:
        """As if all that is alive after so many events had been made then, in the order in which it was."""
        alive: dict[int, Event] = {}
        for event in self._events[:moment]:
            if event.size < 0:
                del alive[event.number]
            else:
                alive[event.number] = event
        return list(alive.values())

    def _breakdown(self, when: int) -> dict[str, int]:
        total = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "gathered"), 0)
        for event in self._events[: when + 1]:
            if (kind := self._kinds[event.number]) != "host":
                total[kind] += event.size
        return total

    def _number(self, storage: torch.UntypedStorage) -> int:
        # A storage's Python object lives as long as the storage itself, so that its end can be watched.
        key = storage._cdata
        if key not in self._numbers:
            number = self._numbers[key] = len(self._kinds)
            self._kinds.append(self.kind)
            self._watchers[number] = weakref.finalize(storage, self._freed, key)
            self._change(number, storage.nbytes())
        return self._numbers[key]

    def _freed(self, key: int) -> None:
        number = self._numbers.pop(key)
        self._change(number, 0)
        del self._watchers[number]

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self._numbers:
            self._change(self._numbers[storage._cdata], size)

    def _change(self, number: int, size: int) -> None:
        """From now on storage ``number`` has ``size`` bytes."""
        before = self._sizes.pop(number, 0)
        if before:
            self._events.append(Event(number, -before, 0))
        if size:
            self._sizes[number] = size
            self._events.append(Event(number, size, self.stream))
