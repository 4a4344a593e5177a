"""Dry runs of whole plans: bytes against counts by hand, plans against one another, and what is refused."""

import json

import pytest

from workbench.errors import Refused
from workbench.models.build import build_model
from workbench.models.config import vit_config
from workbench.parallel.collectives import sharded_elements
from workbench.parallel.dryrun import DryRun, dry_run
from workbench.parallel.plan import NAMES, ParallelPlan, named_plan
from workbench.parallel.survey import survey

MODEL, WORLD, BATCH = "vit-nano", 4, 4


@pytest.fixture(scope="module")
def runs() -> dict[str, DryRun]:
    return {name: dry_run(MODEL, named_plan(name, WORLD), world=WORLD, batch=BATCH) for name in NAMES}


def share(ranks: int = 1) -> int:
    """Bytes of the model in fp32 on each of so many ranks: rows are padded to a multiple of them."""
    model = build_model(MODEL, num_classes=1000, image_size=224, in_channels=3)
    return 4 * sharded_elements(model.parameters(), ranks) // ranks


def test_every_named_plan_has_a_peak_and_its_parts_make_it_up(runs: dict[str, DryRun]) -> None:
    for run in runs.values():
        assert sum(run.breakdown.values()) == run.peak_bytes <= run.reserved_bytes
        assert run.breakdown["activations"] > 0 or run.phase == "update"


def test_replicas_hold_the_whole_model_and_shards_their_share(runs: dict[str, DryRun]) -> None:
    assert runs["ddp"].breakdown["parameters"] == share()
    for name, ranks in (("fsdp", 4), ("zero2", 4), ("recomputation", 4), ("hsdp", 2)):
        assert runs[name].breakdown["parameters"] == share(ranks)


def test_tensor_parallelism_splits_heads_and_mlp_and_repeats_the_rest(runs: dict[str, DryRun]) -> None:
    shape = vit_config(MODEL)
    width, hidden = shape.width, shape.mlp_width
    split = shape.depth * (3 * (width + 1) * width + width * width + (width + 1) * hidden + hidden * width)
    assert runs["tp"].breakdown["parameters"] == share() - 4 * split * (WORLD - 1) // WORLD


def test_offloaded_shards_lie_in_host_memory(runs: dict[str, DryRun]) -> None:
    assert runs["offload"].host_bytes >= 4 * share(WORLD)  # parameters, gradients and two moments
    assert runs["offload"].breakdown["parameters"] == runs["offload"].breakdown["optimizer"] == 0
    assert runs["fsdp"].host_bytes < 1024  # Adam counts its steps there


def test_recomputation_keeps_fewer_activations(runs: dict[str, DryRun]) -> None:
    assert runs["recomputation"].breakdown["activations"] < runs["fsdp"].breakdown["activations"]


def test_fp16_is_as_large_as_bf16() -> None:
    plan = ParallelPlan(replicate=WORLD, param_dtype="fp16", loss_scaling=True)
    run = dry_run(MODEL, plan, world=WORLD, batch=BATCH)
    assert run.peak_bytes == dry_run(MODEL, named_plan("ddp", WORLD), world=WORLD, batch=BATCH).peak_bytes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shard": 4, "compile": True}, "compile"),
        ({"pipeline": 4, "schedule": "1f1b", "microbatches": 4}, "pipeline"),
        ({"shard": 8}, "product of the plan's degrees"),
        ({"tensor": 3, "shard": 1}, "product"),
    ],
)
def test_plans_without_a_dry_run_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(Refused, match=said):
        dry_run(MODEL, ParallelPlan(**fields), world=WORLD)  # type: ignore[arg-type]


def test_a_survey_has_a_row_for_every_plan_and_world_and_says_why_one_cannot_be() -> None:
    rows = survey(MODEL, ["2", "4"], ["fsdp", "hsdp"])
    assert [(row.plan, row.world, row.run is None) for row in rows] == [
        ("fsdp", 2, False),
        ("fsdp", 4, False),
        ("hsdp", 2, True),
        ("hsdp", 4, False),
    ]
    assert "4" in rows[2].refusal
    assert json.loads(json.dumps(rows[0].as_json(80.0)))["fits"] == "yes"
    assert rows[0].as_json(2.01)["fits"] == "no"
