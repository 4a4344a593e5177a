"""Counts what crosses between ranks: every collective's operation, elements, bytes and mesh axis."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATIONS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}


class Collective(NamedTuple):
    """One call on this rank. ``elements`` are those of the whole tensor: an all-gather's output, a reduce-scatter's input."""

    operation: str
    elements: int
    itemsize: int
    ranks: tuple[int, ...]
    axis: str | None
    """The mesh axis whose group this is; None for a group that is no axis of the mesh."""

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def ring_bytes(self) -> float:
        """What each rank sends in a ring: 2(n−1)/n of an all-reduce's bytes, (n−1)/n of the others' (Thakur et al. 2005)."""
        n = len(self.ranks)
        return self.bytes * (2 if self.operation == "all-reduce" else 1) * (n - 1) / n


class CollectiveSpy(TorchDispatchMode):
    """Records the collectives that run inside it, in forward and backward, those of DDP's reducer included.

    torch.compile refuses to trace under any dispatch mode, this one too: count the plan without ``compile``.

    Args:
        mesh: names the axes of the groups. An axis of one rank has no traffic and is left out.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self._axes: dict[tuple[int, ...], str] = {}
        for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
            assert mesh is not None
            self._axes[tuple(dist.get_process_group_ranks(mesh.get_group(axis)))] = axis

    def elements(self, operation: str | None = None, axis: str | None = None) -> int:
        return sum(call.elements for call in self.select(operation, axis))

    def bytes(self, operation: str | None = None, axis: str | None = None) -> int:
        return sum(call.bytes for call in self.select(operation, axis))

    def ring_bytes(self, operation: str | None = None, axis: str | None = None) -> float:
        return sum(call.ring_bytes for call in self.select(operation, axis))

    def select(self, operation: str | None = None, axis: str | None = None) -> list[Collective]:
        """The calls of one operation, on one axis, or all where None."""
        return [c for c in self.calls if operation in (None, c.operation) and axis in (None, c.axis)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes itself apart into the calls to count
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name in OPERATIONS:
                self._record(OPERATIONS[name], name, args, out)
        return out

    def _record(self, operation: str, name: str, args: Any, out: Any) -> None:
        group = _group(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return
        if operation == "all-gather":
            tensors = _tensors(out if name == "all_gather_into_tensor" else args[0])
        else:
            # In-place reduce-scatters and exchanges take their output first.
            second = name in ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
            tensors = _tensors(args[1] if second or name in ("alltoall_", "alltoall_base_") else args[0])
        for tensor in tensors:
            self.calls.append(
                Collective(operation, tensor.numel(), tensor.element_size(), ranks, self._axes.get(ranks))
            )


def sharded_elements(parameters: Iterable[Tensor], ranks: int) -> int:
    """Elements that FSDP moves for one gather: dimension 0 of each parameter is padded to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0]) if p.numel() else 0 for p in parameters)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _group(args: Any) -> dist.ProcessGroup:
    """The group among a collective's arguments: in c10d the first object (a reduction may follow), else the last name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    names: list[Any] = [arg for arg in args if isinstance(arg, str)]
    return _resolve_process_group(names[-1])
