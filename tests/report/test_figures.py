import math
import subprocess
import sys

import pytest
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer

from tests.samples import EVIL, sample_finding
from workbench.errors import Refused
from workbench.experiment.finding import ArmResult, Finding
from workbench.report.figures import VIEWS, available, combine, describe
from workbench.report.style import render


def _texts(figure) -> str:
    figure.draw_without_rendering()
    return "\n".join(t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text")))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("log", [True, False])
def test_every_view_draws_png_and_svg_and_names_tier_and_device(name: str, log: bool) -> None:
    figure = VIEWS[name](sample_finding(), log=log)
    assert render(figure).startswith(b"\x89PNG")
    assert b"<svg" in render(figure, "svg")
    assert "measured · Sample CPU, 2 cores" in _texts(figure)


def test_effects_show_ratio_interval_and_decision_and_also_the_arms_that_gave_none() -> None:
    finding = sample_finding()
    text = _texts(VIEWS["effects"](finding))
    effect = finding.effects[0]
    assert f"{effect.ratio:.2f}×  [{effect.interval.low:.2f}, {effect.interval.high:.2f}]\nadopt" in text
    assert "void: guard failed" in text and "oom" in text and "unavailable" in text


def test_effects_axis_holds_one_and_every_interval() -> None:
    finding = sample_finding()
    low, high = VIEWS["effects"](finding).axes[0].get_xlim()
    assert low < 1 < high
    assert all(low < e.interval.low and e.interval.high < high for e in finding.effects)


def test_anatomy_bars_add_up_to_the_step_and_differ_by_hatch() -> None:
    finding = sample_finding()
    axes = VIEWS["anatomy"](finding, arms=["fp32"]).axes[0]
    bars = [c.patches[0] for c in axes.containers if isinstance(c, BarContainer)]
    assert sum(b.get_width() for b in bars) == pytest.approx(finding.arm("fp32").measurement.step_time * 1e3)
    assert len({b.get_hatch() for b in bars}) == len(bars)


def test_a_curve_that_turns_nan_is_marked_where_it_ends() -> None:
    axes = VIEWS["trajectories"](sample_finding()).axes[0]
    ends = [line.get_xdata().tolist() for line in axes.get_lines() if line.get_marker() == "x"]
    assert [50] in ends


def test_views_without_data_are_not_offered_and_say_so_when_asked() -> None:
    arms = [ArmResult(name="a", status="crashed", error="x"), ArmResult(name="b", status="oom")]
    finding = sample_finding(arms=arms, baseline="a", effects=[], guards=[], predictions=[], decisions=[])
    assert available(finding) == []
    for view in VIEWS.values():
        assert render(view(finding))


def test_names_are_drawn_as_text_whatever_they_hold() -> None:
    finding = Finding.model_validate_json(
        sample_finding().model_dump_json().replace("bf16", r"$\\frac $ 🙂 \n %s " + EVIL)
    )
    for view in VIEWS.values():
        svg = render(view(finding), "svg").decode()
        assert "<img" not in svg


def test_infinite_intervals_and_measurements_do_not_break_a_figure() -> None:
    finding = sample_finding()
    finding.effects[0].interval.high = math.inf
    finding.effects[1].interval.low = math.nan
    assert render(VIEWS["effects"](finding))


def test_an_unknown_arm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(Refused, match="bf16"):
        VIEWS["effects"](sample_finding(), arms=["bf61"])


@pytest.mark.parametrize(
    "other",
    [
        {"device": "Another GPU"},
        {"workload": {"precision": "tf32"}},
        {"device_facts": {"power_cap_watts": 400}},
        {"tier": "simulated"},
    ],
)
def test_findings_of_different_conditions_refuse_to_share_an_axis_unless_asked(other: dict) -> None:
    one, two = sample_finding(), sample_finding("03_other", **other)
    if "workload" in other:
        two.arm("fp32").settings.clear()
    assert render(combine([one, sample_finding("03_other")]))
    with pytest.raises(Refused, match="allow_mixed"):
        combine([one, two])
    assert "MIXED" in _texts(combine([one, two], allow_mixed=True))


def test_dark_figures_have_light_ink_on_a_dark_ground_in_every_artist() -> None:
    figure = VIEWS["distribution"](sample_finding(), dark=True)
    assert max(to_rgb(figure.get_facecolor())) < 0.2
    assert all(max(to_rgb(line.get_color())) > 0.5 for line in figure.axes[0].get_lines())


def test_descriptions_carry_the_headline() -> None:
    finding = sample_finding()
    assert all(finding.headline in describe(finding, name) for name in available(finding))


def test_figures_import_no_pyplot_and_no_torch() -> None:
    code = "import sys, workbench.report.figures; sys.exit(bool({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
