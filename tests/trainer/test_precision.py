"""The loss scale: its constants, its floor, and one answer on all ranks."""

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.diagnose.ranks import run_ranks
from tests.trainer.runs import config, weights
from workbench.errors import Refused
from workbench.trainer.config import LossScaling, TrainConfig
from workbench.trainer.loop import Diverged, StepRecord, Trainer
from workbench.trainer.precision import LossScaler

CPU = torch.device("cpu")


def history(scaling: LossScaling, overflows: list[bool]) -> list[tuple[float, bool]]:
    """Scale of each step and whether the scaler was exhausted after it."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), LossScaler(scaling, "fp16", CPU)
    found = []
    for overflow in overflows:
        weight.grad = torch.tensor([1.0, math.inf if overflow else 1.0])
        scale = scaler.value
        scaler.unscale(optimizer)
        assert scaler.step(optimizer) == overflow
        assert scale is not None and float(scaler.scale(torch.ones(()))) == scaler.value
        found.append((scale, scaler.exhausted))
    return found


def scales(scaling: LossScaling, overflows: list[bool]) -> list[float]:
    return [scale for scale, _ in history(scaling, overflows)]


@pytest.mark.parametrize("interval", [1, 3, 20])
def test_above_the_floor_the_scale_moves_as_gradscalers_does(interval: int) -> None:
    draws = random.Random(interval)
    overflows = [draws.random() < 0.2 for _ in range(200)]
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_factor=4.0, growth_interval=interval)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    expected = []
    for overflow in overflows:
        expected.append(float(theirs.get_scale()))
        weight.grad = theirs.scale(torch.tensor([math.inf if overflow else 1e-30]))
        theirs.step(optimizer)
        theirs.update()
    ours = scales(LossScaling(init=2.0**40, growth=4.0, interval=interval, floor=2.0**-100), overflows)
    assert ours == expected


def test_hysteresis_counts_the_overflows_since_the_last_growth() -> None:
    overflows = [bool(int(digit)) for digit in "1011000011"]
    found = scales(LossScaling(init=64.0, interval=3, hysteresis=2), overflows)
    # The first overflow is borne; the second and third halve; growth restores the patience for the next one.
    assert found == [64, 64, 64, 32, 16, 16, 16, 32, 32, 32]


def test_the_scale_stops_at_its_floor_and_says_so() -> None:
    found = history(LossScaling(init=16.0, backoff=0.1, floor=3.0, interval=2), [True, True, True, False, False, False])
    assert found == [(16, False), (3, True), (3, True), (3, False), (3, False), (6, False)]


@pytest.mark.parametrize(
    "constants", [{"floor": 4.0, "init": 2.0}, {"hysteresis": 0}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}]
)
def test_senseless_constants_are_refused(constants: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        TrainConfig(precision="fp16", loss_scaling=constants)  # type: ignore[arg-type]


def overflow_on_rank_one(rank: int) -> dict[str, Any]:
    """Both ranks train the same; a gradient of rank 1 alone is infinite at step 1, and at every step of a second run."""
    once = Trainer(config(precision="fp16"))
    before = weights(once)
    plant(once, rank == 1, lambda step: step == 1)
    seen: list[StepRecord] = once.train(3)
    always = Trainer(config(precision="fp16", loss_scaling=LossScaling(init=8.0, floor=4.0)))
    plant(always, rank == 1, lambda step: True)
    try:
        always.train(9)
        said = ""
    except Diverged as error:
        said = str(error)
    return {
        "skipped": [r.skipped for r in seen],
        "scales": [r.loss_scale for r in seen],
        "moved": float(sum((value - before[name]).abs().sum() for name, value in weights(once).items())),
        "updates": once.updates,
        "said": said,
        "steps": always.step,
    }


def plant(trainer: Trainer, here: bool, when: Any) -> None:
    weight = trainer.model.get_parameter("blocks.1.mlp.fc1.weight")
    weight.register_hook(lambda g: g * math.inf if here and when(trainer.step) else g)


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_update_of_all_and_is_named_with_its_rank() -> None:
    first, second = run_ranks(overflow_on_rank_one)
    assert {**first, "said": ""} == {**second, "said": ""}
    assert first["skipped"] == [False, True, False] and first["scales"] == [2.0**16, 2.0**16, 2.0**15]
    assert first["updates"] == 2 and first["moved"] > 0
    assert first["steps"] == 2 and "at loss scale 4" in first["said"]
    assert all(
        "on rank 1: mul in blocks.1.mlp.fc1 (backward, producer)" in said for said in (first["said"], second["said"])
    )
