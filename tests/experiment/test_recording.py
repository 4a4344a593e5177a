"""What a guard run records of every layer's numerics, on the small gradients of notebook 02b."""

import numpy as np
import pytest

from tests.experiment.test_stability import guard_run
from tests.experiment.test_tasks import FACTS
from workbench.experiment.finding import ArmResult
from workbench.experiment.recorded import FLUSHED, LOGIT, ZERO, series
from workbench.experiment.recording_task import NumericsTask
from workbench.trainer.config import LossScaling, TrainConfig

SHAPE = {"patch_size": 4, "width": 32, "depth": 2, "heads": 2, "mlp_width": 64}
SMALL = TrainConfig(
    model="workbench.models.planted:small_gradients",
    model_args={"divisor": 2.0**16, **SHAPE},
    device="cpu",
    global_batch=32,
    precision="fp16",
    clip_norm=None,
    learning_rate=0.01,
    warmup_steps=2,
)
STEPS = 12


def recorded(**settings: object) -> ArmResult:
    return guard_run(SMALL.model_copy(update=settings), STEPS, NumericsTask)


@pytest.fixture(scope="module")
def full() -> ArmResult:
    return recorded(precision="fp32")


@pytest.fixture(scope="module")
def unscaled() -> ArmResult:
    return recorded(loss_scaling=LossScaling(mode="none"))


def mean_share(arm: ArmResult, *kinds: str) -> dict[str, float]:
    layers, values = series(arm, kinds[0])
    values = sum((series(arm, kind)[1] for kind in kinds[1:]), values)
    return dict(zip(layers, values[1:].mean(axis=0).tolist(), strict=True))


def test_without_scaling_gradients_vanish_and_more_of_them_than_the_baselines_foretell(
    unscaled: ArmResult, full: ArmResult
) -> None:
    """What vanishes on the way from the loss down takes gradients with it that would have been large enough."""
    before, foretold, found = mean_share(full, ZERO), mean_share(full, ZERO, FLUSHED), mean_share(unscaled, ZERO)
    assert before.keys() == foretold.keys() == found.keys()
    assert max(before.values()) < 0.05
    assert all(found[layer] > foretold[layer] - 0.05 for layer in found)
    assert found["patch_embed"] > 0.5 and found["head"] < 0.1


def test_a_scale_brings_the_gradients_back() -> None:
    scaled = recorded(loss_scaling=LossScaling(init=2.0**30))
    assert max(mean_share(scaled, ZERO).values()) < 0.05


def test_every_attention_has_its_logit_at_every_step(full: ArmResult) -> None:
    layers, values = series(full, LOGIT)
    assert layers == ("blocks.0.attn", "blocks.1.attn") and values.shape == (STEPS, 2)
    assert np.isfinite(values).all() and (values > 0).all()


def test_only_the_first_guard_run_is_watched() -> None:
    task = NumericsTask(SMALL.model_copy(update={"precision": "fp32"}), FACTS)
    first, second = (task.guard_run(seed, 2, lambda step, **values: None) for seed in (0, 1))
    assert any(name.startswith(ZERO) for name in first.trajectories)
    assert set(second.trajectories) == {"loss", "grad_norm"}
