from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests.samples import EVIL, sample_finding
from workbench.errors import Refused
from workbench.experiment.finding import ArmResult, Finding, Interval
from workbench.report import show, tables
from workbench.report.panel import panel, static_html

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "panel.ipynb")
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)


def _shown(finding: Finding) -> list[dict[str, Any]]:
    with capture_output() as captured:
        show(finding)
    return [output.data for output in captured.outputs]


@pytest.mark.usefixtures("shell", "live")
def test_a_live_session_gets_one_output_with_the_panel_and_a_still_for_other_readers() -> None:
    (bundle,) = _shown(sample_finding())
    assert VIEW in bundle
    assert "data:image/png" in bundle["text/html"]


@pytest.mark.usefixtures("shell", "live")
def test_a_batch_run_gets_the_still_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUN_DIR", "/runs/x")
    (bundle,) = _shown(sample_finding())
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/html"].count("<img") == 1


@pytest.mark.usefixtures("shell", "live")
def test_a_finding_without_a_measurement_shows_its_tables() -> None:
    arms = [ArmResult(name="a", status="crashed", error="boom"), ArmResult(name="b", status="oom")]
    finding = sample_finding(arms=arms, baseline="a", effects=[], guards=[], predictions=[], decisions=[])
    (bundle,) = _shown(finding)
    assert VIEW not in bundle
    assert "boom" in bundle["text/html"] and "<img" not in bundle["text/html"]


def test_without_ipython_the_headline_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show(sample_finding())
    assert "bf16: adopt" in capsys.readouterr().out


def test_a_view_that_the_finding_does_not_hold_is_refused() -> None:
    with pytest.raises(Refused, match="effects"):
        show(sample_finding(predictions=[]), view="prediction")


def test_controls_redraw_the_one_image_and_unused_ones_are_disabled() -> None:
    box = panel(sample_finding())
    (image,) = [w for w in box.children if isinstance(w, widgets.Image)]
    (left, arms) = box.children[0].children
    view, log = left.children
    seen = {image.value}
    for change in (lambda: setattr(log, "value", False), lambda: setattr(arms, "value", ("fp32", "bf16"))):
        change()
        seen.add(image.value)
    view.value = "anatomy"
    seen.add(image.value)
    assert len(seen) == 4
    assert log.disabled


def test_names_in_tables_are_escaped() -> None:
    finding = Finding.model_validate_json(sample_finding().model_dump_json().replace("bf16", EVIL))
    assert EVIL not in static_html(finding)
    for make in (tables.arms, tables.effects, tables.guards, tables.predictions):
        assert EVIL not in make(finding).html()
        assert "&lt;img src=x" in make(finding).html()


def test_arm_table_tells_status_and_reason_of_arms_that_gave_nothing() -> None:
    page = tables.arms(sample_finding()).html()
    assert "oom" in page and "tried to allocate" in page and "no fp8 matrix units" in page


def test_columns_that_nobody_filled_are_left_out() -> None:
    assert "J/step" not in tables.arms(sample_finding()).headers


def test_a_narrow_interval_is_not_rounded_onto_the_value_that_it_excludes() -> None:
    assert tables.bounds(Interval(low=1.002, high=1.009)) == "[1.002, 1.009]"
    assert tables.bounds(Interval(low=1.31, high=1.52)) == "[1.31, 1.52]"
