"""A plan's degrees, and the plans that go by a name."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from workbench.errors import Refused
from workbench.parallel.plan import NAMES, ParallelPlan, named_plan
from workbench.parallel.rules import check


def test_the_world_is_the_product_of_the_degrees():
    assert ParallelPlan(replicate=2, shard=3, tensor=4, pipeline=5).world == 120


@pytest.mark.parametrize("fields", [{"shard": 0}, {"prefetch_forward": -1}, {"param_dtype": "fp8"}, {"shards": 2}])
def test_a_field_that_is_unknown_or_out_of_range_is_not_accepted(fields):
    with pytest.raises(ValidationError):
        ParallelPlan(**fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_plan_fits_its_world_and_breaks_no_rule(name):
    plan = named_plan(name, 8)
    assert plan.world == 8
    check(plan, 8, "vit-10b")


@pytest.mark.parametrize(("world", "replicate", "shard"), [(4, 2, 2), (8, 2, 4), (16, 2, 8), (64, 8, 8)])
def test_hsdp_shards_within_a_node_and_replicates_over_nodes(world, replicate, shard):
    plan = named_plan("hsdp", world)
    assert (plan.replicate, plan.shard) == (replicate, shard)


def test_the_articles_plan_says_in_fsdp2_what_the_article_said_in_fsdp1():
    plan = named_plan("article", 8)
    assert (plan.replicate, plan.shard) == (2, 4)  # HYBRID_SHARD
    assert (plan.param_dtype, plan.reduce_dtype) == ("bf16", "bf16")
    assert plan.cpu_offload and plan.prefetch_backward == 1


@pytest.mark.parametrize(
    ("name", "world", "fix"),
    [("hsdp", 2, "4 ranks"), ("hsdp", 5, "4 ranks"), ("hsdp", 20, "16 ranks"), ("tp", 3, "2 ranks"), ("tp", 16, "8 ranks"),
     ("tp-fsdp", 2, "4 ranks"), ("tp-fsdp", 7, "8 ranks"), ("article", 2, "4 ranks"), ("fdsp", 2, "'fsdp'"), ("ddp", 0, "1")],
)  # fmt: skip
def test_a_world_that_a_plan_cannot_have_is_refused_with_the_nearest(name, world, fix):
    with pytest.raises(Refused) as refusal:
        named_plan(name, world)
    assert refusal.value.allowed and fix in refusal.value.fix


@pytest.mark.parametrize("name", ["hsdp", "tp", "tp-fsdp", "article"])
@pytest.mark.parametrize("world", range(1, 34))
def test_the_nearest_world_that_a_refusal_offers_is_one_that_works(name, world):
    try:
        named_plan(name, world)
    except Refused as refusal:
        offered = int(refusal.fix.split()[0])
        assert named_plan(name, offered).world == offered


def test_plans_and_rules_load_no_torch():
    code = "import sys, workbench.parallel.rules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
