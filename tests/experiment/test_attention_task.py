"""Attention patterns as arms: the gate before the timing, what is measured of each length, and how growth is read off."""

from pathlib import Path

import numpy as np
import pytest

from tests.experiment.planted_attention import WrongBackward
from tests.experiment.test_tasks import FACTS
from workbench.errors import Refused
from workbench.experiment import Ablation, Guard, Protocol
from workbench.experiment.ablation import Arm
from workbench.experiment.attention import (
    ATTENTION_TASK,
    PATTERNS,
    attention_arms,
    fitted_exponent,
    pattern_records,
    predicted_density,
)
from workbench.experiment.attention_task import AttentionTask
from workbench.experiment.finding import ArmResult, Measurement
from workbench.kernels.gate import GateFailed
from workbench.planner.attention import fused_bytes, score_bytes
from workbench.trainer.config import TrainConfig

LENGTHS = [64, 128, 256]
SMALL = {"lengths": LENGTHS, "block_size": 16, "vit_block_size": 16, "head_dim": 16}
WORKLOAD = TrainConfig(device="cpu", global_batch=8, model_args={"patch_size": 1, "depth": 1})


def task(arm: Arm, kind: type[AttentionTask] = AttentionTask) -> AttentionTask:
    config = WORKLOAD.model_copy(update={"model_args": {**WORKLOAD.model_args, **arm.settings["model_args"]}})
    return kind(config, FACTS, **arm.task_args)


def arm_of(pattern: str) -> Arm:
    return attention_arms([pattern], **SMALL)[1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_passes_the_gate_and_is_measured_at_every_length(pattern: str) -> None:
    arm = arm_of(pattern)
    measured = task(arm)
    measured.warm_up(1)
    block = measured.block(1)
    r = pattern_records(ArmResult(name=pattern, measurement=measurement(block.extra)))
    assert list(r.lengths) == LENGTHS and (r.seconds > 0).all() and block.step_time == r.seconds[-1]
    assert np.isfinite(r.error).all() and (r.error <= 2 * r.dense_error + 1e-7).all()
    assert r.density[-1] <= predicted_density(arm, LENGTHS[-1]) * (1.2 if pattern == "random" else 1.0001)
    assert block.anatomy["forward"] + block.anatomy["backward"] == pytest.approx(block.step_time, rel=0.05)


def test_kept_bytes_are_those_of_the_formulas() -> None:
    dense = task(attention_arms(["local"], **SMALL)[0])
    dense.warm_up(1)
    for n, case in dense.cases.items():
        scores, output = score_bytes(1, 2, n, 4), n * 2 * 16 * 4
        assert case.figures["kept"] == pytest.approx(fused_bytes(1, 2, n, 16, 4), rel=0.02)
        assert case.figures["eager_kept"] == pytest.approx(scores + output, rel=0.02)


def test_a_wrong_backward_is_void_and_never_timed() -> None:
    planted = task(arm_of("local"), WrongBackward)
    with pytest.raises(GateFailed, match="grad k"):
        planted.warm_up(1)


@pytest.mark.slow
def test_an_ablation_voids_the_wrong_arm_and_decides_on_the_others(tmp_path: Path) -> None:
    dense, local = attention_arms(["local"], **SMALL)
    wrong = local.model_copy(update={"name": "wrong", "task": "tests.experiment.planted_attention:WrongBackward"})
    finding = Ablation(
        name="attention", title="", question="", hypothesis="", workload=WORKLOAD, baseline=dense, variants=[local, wrong],
        protocol=Protocol(warmup_steps=1, block_steps=1, min_block_s=0, max_rounds=4),
        guard=Guard(kind="accuracy", seeds=2, steps=2),
    ).run(tmp_path)  # fmt: skip
    decisions = {d.arm: d for d in finding.decisions}
    assert finding.arm("wrong").status == "inexact" and finding.arm("wrong").measurement is None
    assert decisions["wrong"].decision == "void: guard failed" and "grad k" in decisions["wrong"].reason
    assert next(g for g in finding.guards if g.arm == "wrong").kind == "gradient error"
    assert finding.arm("local").status == "completed" and len(finding.arm("local").evaluations) == 2
    (ratio,) = [p for p in finding.predictions if p.arm == "local"]
    assert (
        ratio.quantity == "ratio"
        and ratio.measured
        and ratio.predicted == pytest.approx(1 / predicted_density(local, 256))
    )


def test_a_power_law_is_found_with_an_interval_that_noise_widens() -> None:
    lengths = np.array([512.0, 1024, 2048, 4096, 8192])
    exact = fitted_exponent(lengths, 3e-9 * lengths**1.5)
    assert exact.value == pytest.approx(1.5) and exact.high - exact.low < 1e-6
    noisy = fitted_exponent(lengths, 3e-9 * lengths**1.5 * np.array([1.1, 0.9, 1.1, 0.9, 1.1]))
    assert noisy.low < 1.5 < noisy.high and noisy.high - noisy.low > 0.05


def measurement(extra: dict[str, float]) -> Measurement:
    return Measurement(step_time=1.0, samples_per_s=1.0, extra=extra)


@pytest.mark.parametrize(
    ("patterns", "fields", "word"),
    [
        (["windw_global"], {}, "window_global"),
        (["local"], {"lengths": [64, 128]}, "lengths"),
        (["local"], {"lengths": [64, 100, 128]}, "powers of two"),
        (["local"], {"lengths": [256, 128, 64]}, "rising"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(patterns, fields, word) -> None:
    with pytest.raises(Refused, match=word):
        attention_arms(patterns, **{**SMALL, **fields})


def test_arms_without_figures_are_refused_by_name() -> None:
    assert ATTENTION_TASK
    with pytest.raises(Refused, match="'mine'"):
        pattern_records(ArmResult(name="mine", measurement=measurement({"mfu": 0.3})))
