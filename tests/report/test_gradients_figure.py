import numpy as np
import pytest
from matplotlib.figure import Figure

from workbench.experiment.finding import ArmResult
from workbench.experiment.stability import LayerRecords
from workbench.report.gradients import explosion_row, gradient_heatmap
from workbench.report.style import render

LAYERS = ("conv1", "layer4.conv1", "fc")
STEPS, LOST = 60, 50


def records(*, exploded: bool, scaled: bool = True) -> LayerRecords:
    """Level norms; with ``exploded`` the second layer's are a millionth from the start and all are NaN from step 50."""
    rng = np.random.default_rng(0)
    norm = 10 ** rng.normal(-1, 0.05, (STEPS, len(LAYERS)))
    loss, skipped = np.ones(STEPS), np.zeros(STEPS, dtype=bool)
    if exploded:
        norm[:, 1] *= 1e-6
        norm[LOST:], loss[LOST:], skipped[LOST:] = np.nan, np.nan, True
    scale = 2.0 ** np.minimum(10, 10 + LOST - np.arange(STEPS))
    extra = (scale, skipped) if scaled else (None, None)
    return LayerRecords(LAYERS, norm, np.ones_like(norm), loss, *extra, diverged=exploded)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("dark", [False, True])
def test_the_beginning_and_the_first_non_finite_step_are_marked(dark: bool) -> None:
    figure = gradient_heatmap(records(exploded=True), title="bad init", dark=dark)
    heat = figure.axes[0]
    assert [tick.get_text() for tick in heat.get_yticklabels()] == list(LAYERS)
    assert f"first non-finite, step {LOST}" in legend(figure)
    assert "began at step 0, layer4.conv1" in legend(figure)
    crosses = next(line for line in heat.get_lines() if line.get_label() == "NaN or infinite")
    assert set(crosses.get_xdata()) == set(range(LOST, STEPS))  # type: ignore[arg-type]
    assert render(figure).startswith(b"\x89PNG")


def test_colours_are_the_logarithms_of_the_norms_and_non_finite_ones_have_none() -> None:
    exploded = records(exploded=True)
    shown = gradient_heatmap(exploded).axes[0].images[0].get_array()
    assert shown is not None and shown.shape == (len(LAYERS), STEPS)
    np.testing.assert_allclose(shown[:, :LOST], np.log10(exploded.norm[:LOST]).T)
    assert np.ma.getmaskarray(shown)[:, LOST:].all()


def test_skipped_updates_stand_on_the_loss_scale_where_there_is_one() -> None:
    with_scale = gradient_heatmap(records(exploded=True))
    skips = next(line for axes in with_scale.axes for line in axes.get_lines() if line.get_label() == "update skipped")
    assert list(skips.get_xdata()) == list(range(LOST, STEPS))  # type: ignore[arg-type]
    assert "loss scale" in [axes.get_ylabel() for axes in with_scale.axes]
    without = gradient_heatmap(records(exploded=True, scaled=False))
    assert "loss scale" not in [axes.get_ylabel() for axes in without.axes]


def test_a_healthy_run_gets_no_mark() -> None:
    figure = gradient_heatmap(records(exploded=False))
    assert not figure.legends
    assert "no explosion found" in figure.get_supxlabel()
    render(figure)


def test_the_table_tells_apart_where_it_began_and_where_it_was_noticed() -> None:
    assert explosion_row(arm(records(exploded=True)), 20)[1:] == [
        "diverged", "layer4.conv1", "0", "50", "50", "50 (epoch 3)", "10", "peers from the start",
    ]  # fmt: skip
    assert explosion_row(arm(records(exploded=False)), 20)[1:] == ["completed", *"–––––", "0", "no explosion"]


def arm(r: LayerRecords) -> ArmResult:
    assert r.loss_scale is not None and r.skipped is not None
    layers = {f"gradient/{name}": r.norm[:, k].tolist() for k, name in enumerate(LAYERS)}
    layers |= {f"weight/{name}": r.weight[:, k].tolist() for k, name in enumerate(LAYERS)}
    series = {"loss": r.loss.tolist(), "loss_scale": r.loss_scale.tolist(), "skipped": r.skipped.astype(float).tolist()}
    return ArmResult(name="arm", status="diverged" if r.diverged else "completed", trajectories=series | layers)
