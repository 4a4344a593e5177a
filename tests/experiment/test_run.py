"""Whole ablations over planted tasks: what ends an arm is its result, and the others go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from workbench.errors import Refused
from workbench.experiment import Ablation, Arm, Finding, Guard, Protocol
from workbench.experiment.arms import ArmProcess
from workbench.experiment.decision import guard_verdicts
from workbench.experiment.measured import MeasuredArm
from workbench.experiment.run import check
from workbench.records.query import scan
from workbench.trainer.config import TrainConfig

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def arm(name: str, **model_args: Any) -> Arm:
    return Arm(name=name, settings={"model_args": model_args}, task="planted:PlantedTask")


def ablation(*arms: Arm, **fields: Any) -> Ablation:
    values: dict[str, Any] = {
        "name": "planted",
        "title": "Planted",
        "question": "?",
        "hypothesis": "!",
        "workload": TrainConfig(device="cpu"),
        "baseline": arms[0],
        "variants": list(arms[1:]),
        "protocol": Protocol(max_rounds=12, arm_timeout_s=20),
        "guard": Guard(seeds=3, steps=2, margin=0.05),
    }
    return Ablation(**{**values, **fields})


def words(finding: Finding) -> dict[str, str]:
    return {d.arm: d.decision for d in finding.decisions}


def test_a_faster_arm_is_adopted_a_slower_rejected_an_equal_one_neither(tmp_path: Path) -> None:
    finding = ablation(
        arm("base"),
        arm("equal", tag=1),
        arm("fast", step_time=0.007),
        arm("slow", step_time=0.02),
        protocol=Protocol(max_rounds=24),
    ).run(tmp_path)
    assert words(finding) == {"equal": "no effect beyond noise", "fast": "adopt", "slow": "reject"}
    ratio = next(e for e in finding.effects if e.arm == "slow").ratio
    assert 0.4 < ratio < 0.6


def test_a_speed_up_that_learns_worse_is_void(tmp_path: Path) -> None:
    finding = ablation(arm("base"), arm("fast but wrong", step_time=0.005, worse=0.5)).run(tmp_path)
    assert words(finding) == {"fast but wrong": "void: guard failed"}
    assert finding.guards[0].state == "failed"


def test_arms_that_die_are_results_and_the_others_go_on(tmp_path: Path) -> None:
    faults = {
        "crash": "crashed",
        "oom": "oom",
        "diverge": "diverged",
        "kill": "killed",
        "exit": "crashed",
        "hang": "timeout",
    }
    arms = [
        arm("base"),
        *(arm(fault, fault=fault) for fault in faults),
        arm("late", fault="kill", at="guard"),
        arm("fast", step_time=0.005),
    ]
    finding = ablation(*arms, protocol=Protocol(max_rounds=8, arm_timeout_s=4)).run(tmp_path)
    assert {a.name: a.status for a in finding.arms} == {
        **faults,
        "base": "completed",
        "late": "killed",
        "fast": "completed",
    }
    assert words(finding)["fast"] == "adopt"
    assert words(finding)["crash"] == "no result"
    assert "planted" in finding.arm("crash").error
    assert next(d.reason for d in finding.decisions if d.arm == "kill") == "killed: killed by SIGKILL"
    # What was measured before an arm died is kept.
    assert len(finding.arm("late").measurement.block_step_times) == 8  # type: ignore[union-attr]
    assert finding.arm("late").trajectories == {"loss": [2.0]}
    record = scan(tmp_path)[0]
    assert (record.status, record.exit_code) == ("completed", 1)
    assert "6 of 9 arms failed: 'crash' crashed" in record.error


def test_a_dead_baseline_gives_no_result_and_says_so(tmp_path: Path) -> None:
    finding = ablation(arm("base", fault="crash", at="warm-up"), arm("other")).run(tmp_path)
    assert finding.arm("base").status == "crashed"
    assert words(finding) == {"other": "no result"}
    record = scan(tmp_path)[0]
    assert (record.status, record.exit_code) == ("failed", 1)
    assert "the baseline 'base' crashed" in record.error


def test_a_baseline_whose_loss_is_zero_is_compared_absolutely() -> None:
    base, other = (MeasuredArm(arm(n), TrainConfig(), cast(ArmProcess, None)) for n in ("base", "other"))
    base.guard_runs = [{"seed": seed, "loss": 0.0} for seed in range(3)]
    other.guard_runs = [{"seed": seed, "loss": 0.01} for seed in range(3)]
    verdict = guard_verdicts(base, [other], Guard(margin=0.05))[0]
    assert (verdict.state, verdict.difference) == ("passed", pytest.approx(0.01))


def test_an_unavailable_arm_is_reported_and_not_started(tmp_path: Path) -> None:
    missing = arm("fp8").model_copy(update={"unavailable": "no fp8 units"})
    finding = ablation(arm("base"), missing).run(tmp_path)
    assert (finding.arm("fp8").status, finding.arm("fp8").error) == ("unavailable", "no fp8 units")


def test_arms_that_do_not_fit_together_restart_for_each_block(tmp_path: Path) -> None:
    finding = ablation(arm("base"), arm("fast", step_time=0.004), protocol=Protocol(max_rounds=4, alive=False)).run(
        tmp_path
    )
    assert finding.effects[0].rounds == 4


def test_blocks_of_short_steps_take_more_of_them(tmp_path: Path) -> None:
    """The planted task says 10 ms a step with 8 % noise."""
    finding = ablation(arm("base"), arm("x"), protocol=Protocol(max_rounds=4, block_steps=3, min_block_s=0.5)).run(
        tmp_path
    )
    assert 40 <= finding.protocol["block_steps"] <= 65
    long = ablation(arm("base"), arm("x"), protocol=Protocol(max_rounds=4, block_steps=90, min_block_s=0.5)).run(
        tmp_path
    )
    assert long.protocol["block_steps"] == 90


def test_every_block_and_the_finding_are_recorded(tmp_path: Path) -> None:
    finding = ablation(arm("base"), arm("fast", step_time=0.005)).run(tmp_path)
    run = scan(tmp_path)[0]
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "block" for line in lines) == 2 * finding.effects[0].rounds
    assert sum(line["event"] == "guard" for line in lines) == 6
    assert Finding.model_validate_json((run.dir / "finding.json").read_bytes()) == finding


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"variants": [Arm(name="x", settings={"precison": "bf16"})]}, "precision"),
        ({"variants": [Arm(name="x", settings={"precision": "fp12"})]}, "fp12"),
        ({"variants": [arm("base")]}, "one arm per name"),
        ({"variants": [Arm(name="x", task="__main__:Mine")]}, "notebook"),
        ({"variants": [Arm(name="x", settings={"model": "vit-tiyn"})]}, "vit-tiny"),
        ({"variants": [Arm(name="x", settings={"data": "digit"})]}, "digits"),
        ({"variants": [Arm(name="x", settings={"device": "cpu"})]}, "one device"),
        ({"variants": [arm("x", activation=lambda x: x)]}, "function"),
        ({"workload": TrainConfig(device="cuda:93")}, "cpu"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        ablation(arm("base"), **{"variants": [arm("x")], **changed}).run(tmp_path)
    assert not list(tmp_path.iterdir())


class TaskHere:
    """Stands for a class given in place of its name."""


@pytest.mark.parametrize(
    ("task", "said"),
    [("planted:PlantedTsk", "PlantedTask"), ("plantde:PlantedTask", "plantde"), (TaskHere, r"test_run:TaskHere")],
)
def test_a_task_that_is_not_there_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any, said: str
) -> None:
    monkeypatch.setattr(TaskHere, "__module__", "no_such_package.test_run")
    with pytest.raises(Refused, match=said):
        ablation(arm("base"), Arm(name="x", task=task)).run(tmp_path)
    assert scan(tmp_path)[0].status == "refused"
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_a_class_of_a_notebook_cell_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskHere, "__module__", "__main__")
    with pytest.raises(Refused, match="notebook"):
        ablation(arm("base"), Arm(name="x", task=TaskHere)).run(tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_run_of_its_own_goes_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "elsewhere"))
    ablation(arm("base"), arm("x"), guard=Guard(kind="none")).run()
    assert scan(tmp_path / "elsewhere")[0].status == "completed"


def test_nested_settings_are_merged_over_the_workload() -> None:
    quick = Arm(name="quick", settings={"precision": "fp16", "loss_scaling": {"interval": 100}})
    configs, _ = check(ablation(arm("base"), quick))
    assert configs["quick"].loss_scaling.interval == 100
    assert configs["quick"].loss_scaling.init == 2**16


PROMPT_S = 15
"""Below any of the waits that an interrupt might fall into (an arm's 20 s of silence), above a busy machine's delay."""
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
sys.path.insert(0, {here!r})
from test_run import ablation, arm
from workbench.experiment import Protocol
a = ablation(arm("base", sleep=0.2), arm("other", sleep=0.2, fault={fault!r}), protocol=Protocol(max_rounds=1000))
a.run({root!r})
"""


def _started(root: Path, fault: str = "") -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A parent in the middle of its rounds, with all the processes below it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(here=str(HERE), root=str(root), fault=fault)],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if sum(file.read_text().count("\n") for file in root.glob("*/metrics.jsonl")) >= 5:
            time.sleep(0.5)  # the other arm is in its third block, where its fault is
            return parent, psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.1)
    raise AssertionError("the ablation never began")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_ending_the_parent_ends_its_arms_and_the_record_says_so(tmp_path: Path, sent: signal.Signals) -> None:
    parent, arms = _started(tmp_path)
    assert sum("arm_process" in " ".join(process.cmdline()) for process in arms) == 2
    began = time.monotonic()
    os.kill(parent.pid, sent)
    parent.wait(timeout=30)
    took = time.monotonic() - began
    _, alive = psutil.wait_procs(arms, timeout=15)
    assert not alive
    assert took < PROMPT_S
    assert scan(tmp_path)[0].status == {signal.SIGINT: "interrupted", signal.SIGKILL: "killed"}[sent]


@pytest.mark.parametrize("fault", ["hang", "stop", "hold", "spawn"])
def test_no_process_outlives_a_killed_parent_whatever_it_does(tmp_path: Path, fault: str) -> None:
    parent, processes = _started(tmp_path, fault)
    parent.kill()
    parent.wait(timeout=30)
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive
