"""A training run: it learns, and it does not hide what goes wrong."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.runs import config, equal, weights
from workbench.data.sources import check_source
from workbench.errors import Refused
from workbench.trainer.callbacks import Callback
from workbench.trainer.config import LossScaling
from workbench.trainer.loop import Diverged, Evaluation, StepRecord, Trainer
from workbench.trainer.meters import StepClock
from workbench.trainer.optim import make_optimizer
from workbench.trainer.precision import LossScaler, clip
from workbench.trainer.step import train_step


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
    assert not trainer.optimizer.state


def test_static_scaling_never_moves() -> None:
    trainer = Trainer(config(precision="fp16", loss_scaling=LossScaling(mode="static", init=2.0**40)))
    assert [r.loss_scale for r in trainer.train(3)] == [2.0**40] * 3


def first_update(**fields: Any) -> float:
    """2-norm of the weights' change in one SGD step clipped at 0.01, over the learning rate."""
    trainer = Trainer(config(optimizer="sgd", clip_norm=0.01, weight_decay=0.0, warmup_steps=0, **fields))
    before = weights(trainer)
    trainer.train(1)
    after = weights(trainer)
    return math.sqrt(sum(float(((after[n] - before[n]) ** 2).sum()) for n in before)) / trainer.config.learning_rate


def test_clipping_acts_on_the_gradient_and_not_on_its_scaled_copy() -> None:
    assert first_update(precision="fp32") == pytest.approx(0.01, rel=0.02)
    assert first_update(precision="fp16") == pytest.approx(0.01, rel=0.05)


def test_the_wrong_order_of_clipping_and_unscaling_shows_in_an_sgd_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without a call to unscale before clipping, the scaler unscales what was clipped: 65536 times too little."""
    monkeypatch.setattr(LossScaler, "unscale", lambda self, optimizer: None)
    monkeypatch.setattr(LossScaler, "step", lambda self, optimizer: bool(self._scaler.step(optimizer)))
    assert first_update(precision="fp16") < 0.01 / 1000


def test_no_other_trainer_of_the_process_turns_tf32_on_for_fp32() -> None:
    trainer = Trainer(config())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    trainer.train(1)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_a_step_can_be_taken_without_a_trainer() -> None:
    model, device = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), torch.device("cpu")
    setting = config(micro_batch=5, clip_norm=None)
    optimizer, clock = make_optimizer(model, setting), StepClock(device)
    images, labels = torch.ones(16, 1, 8, 8), torch.zeros(16, dtype=torch.long)
    whole = torch.nn.functional.cross_entropy(model(images), labels).item()
    clock.begin()
    outcome = train_step(
        model,
        list(model.parameters()),
        optimizer,
        LossScaler(setting.loss_scaling, setting.precision, device),
        images,
        labels,
        config=setting,
        loss_function=torch.nn.functional.cross_entropy,
        clock=clock,
    )
    assert outcome.loss.item() == pytest.approx(whole)
    assert torch.nn.functional.cross_entropy(model(images), labels).item() < whole
    assert clock.resolve()[0].forward > 0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_learning_rate_far_too_high_stops_the_run_at_the_step_that_shows_it(optimizer: str) -> None:
    trainer = Trainer(config(optimizer=optimizer, learning_rate=1e9, warmup_steps=0))
    seen: list[StepRecord] = []
    with pytest.raises(Diverged) as raised:
        trainer.train(40, seen.append)
    assert raised.value.step == seen[-1].step
    assert all(math.isfinite(r.loss) and math.isfinite(r.grad_norm) for r in seen[:-1])


def overflow_from(trainer: Trainer, step: int) -> None:
    """From ``step`` on, plant an infinity in one weight's gradient; the loss of that step stays finite."""
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda g: g.index_fill(-1, torch.tensor(0), math.inf) if trainer.step >= step else g)


def test_a_gradient_that_is_not_finite_is_reported_at_its_step_though_the_loss_is_finite() -> None:
    trainer = Trainer(config())
    overflow_from(trainer, 2)
    with pytest.raises(Diverged, match="gradient norm inf at step 2") as raised:
        trainer.train(5)
    assert math.isfinite(raised.value.loss)


