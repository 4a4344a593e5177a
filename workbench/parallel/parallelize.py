"""A plan applied to a model: one flat function, in the order in which the wrappers nest."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from workbench.errors import Refused
from workbench.parallel.plan import ParallelPlan
from workbench.parallel.units import SplitLinear, Units, blocks_of, matching, units_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

aten = torch.ops.aten
SAVED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
"""What selective recomputation keeps: products, attention and sums over ranks. The cheap rest is computed again."""


def parallelize(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, *, units: Units | None = None) -> nn.Module:
    """The model wrapped for this rank: tensor parallelism → recomputation → compilation → FSDP, HSDP or DDP.

    Every rank must hold the same weights. The model is changed in place, and where DDP wraps it, a new module is returned.
    Make the optimizer afterwards, from ``parameter_groups`` of what is returned. FSDP computes in ``plan.param_dtype``; DDP
    leaves that to autocast.

    Args:
        mesh: of ``build_mesh``, with all of its axes.
        units: the model's table; looked up where not given.

    Raises:
        Refused: a model without a table, or one whose ties a plan would cut.
    """
    sharded = plan.shard > 1 or plan.tensor > 1
    if not (sharded or plan.recomputation != "none" or plan.compile):
        return _replicated(model, plan, mesh)
    units = units or units_of(model)

    if plan.tensor > 1:
        _split_tensors(model, mesh["tensor"], units)

    if plan.recomputation != "none":
        for name, block in blocks_of(model, units):
            model.set_submodule(name, _recomputed(block, plan.recomputation))

    if plan.compile:
        for _, block in blocks_of(model, units):
            block.compile(fullgraph=True)

    if not sharded:
        return _replicated(model, plan, mesh)

    options = _fsdp_options(plan, mesh)
    alone = [block for _, block in blocks_of(model, units) if not _tied_outside(block, model)]
    for block in alone:
        fully_shard(block, **options)
    fully_shard(model, **options)
    _prefetch([block for block in alone if isinstance(block, FSDPModule)], plan)
    return model


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters for an optimizer, those of one mesh together: its fused and foreach kernels take no mixture."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _replicated(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> nn.Module:
    if plan.replicate == 1:
        return model
    wrapped = DistributedDataParallel(
        model, process_group=mesh["replicate"].get_group(), gradient_as_bucket_view=True, broadcast_buffers=False
    )
    if "bf16" in (plan.reduce_dtype, plan.compression):
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


# ---- tensor parallelism


def _split_tensors(model: nn.Module, mesh: DeviceMesh, units: Units) -> None:
    """Megatron's pairs (Shoeybi et al. 2019): columns of what enters heads and MLP, rows of what leaves, one sum after each."""
    if not units.colwise or not units.rowwise:
        raise Refused(
            "plan that splits tensors", mesh.size(), allowed="a model whose table says how", fix="pass units=Units(…)"
        )
    styles: dict[str, ParallelStyle] = {}
    for pattern, parts in units.fused.items():
        for name, fused in matching(model, pattern):
            assert isinstance(fused, nn.Linear)
            model.set_submodule(name, SplitLinear(fused, parts))
        # Once for all parts, so that the backward sums over ranks once.
        styles[pattern] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        styles[f"{pattern}.parts.*"] = ColwiseParallel()
    styles |= {pattern: ColwiseParallel() for pattern in units.colwise}
    styles |= {pattern: RowwiseParallel() for pattern in units.rowwise}
    styles |= {pattern: SequenceParallel(sequence_dim=1, use_local_output=True) for pattern in units.per_head}

    tied = {id(p) for p, count in _owners(model).items() if count > 1}
    for pattern, style in styles.items():
        for name, module in matching(model, pattern):
            if any(id(p) in tied for p in module.parameters()):
                raise Refused(
                    "tied parameter under tensor parallelism",
                    name,
                    allowed="layers with weights of their own",
                    fix="tensor=1",
                )
            if next(module.parameters(), None) is not None:
                parallelize_module(module, mesh, style)
    for pattern, attributes in units.heads.items():
        for name, module in matching(model, pattern):
            for attribute in attributes:
                whole = getattr(module, attribute)
                if whole % mesh.size():
                    raise Refused(
                        f"{attribute} of {name}", whole, allowed=f"a multiple of the tensor degree {mesh.size()}"
                    )
                setattr(module, attribute, whole // mesh.size())


# ---- recomputation


def _recomputed(block: nn.Module, recomputation: str) -> nn.Module:
    if recomputation == "full":
        return checkpoint_wrapper(block)
    return checkpoint_wrapper(block, context_fn=partial(create_selective_checkpoint_contexts, _keep))


def _keep(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


# ---- FSDP


def _fsdp_options(plan: ParallelPlan, mesh: DeviceMesh) -> dict[str, Any]:
    # Tensor parallelism with replicas alone is HSDP over shards of one rank: DDP takes no DTensors.
    data_mesh = mesh["replicate", "shard"] if plan.replicate > 1 else mesh["shard"]
    options: dict[str, Any] = {"mesh": data_mesh, "reshard_after_forward": plan.reshard_after_forward}
    if plan.param_dtype != "fp32":
        # fp32 leaves parameters as they are: a float64 model stays one.
        options["mp_policy"] = MixedPrecisionPolicy(DTYPES[plan.param_dtype], DTYPES[plan.reduce_dtype])
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options


def _prefetch(blocks: list[FSDPModule], plan: ParallelPlan) -> None:
    """Ask for the next blocks' parameters before this one computes; else FSDP2 asks as the host arrives at each."""
    for order, ahead in ((blocks, plan.prefetch_forward), (blocks[::-1], plan.prefetch_backward)):
        for index, block in enumerate(order if ahead else ()):
            following = order[index + 1 : index + 1 + ahead]
            if order is blocks:
                block.set_modules_to_forward_prefetch(following)
            else:
                block.set_modules_to_backward_prefetch(following)


def _owners(model: nn.Module) -> Counter[nn.Parameter]:
    """In how many places each parameter is held; a module that stands in two places counts twice."""
    places = model.named_modules(remove_duplicate=False)
    return Counter(p for _, module in places for p in module.parameters(recurse=False))


def _tied_outside(block: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of the block is also held elsewhere. Two units cannot shard one: such a block goes to the root's."""
    inside, everywhere = _owners(block), _owners(model)
    return any(everywhere[p] > count for p, count in inside.items())
