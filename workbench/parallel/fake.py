"""A world that is not there: groups that exchange nothing, so that one process goes through the step of one rank among many."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from workbench.parallel.ledger import Ledger


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of ``size``. Every collective returns at once and leaves its output as it was."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def kinds_of_buffers(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger what the buffers of DDP and FSDP are for."""

    def gathered(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with ledger.during(kind="gathered"):
                return method(*args, **kwargs)

        return inner

    def reduced(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        ledger.assign((_unsharded_gradient(p) for p in self.fsdp_params), "gradients")
        with ledger.during(kind="gathered"):
            return post_backward(self, *args, **kwargs)

    def shapes_only(self: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
        before, ledger.closed = ledger.closed, True
        try:
            return propagate(self, *args, **kwargs)
        finally:
            ledger.closed = before

    post_backward = FSDPParamGroup.post_backward
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    with ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard"):
            stack.enter_context(patch.object(FSDPParamGroup, name, gathered(getattr(FSDPParamGroup, name))))
        stack.enter_context(patch.object(FSDPParamGroup, "post_backward", reduced))
        stack.enter_context(
            patch.object(DistributedDataParallel, "__init__", gathered(DistributedDataParallel.__init__))
        )
        # To know the shape of a result, DTensor makes one of whole tensors, fake ones also in a real run.
        stack.enter_context(patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shapes_only))
        yield


@contextmanager
def wrappers_on_fake_tensors() -> Iterator[None]:
    """Let DDP and FSDP work on fake tensors, whose data they must not look at.

    To PyTorch the fake device is the CPU, so that nothing of CUDA is needed; where a GPU would need memory that the CPU does
    not, it is taken here.
    """

    def inputs(self: FSDPParam) -> Any:
        kept = self._sharded_param_data
        if self.offload_to_cpu:
            self._sharded_param_data = kept.clone()  # what goes to the device
        try:
            return all_gather_inputs.fget(self)
        finally:
            self._sharded_param_data = kept

    all_gather_inputs: Any = FSDPParam.all_gather_inputs
    with ExitStack() as stack:
        stack.enter_context(patch.object(FSDPParam, "all_gather_inputs", property(inputs)))
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(ddp, name, lambda *args, **kwargs: None))
        # Adam reads its step counters, which have no value; any but 0 will do.
        stack.enter_context(patch("torch.optim.adam._get_value", lambda step: 1.0))
        # A mesh is made of real tensors, whose values it reads.
        stack.enter_context(patch.object(DeviceMesh, "__getitem__", _without_modes(DeviceMesh.__getitem__)))
        concatenate = staticmethod(_without_modes(DeviceMesh._concatenate))
        stack.enter_context(patch.object(DeviceMesh, "_concatenate", concatenate))
        stack.enter_context(CudaAutocast())
        yield


def _without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return inner


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Leave new parameters as they come: their values do not matter, and some initialisers look at what they drew."""
    with ExitStack() as stack:
        for name in [n for n in vars(nn.init) if n.endswith("_") and not n.startswith("_")]:
            stack.enter_context(patch.object(nn.init, name, lambda tensor, *args, **kwargs: tensor))
        yield


IN_FULL = {
    torch.softmax,
    F.softmax,
    Tensor.softmax,
    F.log_softmax,
    torch.log_softmax,
    F.layer_norm,
    torch.layer_norm,
    F.group_norm,
}
"""What autocast runs in fp32 on CUDA but not on a CPU, of what image models use (torch.amp's documentation)."""


class CudaAutocast(TorchFunctionMode):
    """Within an autocast region of the CPU, run in fp32 also what CUDA's would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in IN_FULL and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _in_full, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _in_full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _unsharded_gradient(parameter: FSDPParam) -> Any:
    whole = getattr(parameter, "_unsharded_param", None)
    return getattr(parameter, "unsharded_accumulated_grad", None) if whole is None or whole.grad is None else whole.grad


def settle(model: nn.Module) -> nn.Module:
    """Let a DDP model take steps in a fake world: nothing is reduced, and the buckets stay as they are.

    DDP sorts its buckets anew after the first step, for which it compares notes with ranks that are not there; they hold as much
    in either order.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _as_it_is)
        model.reducer = _KeepsBuckets(model.reducer)  # type: ignore[assignment]
    return model


def _as_it_is(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


class _KeepsBuckets:
    """A reducer of DDP without that one method."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
