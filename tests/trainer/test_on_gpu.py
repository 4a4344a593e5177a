"""What only a GPU can show: that the host runs ahead, that events time the device, that its random state is resumed.

pytest tests/trainer/test_on_gpu.py
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import config, equal, weights
from workbench.trainer.loop import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def trainer_on_gpu(**fields: Any) -> Trainer:
    return Trainer(config(device="cuda:0", **fields))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_never_waits_for_the_device(precision: str, fused: bool) -> None:
    trainer = trainer_on_gpu(precision=precision, fused_optimizer=fused, micro_batch=5)
    trainer.train(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer._step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_trains_and_skips_on_the_device(fused: bool) -> None:
    trainer = trainer_on_gpu(precision="fp16", fused_optimizer=fused, learning_rate=3e-3)
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0**40})
    before = weights(trainer)
    first = trainer.train(1)[0]
    assert (first.skipped, first.loss_scale, trainer.updates) == (True, 2.0**40, 0)
    assert equal(before, weights(trainer))
    records = trainer.train(80)
    assert not records[-1].skipped
    assert sum(r.loss for r in records[-5:]) < sum(r.loss for r in records[:5]) - 0.5


def test_the_parts_of_a_step_are_the_devices_time() -> None:
    trainer = trainer_on_gpu(model="vit-tiny", global_batch=64)
    trainer.train(5)
    began = time.perf_counter()
    records = trainer.train(30)
    wall = time.perf_counter() - began
    measured = sum(r.times.total for r in records)
    assert 0.5 * wall < measured < 1.05 * wall
    for times in (r.times for r in records):
        assert min(times.forward, times.backward, times.optimizer) > 0
        assert times.forward + times.backward + times.optimizer <= times.total * 1.01


def test_resuming_restores_the_devices_random_state(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": "tests.trainer.runs:with_dropout", "model_args": {}, "precision": "fp16"}
    first, resumed = trainer_on_gpu(**fields), trainer_on_gpu(**fields)
    first.train(2)
    first.save(tmp_path / "state.pt")
    losses = [r.loss for r in first.train(3)]
    torch.manual_seed(5)
    resumed.load(tmp_path / "state.pt")
    assert [r.loss for r in resumed.train(3)] == losses
    assert equal(weights(first), weights(resumed))


def test_tf32_is_on_for_tf32_alone() -> None:
    plain, fast = trainer_on_gpu(), trainer_on_gpu(precision="tf32")
    losses = plain.train(1)[0].loss, fast.train(1)[0].loss
    assert torch.backends.cuda.matmul.allow_tf32
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    plain.evaluate()
    assert not torch.backends.cuda.matmul.allow_tf32
