"""Fake tensors count what real ones take: against real tensors, formulas by hand, and steps measured on an H200."""

import csv
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from workbench.models.build import build_model
from workbench.parallel.fake import fake_world, kinds_of_buffers, without_initialisation, wrappers_on_fake_tensors
from workbench.parallel.ledger import Ledger, Peak
from workbench.parallel.step_memory import WORKSPACE, TrainingStep, follow

DATA = Path(__file__).parents[1] / "data"
ROWS = [
    row
    for row in csv.DictReader((DATA / "h200_steps.csv").open())
    if row["case"].startswith(("vit-b", "vit-l", "vit-1b:4"))
    and row["case"].split(":")[2] in ("fp32", "bf16")
    and not {"micro_batch=32", "fused_optimizer=true"} & set(row["case"].split(":"))
]
WORLD = 4


def peak(
    model: nn.Module,
    ledger: Ledger,
    batch: int,
    *,
    autocast: torch.dtype | None = None,
    size: int = 224,
    channels: int = 3,
) -> Peak:
    step = TrainingStep(model, autocast=autocast, shards=True)
    inputs = torch.zeros(batch, channels, size, size), torch.zeros(batch, dtype=torch.long)
    return follow(step, ledger, inputs, on_host=False)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r["case"])
def test_the_peak_of_a_step_measured_on_an_h200_is_met_within_two_percent(row: dict[str, str]) -> None:
    """No GPU is used. The trainer of the measurement held a second batch of images, which is most of the difference."""
    name, batch, precision, *fields = row["case"].split(":")
    given = dict(field.split("=") for field in fields)
    shape = {key: value == "true" if key == "qk_norm" else value for key, value in given.items()}
    with without_initialisation(), FakeTensorMode(), wrappers_on_fake_tensors(), Ledger("cpu") as ledger:
        model = build_model(name, num_classes=1000, image_size=224, in_channels=3, **shape)
        autocast = torch.bfloat16 if precision == "bf16" else None
        predicted = peak(model, ledger, int(batch), autocast=autocast)
    assert predicted.allocated / 2**30 == pytest.approx(float(row["peak_gib"]), rel=0.02)


def sharded_peak(tensors: AbstractContextManager[object]) -> Peak:
    with fake_world(WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        with (
            without_initialisation(),
            tensors,
            wrappers_on_fake_tensors(),
            Ledger("cpu") as ledger,
            kinds_of_buffers(ledger),
        ):
            model = build_model("vit-nano", num_classes=10, image_size=32, in_channels=3)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            return peak(model, ledger, 2, size=32)


def test_a_sharded_step_on_fake_tensors_counts_what_it_takes_on_real_ones() -> None:
    assert sharded_peak(FakeTensorMode()) == sharded_peak(nullcontext())


def test_a_rank_holds_its_part_of_every_tensor_to_the_byte() -> None:
    """FSDP cuts along the first axis, in parts of equal size, the last one padded; Adam's moments have no padding."""
    with without_initialisation():
        plain = build_model("vit-nano", num_classes=10, image_size=32, in_channels=3)
    rows = [(-(-p.shape[0] // WORLD), p[0].numel()) for p in plain.parameters()]
    parts = 4 * sum(first * rest for first, rest in rows)
    seen = sharded_peak(FakeTensorMode())
    assert seen.breakdown["parameters"] == parts
    assert seen.breakdown["optimizer"] == (3 if seen.phase == "update" else 2) * parts
    assert seen.breakdown["workspace"] == WORKSPACE
    assert sum(seen.breakdown.values()) == seen.allocated <= seen.reserved
