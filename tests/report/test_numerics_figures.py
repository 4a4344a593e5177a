"""Made-up numerics, drawn: what a cell, a line and a mark must say."""

from typing import Any

import numpy as np
import pytest

from tests.samples import sample_finding
from workbench.diagnose.scale_simulation import simulate_scaling
from workbench.errors import Refused
from workbench.experiment.finding import ArmResult, Finding
from workbench.report.numerics import logits_figure, scale_figure, underflow_figure
from workbench.report.style import render
from workbench.trainer.config import LossScaling

STEPS = 6


def finding() -> Finding:
    """fp32 without a zero, half of whose first layer would be flushed; fp16 that lost it; fp16 with a moving scale."""
    scale = {"loss_scale": [64.0, 32.0, 32.0, 32.0, 64.0, 32.0], "skipped": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]}
    still = {"loss_scale": [64.0] * STEPS, "skipped": [0.0] * STEPS}
    arms = [
        _arm("fp32", zero=0.0, flushed=0.5, logit=3.0),
        _arm("fp16, none", zero=0.5, flushed=0.0, logit=3.0),
        _arm("fp16, static", zero=0.0, flushed=0.0, logit=3.0, settings={"mode": "static"}, **still),
        _arm("fp16, moving", zero=0.0, flushed=0.0, logit=40.0, settings={"interval": 3}, **scale),
    ]
    return sample_finding(arms=arms, baseline="fp32", effects=[], guards=[], predictions=[], decisions=[])


def _arm(name: str, *, zero: float, flushed: float, logit: float, settings: Any = None, **series: Any) -> ArmResult:
    layers = {"zero/patch_embed": zero, "zero/head": 0.0, "flushed/patch_embed": flushed, "flushed/head": 0.0}
    numbers = {name: [value] * STEPS for name, value in (layers | {"logit/blocks.0.attn": logit}).items()}
    numbers["logit/blocks.1.attn"] = [2 * logit] * STEPS
    return ArmResult(name=name, settings={"loss_scaling": settings or {}}, trajectories=numbers | series)


@pytest.mark.parametrize("dark", [False, True])
def test_underflow_stands_by_layer_and_arm_beside_what_the_baseline_foretold(dark: bool) -> None:
    figure = underflow_figure(finding(), dark=dark)
    axes = figure.axes[0]
    names = [" ".join(label.get_text().split()) for label in axes.get_xticklabels()]
    assert names == ["fp32", "predicted from fp32", "fp16, none", "fp16, static", "fp16, moving"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["patch_embed", "head"]
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(shares, [[0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 0]])
    assert [text.get_text() for text in axes.texts[:5]] == ["0%", "50%", "50%", "0%", "0%"]
    assert render(figure).startswith(b"\x89PNG")


def test_the_largest_logit_of_all_layers_is_drawn_for_every_arm() -> None:
    lines = logits_figure(finding()).axes[0].get_lines()
    assert {line.get_label(): set(line.get_ydata()) for line in lines} == {  # type: ignore[arg-type]
        "fp32": {6.0}, "fp16, none": {6.0}, "fp16, static": {6.0}, "fp16, moving": {80.0},
    }  # fmt: skip


def test_measured_and_simulated_scales_stand_apart_and_mark_their_skips() -> None:
    simulated = {5: simulate_scaling(LossScaling(interval=5), steps=40, spread=0.0)}
    above, below = scale_figure(finding(), simulated).axes
    assert "measured" in above.get_title(loc="left") and "simulated" in below.get_title(loc="left")
    line, skips = above.get_lines()
    assert line.get_label() == "fp16, moving: 33.33% skipped"
    assert list(skips.get_xdata()) == [0, 4] and list(skips.get_ydata()) == [64, 64]  # type: ignore[arg-type]
    assert list(below.get_lines()[1].get_xdata()) == np.flatnonzero(simulated[5].skipped).tolist()  # type: ignore[arg-type]


def test_a_finding_without_these_series_is_refused() -> None:
    with pytest.raises(Refused, match="zero/"):
        underflow_figure(sample_finding())
    with pytest.raises(Refused, match="dynamic"):
        scale_figure(sample_finding(), {})