def test_clipping_a_gradient_that_is_not_finite_leaves_it_for_all_to_see() -> None:
    """clip_grad_norm_ would make every finite element 0 and the infinite one NaN."""
    weight = torch.zeros(3, requires_grad=True)
    weight.grad = torch.tensor([1.0, math.inf, 2.0])
    assert clip([weight], 0.5).item() == math.inf
    assert weight.grad.tolist() == [1.0, math.inf, 2.0]


def test_a_loss_scale_does_not_halve_for_ever() -> None:
    trainer = Trainer(config(precision="fp16", loss_scaling=LossScaling(init=2.0**6)))
    overflow_from(trainer, 0)
    seen: list[StepRecord] = []
    with pytest.raises(
        Diverged, match=r"loss scale 1 at step 6, the scale's floor; first .inf at step 6 .* in the root module"
    ):
        trainer.train(20, seen.append)
    assert [r.loss_scale for r in seen] == [64, 32, 16, 8, 4, 2, 1]
    assert trainer.step == 7 and trainer.updates == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_interrupted_step_adds_nothing_to_the_next(precision: str) -> None:
    """Its batch is lost and nothing else: the rest is what a run that never saw the batch would have done."""
    setting = config(precision=precision, micro_batch=4)
    interrupted, control = Trainer(setting), Trainer(setting)
    forwards = iter(range(100))

    def stop_in_the_second_step(*_: object) -> None:
        if next(forwards) == 6:
            raise KeyboardInterrupt

    handle = interrupted.model.register_forward_hook(stop_in_the_second_step)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train(4)
    handle.remove()
    control.train(1)
    next(control.loader)
    assert [r.loss for r in interrupted.train(2)] == [r.loss for r in control.train(2)]
    assert equal(weights(interrupted), weights(control))


def test_a_step_that_stops_between_unscaling_and_update_can_be_followed_by_another() -> None:
    class Stop(Callback):
        def before_clipping(self, trainer: Trainer, step: int) -> None:
            if step == 1 and trainer.callbacks.pop():
                raise KeyboardInterrupt

    trainer = Trainer(config(precision="fp16"), callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3)
    assert [(r.step, r.loss_scale) for r in trainer.train(2)] == [(1, 2.0**16), (2, 2.0**16)]


def test_callbacks_hear_each_point_in_order() -> None:
    heard: list[tuple[str, int]] = []

    class Listen(Callback):
        @contextmanager
        def around_step(self, trainer: Trainer, step: int) -> Iterator[None]:
            heard.append(("step begins", step))
            yield
            heard.append(("step ends", step))

        def before_clipping(self, trainer: Trainer, step: int) -> None:
            assert all(p.grad is not None for p in trainer.model.parameters())
            heard.append(("before_clipping", step))

        def after_update(self, trainer: Trainer, step: int) -> None:
            heard.append(("after_update", step))

        def on_step(self, trainer: Trainer, record: StepRecord) -> None:
            heard.append(("on_step", record.step))

        def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
            heard.append(("on_evaluate", evaluation.num_samples))

    trainer = Trainer(config(), callbacks=[Listen()])
    trainer.train(1)
    trainer.train(1)
    trainer.evaluate()
    points = ["step begins", "before_clipping", "step ends", "after_update", "on_step"]
    assert heard == [(point, step) for step in (0, 1) for point in points] + [("on_evaluate", 360)]


def test_what_a_callback_sees_before_clipping_is_unscaled() -> None:
    norms: list[float] = []

    class Norm(Callback):
        def before_clipping(self, trainer: Trainer, step: int) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])))

    records = Trainer(config(precision="fp16", clip_norm=1e-3), callbacks=[Norm()]).train(2)
    assert norms == [r.grad_norm for r in records]
    assert norms[0] == pytest.approx(Trainer(config()).train(1)[0].grad_norm, rel=0.05)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("tests.trainer.runs:with_dropout", {}),
        ("resnet-small", {}),
        ("timm:vit_tiny_patch16_224", {"patch_size": 4, "depth": 1}),
        ("hf:vit", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}),
    ],
)
def test_models_from_elsewhere_train_the_same_way(model: str, args: dict[str, Any]) -> None:
    if library := {"timm": "timm", "hf": "transformers"}.get(model.partition(":")[0]):
        pytest.importorskip(library)
    records = Trainer(config(model=model, model_args=args, schedule="constant", learning_rate=3e-3)).train(20)
    assert sum(r.loss for r in records[-5:]) < sum(r.loss for r in records[:5])


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
