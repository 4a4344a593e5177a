"""The training task: what its blocks and guard runs give, alone and through a whole ablation on the digits."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.experiment import Ablation, Arm, Guard, Protocol, tasks
from workbench.experiment.tasks import READ_AHEAD, TrainTask, wait_for_workers
from workbench.hardware.facts import DeviceFacts
from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import Diverged

FACTS = DeviceFacts(
    device="cpu",
    kind="cpu",
    name="a CPU",
    memory_bytes=2**34,
    peak_flops={"fp32": 1e11},
    peak_source="measured matmul",
    memory_bandwidth=1e10,
    bandwidth_source="measured copy",
    op_overhead_s=2e-6,
    torch_version=torch.__version__,
)
QUICK = TrainConfig(device="cpu", global_batch=32, model_args={"depth": 1})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_block_says_where_the_time_goes_and_what_it_costs() -> None:
    task = TrainTask(QUICK, FACTS)
    task.warm_up(1)
    block = task.block(3)
    assert sum(block.anatomy.values()) == pytest.approx(block.step_time)
    assert block.samples_per_step == 32
    assert block.peak_memory_bytes is not None and block.peak_memory_bytes > 0
    assert 0 < block.extra["mfu"] < 2
    assert block.energy_joules is None


def test_guard_runs_of_one_seed_are_the_same_bit_for_bit_and_of_another_not() -> None:
    task = TrainTask(QUICK, FACTS)
    heard: list[int] = []
    runs = [task.guard_run(seed, 4, lambda step, **values: heard.append(step)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0].trajectories["loss"] != runs[2].trajectories["loss"]
    assert heard == [0, 1, 2, 3] * 3


def test_a_guard_run_gives_the_same_whether_blocks_came_before_it_or_not() -> None:
    after, alone = TrainTask(QUICK, FACTS), TrainTask(QUICK, FACTS)
    after.block(3)
    assert after.guard_run(7, 3, _unheard) == alone.guard_run(7, 3, _unheard)


def test_a_guard_run_does_not_hold_a_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TrainTask(QUICK, FACTS)
    alive = []

    def build(config: TrainConfig, **_: Any) -> Any:
        alive.append(hasattr(task, "trainer"))
        return trainer(config)

    trainer = tasks.Trainer
    monkeypatch.setattr(tasks, "Trainer", build)
    task.guard_run(0, 1, _unheard)
    assert alive == [False]


def test_what_workers_read_ahead_is_used_up_before_a_block_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the pause between an arm's blocks would hide its data wait."""
    task = TrainTask(QUICK, FACTS)
    task.config = QUICK.model_copy(update={"num_workers": 3})
    taken: list[int] = []
    train = task.trainer.train
    monkeypatch.setattr(task.trainer, "train", lambda steps: taken.append(steps) or train(steps))
    task.block(2)
    assert taken == [3 * READ_AHEAD, 2]


def test_waiting_for_workers_ends_when_they_rest() -> None:
    busy = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", busy])
    began = time.monotonic()
    wait_for_workers(limit_s=30)
    worker.kill()
    worker.wait()
    assert 0.4 < time.monotonic() - began < 25


def test_an_ablation_of_real_training_ends_in_a_whole_finding(tmp_path: Path) -> None:
    finding = Ablation(
        name="real",
        title="Real",
        question="?",
        hypothesis="!",
        workload=QUICK,
        baseline=Arm(name="A"),
        variants=[Arm(name="A again"), Arm(name="broken", settings={"learning_rate": 1e30})],
        protocol=Protocol(warmup_steps=1, block_steps=2, max_rounds=4),
        guard=Guard(seeds=2, steps=4, margin=0.01),
    ).run(tmp_path)
    assert {a.name: a.status for a in finding.arms} == {"A": "completed", "A again": "completed", "broken": "diverged"}
    again, broken = finding.guards
    assert (again.state, again.difference) == ("passed", 0.0)
    assert (broken.state, finding.decisions[1].decision) == ("failed", "void: guard failed")
    assert finding.arm("A").trajectories == finding.arm("A again").trajectories
    step_time = next(p for p in finding.predictions if p.arm == "A")
    assert step_time.measured == finding.arm("A").measurement.step_time  # type: ignore[union-attr]
    assert step_time.error == pytest.approx(step_time.predicted / step_time.measured - 1)


def test_a_guard_run_that_diverges_is_heard_to_its_last_step() -> None:
    broken = TrainTask(QUICK.model_copy(update={"learning_rate": 1e30, "warmup_steps": 0}), FACTS)
    losses: list[float] = []
    with pytest.raises(Diverged):
        broken.guard_run(0, 10, lambda step, **values: losses.append(values["loss"]))
    assert math.isfinite(losses[0]) and not math.isfinite(losses[-1])


def _unheard(step: int, **values: float) -> None:
    pass
