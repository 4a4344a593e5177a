from datetime import UTC, datetime

import numpy as np
import pytest

from workbench.experiment.finding import ArmResult, Finding, GuardVerdict, Measurement
from workbench.planner.attention import fused_bytes, score_bytes
from workbench.report.attention import attention_figure, measured_patterns, memory_table, pattern_table, savings
from workbench.report.style import render

LENGTHS = [512, 1024, 2048, 4096]
SHAPE = {"batch": 1.0, "heads": 2.0, "head_dim": 32.0, "value_bytes": 4.0}


def arm(name: str, power: float, share: float, *, eager: bool = False) -> ArmResult:
    """Time c·n^power; half of the longest length's gate missing, as where float64 is too dear."""
    extra = dict(SHAPE)
    for n in LENGTHS:
        live = share * LENGTHS[0] / n if share < 1 else 1.0
        extra |= {
            f"{n}/seconds": 1e-9 * n**power, f"{n}/density": live, f"{n}/kept": float(fused_bytes(1, 2, n, 32, 4)),
            f"{n}/peak": 1e6, f"{n}/csr_bytes": 4 * live * (n / 64) ** 2, f"{n}/mask_bytes": float(n * n),
        }  # fmt: skip
        if n < LENGTHS[-1]:
            extra |= {f"{n}/error": 3e-7, f"{n}/dense_error": 2e-7}
            extra |= {f"{n}/eager_kept": 1.01 * score_bytes(1, 2, n, 4)} if eager else {}
    evaluations = [{"seed": float(s), "loss": 1.0, "accuracy": 0.7 + 0.01 * s} for s in range(3)]
    measured = Measurement(step_time=extra["4096/seconds"], samples_per_s=1.0, extra=extra)
    return ArmResult(name=name, measurement=measured, evaluations=evaluations)


@pytest.fixture
def finding() -> Finding:
    arms = [
        arm("dense", 2.0, 1.0, eager=True),
        arm("local", 1.0, 0.5),
        ArmResult(name="wrong", status="inexact", error="grad k is off"),
    ]
    guard = GuardVerdict(arm="local", kind="accuracy equivalence", state="passed", margin=0.05, seeds=3)
    workload = {"model": "vit-nano", "model_args": {"patch_size": 1}, "data": "digits"}
    return Finding(
        name="03", title="t", question="q", hypothesis="h", created=datetime.now(UTC), device="a CPU", workload=workload,
        baseline="dense", arms=arms, guards=[guard],
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True])
def test_every_measured_pattern_is_drawn_with_its_growth_and_void_ones_are_not(finding: Finding, dark: bool) -> None:
    figure = attention_figure(finding, dark=dark)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["dense, ∝ n^2.00", "local, ∝ n^1.00"]
    assert render(figure).startswith(b"\x89PNG")


def test_three_meanings_of_compression_stand_apart(finding: Finding) -> None:
    dense, local = measured_patterns(finding)
    mask, scores, time = savings(local, dense)
    assert mask == pytest.approx(1 - 4 * 0.0625 * 64**2 / 4096**2)
    assert scores == pytest.approx(1 - 0.0625) and time == pytest.approx(1 - 1 / 4096)
    rows = {row[0]: row for row in pattern_table(finding).rows}
    assert rows["local"][1:6] == ["99.994 %", "93.8 %", "100.0 %", "1.00 [1.00, 1.00]", "1.00"]
    assert rows["local"][6] == "3.0e-07 (1.5×)" and rows["local"][-1] == "passed"
    assert rows["wrong"][-1] == "inexact" and set(rows["wrong"][1:-1]) == {"–"}


def test_formulas_stand_beside_what_was_measured_and_a_missing_figure_is_a_dash(finding: Finding) -> None:
    rows = memory_table(finding).rows
    assert [row[0] for row in rows] == [str(n) for n in LENGTHS]
    assert rows[0][2] == "2 MiB" and rows[0][4] == "−1.0%" and rows[0][7] == "+0.0%"
    assert rows[-1][3] == rows[-1][4] == "–"
    assert np.isfinite(float(rows[0][1].split()[0]))
