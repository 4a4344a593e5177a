"""A training run: it learns, and it does not hide what goes wrong."""

import math
from typing import Any

import pytest
import torch

from tests.trainer.runs import config, equal, weights
from workbench.data.sources import check_source
from workbench.errors import Refused
from workbench.trainer.config import LossScaling
from workbench.trainer.loop import Diverged, StepRecord, Trainer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_falls_in_every_precision(precision: str) -> None:
    records = Trainer(config(precision=precision, steps=25, learning_rate=3e-3)).train(25)
    assert sum(r.loss for r in records[-5:]) < sum(r.loss for r in records[:5]) - 0.5


def test_equal_configurations_train_equally() -> None:
    assert equal(*(weights(t) for t in (Trainer(config()), Trainer(config())) if t.train(3)))


def test_evaluation_sees_every_validation_sample_once() -> None:
    assert Trainer(config(global_batch=64)).evaluate().num_samples == check_source("digits").num_val


@pytest.mark.parametrize("micro_batch", [4, 5, 16])
def test_any_split_into_micro_batches_gives_the_whole_batch_gradient(micro_batch: int) -> None:
    """5 does not divide 16: the last micro-batch of one sample weighs a sixteenth and not a quarter."""
    whole, split = (Trainer(config(micro_batch=m, optimizer="sgd", clip_norm=None)) for m in (None, micro_batch))
    for trainer in (whole, split):
        trainer.model.double().register_forward_pre_hook(lambda _, images: (images[0].double(),))
    one, other = whole.train(2), split.train(2)
    assert [r.loss for r in one] == pytest.approx([r.loss for r in other], abs=1e-6)
    assert [r.grad_norm for r in one] == pytest.approx([r.grad_norm for r in other], rel=1e-5)
    assert all(
        torch.allclose(a, b, rtol=1e-9) for a, b in zip(whole.model.parameters(), split.model.parameters(), strict=True)
    )


def test_a_skipped_update_holds_back_the_schedule_and_lowers_the_scale() -> None:
    trainer = Trainer(config(precision="fp16", loss_scaling=LossScaling(init=2.0**40)))
    before = weights(trainer)
    first, second = trainer.train(2)
    assert (first.skipped, second.skipped) == (True, True)
    assert second.loss_scale == 2.0**39
    assert first.learning_rate == second.learning_rate
    assert (trainer.step, trainer.updates) == (2, 0)
    assert equal(before, weights(trainer))


def test_static_scaling_never_moves() -> None:
    trainer = Trainer(config(precision="fp16", loss_scaling=LossScaling(mode="static", init=2.0**40)))
    assert [r.loss_scale for r in trainer.train(3)] == [2.0**40] * 3


def test_clipping_acts_on_the_gradient_and_not_on_its_scaled_copy() -> None:
    """With SGD the update shows it: a norm clipped before unscaling would be 65536 times too small."""
    moved = []
    for precision in ("fp32", "fp16"):
        trainer = Trainer(
            config(precision=precision, optimizer="sgd", clip_norm=0.01, weight_decay=0.0, warmup_steps=0)
        )
        before = weights(trainer)
        trainer.train(1)
        after = weights(trainer)
        moved.append(math.sqrt(sum(float(((after[n] - before[n]) ** 2).sum()) for n in before)))
    assert moved[0] == pytest.approx(0.01 * 1e-3, rel=0.02)
    assert moved[1] == pytest.approx(moved[0], rel=0.05)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step() -> None:
    trainer = Trainer(config(learning_rate=1e30, clip_norm=None, warmup_steps=0))
    seen: list[StepRecord] = []
    with pytest.raises(Diverged) as raised:
        trainer.train(40, seen.append)
    assert raised.value.step == seen[-1].step
    assert math.isfinite(seen[0].loss)


def test_parts_of_a_step_add_up_to_its_time() -> None:
    times = Trainer(config()).train(3)[-1].times
    assert 0 < sum(times[1:]) <= times.total * 1.001


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "tf32"}, "fp32"),
        ({"device": "cuda:77"}, "cpu"),
        ({"global_batch": 100000}, "training samples"),
        ({"model": "vit-nan"}, "vit-nano"),
        ({"model_args": {"attention": "flesh", "patch_size": 4}}, "eager"),
    ],
)
def test_what_cannot_run_here_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        Trainer(config(**fields))
