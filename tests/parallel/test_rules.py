"""Every rule about plans refuses what it is for, says why, and offers a plan that works."""

import itertools

import pytest

from workbench.errors import Refused
from workbench.models.config import vit_config
from workbench.parallel.plan import ParallelPlan
from workbench.parallel.rules import RULES, check, first_conflict, nearest_plan

NANO = vit_config("vit-nano")  # 4 blocks, 4 heads, MLP 256
ODD_MLP = vit_config("vit-nano", mlp_width=258)

BROKEN = {
    "degrees": ({"shard": 3}, 4, None, "product", "shard=4"),
    "degrees of ddp": ({"replicate": 2}, 4, None, "product", "replicate=4"),
    "heads": ({"tensor": 8}, 8, NANO, "heads, 4", "shard=2, tensor=4"),
    "mlp width": ({"tensor": 4}, 4, ODD_MLP, "MLP width, 258", "shard=2, tensor=2"),
    "stages": ({"pipeline": 8, "microbatches": 8, "schedule": "1f1b"}, 8, NANO, "4 blocks", "shard=2, pipeline=4"),
    "no schedule": ({"pipeline": 2, "microbatches": 2}, 2, NANO, "schedule", "schedule='1f1b'"),
    "schedule of nothing": ({"schedule": "gpipe"}, 1, None, "empty without a pipeline", "schedule=''"),
    "few micro-batches": ({"pipeline": 4, "schedule": "gpipe", "microbatches": 3}, 4, NANO, "stages", "microbatches=4"),
    "1-bit Adam of shards": ({"shard": 2, "compression": "1bit-adam"}, 2, None, "shard split", "compression='none'"),
    "PowerSGD of tensors": (
        {"tensor": 2, "replicate": 2, "compression": "powersgd"},
        4,
        None,
        "tensor",
        "compression='none'",
    ),
    "bf16 of one rank": ({"compression": "bf16"}, 1, None, "one rank", "compression='none'"),
    "offload of replicas": ({"replicate": 2, "cpu_offload": True}, 2, None, "shard above 1", "cpu_offload=False"),
    "offload, accumulated": (
        {"shard": 2, "cpu_offload": True, "microbatches": 2},
        2,
        None,
        "unsharded",
        "sync_each=True",
    ),
    "prefetch of replicas": ({"replicate": 2, "prefetch_backward": 1}, 2, None, "gathered", "prefetch_backward=0"),
    "fp16 parameters": ({"param_dtype": "fp16"}, 1, None, "fp16", "loss_scaling=True"),
    "fp16 reduction": ({"shard": 2, "reduce_dtype": "fp16"}, 2, None, "fp16", "loss_scaling=True"),
}


@pytest.mark.parametrize(("fields", "world", "model", "reason", "fix"), BROKEN.values(), ids=BROKEN.keys())
def test_what_cannot_compose_is_refused_with_reason_and_fix(fields, world, model, reason, fix):
    plan = ParallelPlan(**fields)
    with pytest.raises(Refused, match="fix: ") as refusal:
        check(plan, world, model)
    assert refusal.value.thing and refusal.value.value is not None and refusal.value.fix == fix
    assert reason in str(refusal.value)
    check(nearest_plan(plan, world, model), world, model)


def test_every_rule_is_broken_by_an_example():
    assert all(
        any(rule(ParallelPlan(**fields), world, model) for fields, world, model, _, _ in BROKEN.values())
        for rule in RULES
    )


def test_a_plan_that_composes_is_let_through():
    check(ParallelPlan(replicate=2, compression="1bit-adam"), 2, NANO)
    check(ParallelPlan(shard=2, cpu_offload=True, microbatches=2, sync_each=True), 2, "vit-nano")
    check(ParallelPlan(tensor=2, pipeline=2, shard=2, microbatches=2, schedule="1f1b"), 8, NANO)


def test_the_shape_of_a_model_that_is_not_ours_has_no_rules():
    check(ParallelPlan(tensor=8), 8, "timm:resnet50")
    with pytest.raises(Refused):
        check(ParallelPlan(tensor=8), 8, "vit-nano")


def test_a_nearest_plan_works_whatever_was_asked():
    degrees = itertools.product((1, 3, 4), (1, 2, 8), (1, 3, 8), (1, 6, 8), (6, 8, 12))
    for replicate, shard, tensor, pipeline, world in degrees:
        plan = ParallelPlan(
            replicate=replicate, shard=shard, tensor=tensor, pipeline=pipeline, cpu_offload=True, prefetch_forward=1,
            compression="powersgd", microbatches=2, param_dtype="fp16",
        )  # fmt: skip
        for model in (NANO, ODD_MLP, None):
            assert first_conflict(nearest_plan(plan, world, model), world, model) is None
