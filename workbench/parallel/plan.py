"""How a training step is spread over ranks, as one typed value without torch, and the usual plans by name.

Degrees are numbers of ranks along an axis of the mesh; sizes of the world are their product. ``zero2`` is ZeRO's second
stage (Rajbhandari et al. 2020): gradients and optimizer states sharded, parameters gathered once per step.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.errors import Refused, nearest

Degree = Annotated[int, Field(ge=1)]
Dtype = Literal["fp32", "bf16", "fp16"]

NODE = 8
"""Ranks of one node: the widest group that ``hsdp`` and ``tp-fsdp`` keep within fast links."""


class ParallelPlan(BaseModel):
    """Degrees of parallelism and what goes with them. Whether they compose is for ``workbench.parallel.rules``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicate: Degree = 1
    shard: Degree = 1
    tensor: Degree = 1
    pipeline: Degree = 1
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward and gather them again in the backward: less memory, more traffic."""
    param_dtype: Dtype = "bf16"
    """Of parameters in forward and backward; the optimizer's stay fp32."""
    reduce_dtype: Dtype = "fp32"
    """Of gradients while they are summed over ranks."""
    loss_scaling: bool = False
    cpu_offload: bool = False
    """Sharded parameters, gradients and optimizer states live in host memory."""
    sync_each: bool = False
    """Reduce gradients after every micro-batch: more traffic, and no unsharded gradients kept in between."""
    prefetch_forward: Annotated[int, Field(ge=0)] = 0
    """Units whose parameters are gathered ahead of the one that computes; 0 leaves FSDP2's implicit prefetch."""
    prefetch_backward: Annotated[int, Field(ge=0)] = 0
    recomputation: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    compression: Literal["none", "bf16", "powersgd", "1bit-adam"] = "none"
    microbatches: Degree = 1
    """Forward passes per optimizer step."""
    schedule: Literal["", "gpipe", "1f1b", "interleaved-1f1b"] = ""
    """Order of micro-batches through the pipeline's stages; empty without a pipeline."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tensor * self.pipeline


def named_plan(name: str, world: int) -> ParallelPlan:
    """One of ``NAMES`` for ``world`` ranks.

    Raises:
        Refused: an unknown name, or a world that the plan cannot have; with the nearest that works.
    """
    check_plan_name(name)
    if world < 1:
        raise Refused("world", world, allowed="1 rank or more", fix="1 rank")
    return PLANS[name](world)


def check_plan_name(name: str) -> None:
    """Raises:
    Refused: no plan has this name.
    """
    if name not in PLANS:
        raise Refused("plan", name, allowed=", ".join(NAMES), fix=nearest(name, NAMES))


def _hsdp(world: int) -> ParallelPlan:
    """Shard within a node and replicate over nodes; below two nodes, two halves of one."""
    _must_divide("hsdp", world, 2 if world < 2 * NODE else NODE, at_least=4)
    shard = NODE if world >= 2 * NODE else world // 2
    return ParallelPlan(replicate=world // shard, shard=shard)


def _tp(world: int) -> ParallelPlan:
    if world not in (2, 4, NODE):
        best = min((2, 4, NODE), key=lambda size: abs(size - world))
        raise Refused("world of plan tp", world, allowed=f"2, 4 or {NODE} ranks of one node", fix=f"{best} ranks")
    return ParallelPlan(tensor=world)


def _tp_fsdp(world: int) -> ParallelPlan:
    _must_divide("tp-fsdp", world, 2, at_least=4)
    return ParallelPlan(tensor=2, shard=world // 2)


def _article(world: int) -> ParallelPlan:
    """``HYBRID_SHARD``, mixed precision, ``CPUOffload`` and ``BACKWARD_PRE`` of FSDP1, in FSDP2's words.

    ``BACKWARD_PRE`` gathers the next unit before the current one's gradients: one unit ahead in the backward.
    """
    return _hsdp(world).model_copy(
        update={"param_dtype": "bf16", "reduce_dtype": "bf16", "cpu_offload": True, "prefetch_backward": 1}
    )


PLANS: dict[str, Callable[[int], ParallelPlan]] = {
    "ddp": lambda world: ParallelPlan(replicate=world),
    "fsdp": lambda world: ParallelPlan(shard=world),
    "zero2": lambda world: ParallelPlan(shard=world, reshard_after_forward=False),
    "hsdp": _hsdp,
    "tp": _tp,
    "tp-fsdp": _tp_fsdp,
    "offload": lambda world: ParallelPlan(shard=world, cpu_offload=True),
    "recomputation": lambda world: ParallelPlan(shard=world, recomputation="full"),
    "article": _article,
}
NAMES = tuple(PLANS)


def _must_divide(name: str, world: int, by: int, at_least: int) -> None:
    if world % by or world < at_least:
        best = max(round(world / by) * by, at_least)
        raise Refused(
            f"world of plan {name}",
            world,
            allowed=f"a multiple of {by}, {at_least} or more",
            fix=f"{best} ranks, or fsdp",
        )
