"""The Gantt charts: every pass is drawn where it was, kinds are told apart in grey, both timelines share an axis."""

import io

import numpy as np
import pytest
from PIL import Image

from workbench.errors import Refused
from workbench.parallel.schedules import schedule_table
from workbench.planner.pipeline import Simulation, simulate
from workbench.report.pipeline import PASSES, Bar, bars_of, bubble_of, contrast_figure, gantt_figure
from workbench.report.style import render, styled


def run(name: str = "dualpipe-v") -> Simulation:
    return simulate(schedule_table(name, 2, 6), (1.0, 1.5, 0.5), 0.25)


def test_bars_are_the_simulations_passes() -> None:
    simulation = run()
    bars = bars_of(simulation)
    assert len(bars) == sum(map(len, simulation.table))
    assert {b.kind for b in bars} == set("FBIW")
    assert bubble_of(bars) == pytest.approx(simulation.bubble_fraction)


def test_a_chart_draws_every_pass_in_its_lane() -> None:
    bars = bars_of(run())
    axes = gantt_figure(bars, "title", "simulated").axes[0]
    drawn = {
        (c.get_label(), *np.round([*path.vertices.min(axis=0), *path.vertices.max(axis=0)], 6))
        for c in axes.collections
        if c.get_label() in PASSES
        for path in c.get_paths()
    }
    assert drawn == {(b.kind, *np.round([b.start, b.rank - 0.43, b.end, b.rank + 0.43], 6)) for b in bars}


def test_kinds_differ_in_grey() -> None:
    from workbench.report.pipeline import _colour

    for dark in (False, True):
        with styled(dark=dark):
            greys = sorted(float(np.dot(_colour(kind), (0.299, 0.587, 0.114))) for kind in PASSES)
        assert min(np.diff(greys)) > 0.04


def test_measured_stands_over_simulated_on_one_axis() -> None:
    simulation = run("1f1b")
    measured = [(*b[:4], 100 + 1.2 * b.start, 100 + 1.2 * b.end) for b in bars_of(simulation)]
    measured.append((0, "wait", 0, 0, 103.0, 104.0))
    figure = contrast_figure(measured, bars_of(simulation), "both", "measured on one machine", unit="s")
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() and above.get_xlim()[1] >= 1.2 * simulation.makespan
    assert f"bubble {simulation.bubble_fraction:.1%}" in above.get_title(loc="left") + below.get_title(loc="left")
    assert above.get_title(loc="left").split("bubble")[1] == below.get_title(loc="left").split("bubble")[1]
    assert Image.open(io.BytesIO(render(figure))).width > 1000


def test_waits_are_idle_and_no_timeline_is_refused() -> None:
    bars = [Bar(0, "F", 0, 0, 5.0, 6.0), Bar(0, "wait", 0, 0, 6.0, 8.0), Bar(0, "B", 0, 0, 8.0, 9.0)]
    assert bubble_of(bars) == pytest.approx(0.5)
    with pytest.raises(Refused, match="timeline"):
        gantt_figure([])
