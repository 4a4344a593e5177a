"""The ranks of a plan as a device mesh with named axes."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.parallel.plan import ParallelPlan

AXES = ("pipeline", "replicate", "shard", "tensor")
"""Outermost first: neighbouring ranks, which share the fastest links, split tensors."""


def build_mesh(plan: ParallelPlan, device_type: str) -> DeviceMesh:
    """A mesh of ``plan.world`` ranks with all of ``AXES``, those of degree 1 too, so that ``mesh["shard"]`` always is one.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """
    return init_device_mesh(device_type, tuple(getattr(plan, axis) for axis in AXES), mesh_dim_names=AXES)


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that see different samples under the same tensor split and stage: axes replicate and shard, flattened."""
    return mesh["replicate", "shard"]._flatten("data").get_group()
