"""Gradient norms by layer and step: where an explosion began, where it showed, and what the loss scale did meanwhile."""

import base64

import numpy as np
from IPython.display import HTML, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.experiment.finding import ArmResult, Finding
from workbench.experiment.stability import LayerRecords, layer_records
from workbench.report.style import caption, ink, render, styled
from workbench.report.tables import NONE, Badge, Table


def show_explosion(finding: Finding, arm: str, *, steps_per_epoch: int) -> None:
    """The heatmap of one arm, and for every arm that recorded its layers what the records say of an explosion."""
    records = layer_records(finding.arm(arm))
    image = base64.b64encode(render(gradient_heatmap(records, title=arm, note=finding.device))).decode()
    alt = f"Gradient norm of every layer at every step of {arm}: {records.explosion() or 'no explosion'}"
    figure = f'<img src="data:image/png;base64,{image}" alt="{alt}" width="768">'
    display(HTML(figure + explosions(finding, steps_per_epoch).html()))


def explosions(finding: Finding, steps_per_epoch: int) -> Table:
    """Arm by arm: the layer at fault, the step at which it left the line, and those at which that could be noticed."""
    headers = ["arm", "status", "layer", "began", "ran away", "surfaced", "first non-finite", "skips", "decided by"]
    rows = [explosion_row(arm, steps_per_epoch) for arm in finding.arms if arm.trajectories]
    return Table(headers, rows, frozenset({3, 4, 5, 6, 7}))


def explosion_row(arm: ArmResult, steps_per_epoch: int) -> list[str]:
    """One arm's row. Steps count from 0, epochs from 1."""
    records = layer_records(arm)
    found, bad = records.explosion(), records.first_nonfinite
    first = NONE if bad is None else f"{bad} (epoch {bad // steps_per_epoch + 1})"
    skips = NONE if records.skipped is None else str(int(records.skipped.sum()))
    if found is None:
        return [arm.name, Badge(arm.status), *[NONE] * 4, first, skips, "no explosion"]
    steps = [str(found.began), str(found.runaway), str(found.surfaced)]
    return [arm.name, Badge(arm.status), found.layer or "all together", *steps, first, skips, found.reason]


def gradient_heatmap(records: LayerRecords, *, title: str = "", note: str = "", dark: bool = False) -> Figure:
    """Layer by step, coloured by log10 of the gradient norm before clipping; steps that are not finite are crossed.

    A triangle marks where the explosion began, a dashed line the first value that was not finite. Below, on the same axis,
    the loss scale with the steps whose update was skipped.
    """
    with styled(dark=dark):
        heights = [1.7 + 0.21 * len(records.layers), 1.3][: 1 if records.loss_scale is None else 2]
        figure = Figure(figsize=(8, sum(heights)))
        panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        _map(figure, panels[0], records)
        panels[0].set_title(title)
        if records.loss_scale is not None:
            _loss_scale(panels[1], records)
        panels[-1].set_xlabel("optimizer step")
        if any(axes.get_legend_handles_labels()[0] for axes in panels):
            figure.legend(loc="outside upper left", ncols=3)
        caption(figure, " · ".join(filter(None, [note, str(records.explosion() or "no explosion found")])))
        return figure


def _map(figure: Figure, axes: Axes, records: LayerRecords) -> None:
    steps, layers = records.norm.shape
    with np.errstate(divide="ignore"):
        log = np.log10(records.norm).T
    shown = np.ma.masked_invalid(log)
    image = axes.imshow(
        shown, aspect="auto", cmap="viridis", interpolation="nearest", extent=(-0.5, steps - 0.5, layers - 0.5, -0.5)
    )
    figure.colorbar(image, ax=axes, label="log10 of the gradient norm", pad=0.015)
    axes.set_yticks(range(layers), list(records.layers), fontsize=8.5)
    axes.grid(False)
    rows, steps_lost = np.nonzero(~np.isfinite(records.norm.T))
    if len(rows):
        axes.plot(steps_lost, rows, "x", color=ink(3), markersize=3.5, label="NaN or infinite")
    if (first := records.first_nonfinite) is not None:
        axes.axvline(first, color=ink(3), linestyle="--", linewidth=1.4, label=f"first non-finite, step {first}")
    found = records.explosion()
    if found is not None and found.layer is not None:
        row = records.layers.index(found.layer)
        axes.axhspan(row - 0.5, row + 0.5, fill=False, edgecolor=ink(1), linewidth=1.8)
        axes.plot(
            found.began, row, ">", color=ink(1), markersize=10, markeredgecolor="white", clip_on=False,
            label=f"began at step {found.began}, {found.layer}",
        )  # fmt: skip
    axes.set_xlim(-0.5, steps - 0.5)


def _loss_scale(axes: Axes, records: LayerRecords) -> None:
    assert records.loss_scale is not None
    steps = np.arange(len(records.loss_scale))
    axes.step(steps, records.loss_scale, where="post", color=ink(0))
    if records.skipped is not None and records.skipped.any():
        at = steps[records.skipped]
        axes.plot(at, records.loss_scale[at], "v", color=ink(3), markersize=6, label="update skipped")
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
