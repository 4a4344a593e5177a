"""What cannot compose in a plan, said before anything is launched, with the nearest plan that does.

Every rule is one function: given a plan, the world and the model's shape where it is known, it returns what is wrong and the
fields whose change would mend it, or nothing. A new rule is a new function in ``RULES``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from workbench.errors import Refused
from workbench.models.config import VITS, VitConfig, vit_config
from workbench.parallel.plan import ParallelPlan


class Conflict(NamedTuple):
    thing: str
    value: object
    allowed: str
    changes: dict[str, Any]
    """Fields of the plan, with the values nearest to its own that would mend it."""


Rule = Callable[[ParallelPlan, int, VitConfig | None], Conflict | None]


def check(plan: ParallelPlan, world: int, model: VitConfig | str | None = None) -> None:
    """Refuse a plan that cannot run on ``world`` ranks, or cannot take the model apart as it says.

    Args:
        model: its shape, or its name; a model that is no ViT of ours has no rules about its shape.

    Raises:
        Refused: the first rule that the plan breaks; the fix is a plan that breaks none.
    """
    if world < 1:
        raise Refused("world", world, allowed="1 rank or more", fix="1 rank")
    shape = _shape(model)
    conflict = first_conflict(plan, world, shape)
    if conflict is None:
        return
    works = nearest_plan(plan, world, shape)
    fix = ", ".join(f"{name}={value!r}" for name, value in works if value != getattr(plan, name))
    raise Refused(conflict.thing, conflict.value, allowed=conflict.allowed, fix=fix)


def first_conflict(plan: ParallelPlan, world: int, shape: VitConfig | None = None) -> Conflict | None:
    return next((conflict for rule in RULES if (conflict := rule(plan, world, shape))), None)


def nearest_plan(plan: ParallelPlan, world: int, shape: VitConfig | None = None) -> ParallelPlan:
    """The plan with every broken rule mended in turn. No mended rule breaks an earlier one for ever."""
    for _ in range(2 * len(RULES)):
        conflict = first_conflict(plan, world, shape)
        if conflict is None:
            return plan
        plan = plan.model_copy(update=conflict.changes)
    raise AssertionError(f"the rules do not agree on {plan}")


def _degrees(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if plan.world == world:
        return None
    tensor = _largest_divisor(world, plan.tensor)
    pipeline = _largest_divisor(world // tensor, plan.pipeline)
    data = world // tensor // pipeline
    replicate = data if plan.shard == 1 and plan.replicate > 1 else _largest_divisor(data, plan.replicate)
    changes = {"tensor": tensor, "pipeline": pipeline, "replicate": replicate, "shard": data // replicate}
    product = f"replicate {plan.replicate} × shard {plan.shard} × tensor {plan.tensor} × pipeline {plan.pipeline}"
    return Conflict(
        "product of the plan's degrees", plan.world, f"{world}, the ranks of the world; not {product}", changes
    )


def _compression(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    split = [axis for axis in ("shard", "tensor", "pipeline") if getattr(plan, axis) > 1]
    if plan.compression == "none" or (plan.replicate > 1 and not split):
        return None
    why = f"here {' and '.join(split)} split them" if split else "here is one rank"
    allowed = f"none, unless whole gradients are summed over replicas; {why}"
    return Conflict("compression", plan.compression, allowed, {"compression": "none"})


def _offload_of_shards(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if not plan.cpu_offload or plan.shard > 1:
        return None
    return Conflict(
        "cpu_offload", True, "with shard above 1: it is the shards that go to the host", {"cpu_offload": False}
    )


def _offload_and_accumulation(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if not plan.cpu_offload or plan.microbatches == 1 or plan.sync_each:
        return None
    allowed = "True with cpu_offload and micro-batches: unsharded gradients would stay on the device between them"
    return Conflict("sync_each", False, allowed, {"sync_each": True})


def _prefetch(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    for name in ("prefetch_forward", "prefetch_backward"):
        if getattr(plan, name) and plan.shard == 1:
            return Conflict(name, getattr(plan, name), "0 where nothing is sharded, hence nothing gathered", {name: 0})
    return None


def _heads(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    return _splits("heads", shape.heads, plan) if shape else None


def _mlp_width(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    return _splits("MLP width", shape.mlp_width, plan) if shape else None


def _splits(what: str, size: int, plan: ParallelPlan) -> Conflict | None:
    if size % plan.tensor == 0:
        return None
    tensor = max(d for d in _divisors(plan.tensor) if size % d == 0)
    changes = {"tensor": tensor, "shard": plan.shard * plan.tensor // tensor}
    return Conflict("tensor degree", plan.tensor, f"a divisor of the model's {what}, {size}", changes)


def _stages(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if shape is None or plan.pipeline <= shape.depth:
        return None
    stages = max(d for d in _divisors(plan.pipeline) if d <= shape.depth)
    changes = {"pipeline": stages, "shard": plan.shard * plan.pipeline // stages}
    return Conflict("pipeline degree", plan.pipeline, f"at most the model's {shape.depth} blocks", changes)


def _schedule(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if plan.pipeline > 1 and not plan.schedule:
        return Conflict("schedule", "", "gpipe, 1f1b or interleaved-1f1b with a pipeline", {"schedule": "1f1b"})
    if plan.pipeline == 1 and plan.schedule:
        return Conflict("schedule", plan.schedule, "empty without a pipeline", {"schedule": ""})
    return None


def _microbatches(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if plan.pipeline == 1 or plan.microbatches >= plan.pipeline:
        return None
    allowed = f"at least the {plan.pipeline} stages of the pipeline, or some would never work"
    return Conflict("microbatches", plan.microbatches, allowed, {"microbatches": plan.pipeline})


def _loss_scaling(plan: ParallelPlan, world: int, shape: VitConfig | None) -> Conflict | None:
    if plan.loss_scaling or "fp16" not in (plan.param_dtype, plan.reduce_dtype):
        return None
    allowed = "True with fp16, whose gradients below 6e-8 are zero"
    return Conflict("loss_scaling", False, allowed, {"loss_scaling": True})


RULES: tuple[Rule, ...] = (
    _degrees,
    _heads,
    _mlp_width,
    _stages,
    _schedule,
    _microbatches,
    _compression,
    _offload_of_shards,
    _offload_and_accumulation,
    _prefetch,
    _loss_scaling,
)


def _shape(model: VitConfig | str | None) -> VitConfig | None:
    if isinstance(model, str):
        return vit_config(model) if model in VITS else None
    return model


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _largest_divisor(number: int, at_most: int) -> int:
    return max(d for d in _divisors(number) if d <= at_most)
