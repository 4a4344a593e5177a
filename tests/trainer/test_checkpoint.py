"""A checkpoint resumes exactly, or is refused by name and changes nothing."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import config, equal, weights
from workbench.errors import Refused
from workbench.trainer.config import LossScaling
from workbench.trainer.loop import StepRecord, Trainer


def without_times(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    return [(r.step, r.loss, r.grad_norm, r.learning_rate, r.loss_scale, r.skipped) for r in records]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resuming_in_the_middle_of_an_epoch_is_exact_to_the_bit(tmp_path: Path, precision: str) -> None:
    setting = config(precision=precision, loss_scaling=LossScaling(init=2.0**20, interval=2, hysteresis=2))
    straight, first, resumed = (Trainer(setting) for _ in range(3))
    records = straight.train(10)
    first.train(5)
    first.save(tmp_path / "state.pt")
    torch.manual_seed(99)
    resumed.load(tmp_path / "state.pt")
    assert without_times(resumed.train(5)) == without_times(records[5:])
    assert equal(weights(straight), weights(resumed))


def test_resuming_goes_on_into_the_next_epoch(tmp_path: Path) -> None:
    setting = config(global_batch=400)
    straight, first, resumed = (Trainer(setting) for _ in range(3))
    records = straight.train(5)
    assert straight.loader.epoch == 1
    first.train(2)
    first.save(tmp_path / "state.pt")
    resumed.load(tmp_path / "state.pt")
    assert without_times(resumed.train(3)) == without_times(records[2:])


def test_dropout_draws_go_on_where_they_were(tmp_path: Path) -> None:
    setting = config(model="tests.trainer.runs:with_dropout", model_args={})
    straight = Trainer(setting)
    losses = [r.loss for r in straight.train(4)]
    first = Trainer(setting)
    first.train(2)
    first.save(tmp_path / "state.pt")
    resumed = Trainer(setting)
    resumed.load(tmp_path / "state.pt")
    assert [r.loss for r in resumed.train(2)] == losses[2:]


def stripped(path: Path, target: Path, **changes: Any) -> None:
    """A checkpoint with some of its entries replaced, or left out where the new value is ``None``."""
    state = torch.load(path, weights_only=True) | changes
    torch.save({k: v for k, v in state.items() if v is not None or k not in changes}, target)


def test_a_torn_or_foreign_checkpoint_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(config())
    trainer.save(tmp_path / "good.pt")
    whole = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "torn.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": 1}, tmp_path / "foreign.pt")
    stripped(tmp_path / "good.pt", tmp_path / "incomplete.pt", random=None)
    Trainer(config(model="vit-micro")).save(tmp_path / "other_model.pt")
    Trainer(config(optimizer="sgd")).save(tmp_path / "other_optimizer.pt")
    Trainer(config(seed=1)).save(tmp_path / "other_seed.pt")
    before, random, position = weights(trainer), torch.get_rng_state(), trainer.loader.state_dict()
    for name in (
        "torn",
        "empty",
        "text",
        "foreign",
        "incomplete",
        "other_model",
        "other_optimizer",
        "other_seed",
        "none",
    ):
        with pytest.raises(Refused, match=f"{name}.pt"):
            trainer.load(tmp_path / f"{name}.pt")
    assert equal(before, weights(trainer))
    assert torch.equal(random, torch.get_rng_state())
    assert (position, trainer.step) == (trainer.loader.state_dict(), 0)


def test_a_flipped_bit_in_a_weight_is_refused(tmp_path: Path) -> None:
    """torch.load takes such a file without a word."""
    trainer = Trainer(config())
    trainer.save(tmp_path / "state.pt")
    content = bytearray((tmp_path / "state.pt").read_bytes())
    weight = trainer.model.state_dict()["patch_embed.weight"].numpy().tobytes()
    content[content.index(weight) + 5] ^= 0x10
    (tmp_path / "state.pt").write_bytes(content)
    torch.load(tmp_path / "state.pt", weights_only=True)
    with pytest.raises(Refused, match="checksum"):
        trainer.load(tmp_path / "state.pt")


def test_the_values_that_differ_are_named(tmp_path: Path) -> None:
    Trainer(config()).save(tmp_path / "state.pt")
    with pytest.raises(Refused, match=r"learning_rate 0.001 then, 0.01 now"):
        Trainer(config(learning_rate=0.01)).load(tmp_path / "state.pt")


def test_a_longer_run_in_smaller_micro_batches_may_go_on(tmp_path: Path) -> None:
    first = Trainer(config())
    first.train(1)
    first.save(tmp_path / "state.pt")
    longer = Trainer(config(steps=100, micro_batch=4))
    longer.load(tmp_path / "state.pt")
    assert longer.train(1)[0].step == 1


def test_a_checkpoint_that_lost_its_loss_scale_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    Trainer(config(precision="fp16")).save(tmp_path / "state.pt")
    stripped(tmp_path / "state.pt", tmp_path / "lost.pt", scaler={})
    with pytest.raises(Refused, match="loss scale"):
        Trainer(config(precision="fp16")).load(tmp_path / "lost.pt")


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config())
    trainer.save(tmp_path / "state.pt")
    before = (tmp_path / "state.pt").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save(tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


KILLED_WHILE_SAVING = """
import os, signal, sys
from tests.trainer.runs import config
from workbench.trainer.loop import Trainer
trainer = Trainer(config())
trainer.save(sys.argv[1])
trainer.train(1)
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
trainer.save(sys.argv[1])
"""


def test_a_process_killed_while_saving_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path / "state.pt")], timeout=200)
    assert child.returncode == -signal.SIGKILL
    trainer = Trainer(config())
    trainer.load(tmp_path / "state.pt")
    assert trainer.step == 0


def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path: Path) -> None:
    trainer = Trainer(config())
    trainer.save(tmp_path / "state.pt")
    with torch.no_grad():
        next(trainer.model.parameters())[0] = math.nan
    with pytest.raises(Refused, match="non-finite"):
        trainer.save(tmp_path / "state.pt")
    fresh = Trainer(config())
    fresh.load(tmp_path / "state.pt")
    assert all(torch.isfinite(p).all() for p in fresh.model.parameters())


def test_running_statistics_fed_an_infinity_never_replace_good_ones(tmp_path: Path) -> None:
    trainer = Trainer(config(model="resnet-small", model_args={}))
    trainer.model.train()
    trainer.model(torch.full((4, 1, 8, 8), math.inf))
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    with pytest.raises(Refused, match="running_"):
        trainer.save(tmp_path / "state.pt")
