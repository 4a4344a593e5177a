"""Underflow by layer, attention logits, the history of a loss scale, and the dtypes that operators computed in."""

import base64
from collections.abc import Mapping
from html import escape

import numpy as np
from IPython.display import HTML, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.diagnose.scale_simulation import SimulatedScale
from workbench.errors import Refused
from workbench.experiment.dtypes import CUDA_AUTOCAST, DtypesSeen
from workbench.experiment.finding import ArmResult, Finding
from workbench.experiment.recorded import FLUSHED, LOGIT, ZERO, series
from workbench.report.style import LINES, caption, ink, render, styled
from workbench.report.tables import Badge, Table

PREDICTED = "predicted from {}"
"""A column of the underflow figure: what fp16 would flush of the baseline's gradients."""


def show_underflow(finding: Finding) -> None:
    """The share of every layer's gradient that was zero, arm by arm, beside what the baseline's gradients foretold."""
    _show(underflow_figure(finding), "Share of each layer's gradient that is zero, by arm")


def show_logits(finding: Finding) -> None:
    """The largest attention logit of every arm over its training."""
    largest = ", ".join(f"{arm.name}: up to {_largest_logit(arm).max():.3g}" for arm in _recorded(finding, LOGIT))
    _show(logits_figure(finding), f"Largest attention logit over the training steps. {largest}")


def show_scale(finding: Finding, simulated: Mapping[int, SimulatedScale]) -> None:
    """The loss scales that were measured, with their skips, above simulated longer ones, by growth interval."""
    _show(scale_figure(finding, simulated), "Loss scale over the training steps: measured above, simulated below")
    rows = [[arm.name, "measured", *_skips(np.array(arm.trajectories["skipped"]))] for arm in _scaled(finding)]
    rows += [[f"interval {i}", "simulated", *_skips(s.skipped)] for i, s in simulated.items()]
    display(HTML(Table(["loss scale", "tier", "steps", "skipped", "share"], rows, frozenset({2, 3, 4})).html()))


def show_dtypes(seen: DtypesSeen) -> None:
    """Each way of keeping attention in fp32 with the dtypes seen inside, and autocast here beside CUDA's."""
    display(HTML(dtype_table(seen).html() + autocast_table(seen).html()))


def dtype_table(seen: DtypesSeen) -> Table:
    """One row per way: the dtypes of the products and of everything else, and whether attention was in fp32."""
    rows = [[w.name, *_inside(w.operators), Badge("passed" if w.holds else "failed")] for w in seen.ways]
    return Table(["attention asked for in fp32 by", "operators inside attention", "all in fp32"], rows)


def autocast_table(seen: DtypesSeen) -> Table:
    """One row per operator: the dtype on this device and on CUDA, inside autocast, for half-precision inputs."""
    rows = [
        [name, here, CUDA_AUTOCAST[name], "" if here == CUDA_AUTOCAST[name] else "differs"]
        for name, here in seen.autocast.items()
    ]
    return Table(["operator", f"on {seen.device} (measured)", "on CUDA (documented)", ""], rows)


def underflow_figure(finding: Finding, *, dark: bool = False) -> Figure:
    """Layer by arm, the mean over the steps of the share of gradient elements that are zero; the number in each cell."""
    arms = _recorded(finding, ZERO)
    columns = {arm.name: series(arm, ZERO)[1].mean(axis=0) for arm in arms}
    layers, flushed = series(arms[0], FLUSHED)
    foretold = columns[arms[0].name] + flushed.mean(axis=0)
    columns = {arms[0].name: columns.pop(arms[0].name), PREDICTED.format(arms[0].name): foretold, **columns}
    with styled(dark=dark):
        figure = Figure(figsize=(8, 1.9 + 0.27 * len(layers)))
        axes = figure.subplots()
        shares = np.stack(list(columns.values()), axis=1)
        image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        figure.colorbar(image, ax=axes, label="share that is zero", pad=0.015)
        for row, column in np.ndindex(*shares.shape):
            share = shares[row, column]
            said = f"{share:.0%}" if share >= 0.005 or share == 0 else "<1%"
            axes.text(
                column, row, said, ha="center", va="center", fontsize=8, color="black" if share > 0.6 else "white"
            )
        axes.set_yticks(range(len(layers)), layers, fontsize=8.5)
        names = [name.replace(", ", ",\n").replace(" from ", "\nfrom ") for name in columns]
        axes.set_xticks(range(len(columns)), names, fontsize=8.5)
        axes.xaxis.tick_top()
        axes.grid(False)
        caption(
            figure,
            f"measured · {finding.device} · mean over {len(flushed)} steps of the first guard seed; predicted: zero, or so"
            f" small in {arms[0].name} that fp16 would hold zero",
        )
        return figure


def logits_figure(finding: Finding, *, dark: bool = False) -> Figure:
    """One line per arm: at each step the largest |q·k|/√head_dim of all layers."""
    with styled(dark=dark):
        figure = Figure(figsize=(8, 3.4))
        axes = figure.subplots()
        for k, arm in enumerate(_recorded(finding, LOGIT)):
            axes.plot(_largest_logit(arm), color=ink(k), linestyle=LINES[k % len(LINES)], label=arm.name)
        axes.set_yscale("log")
        axes.set_ylabel("largest attention logit")
        axes.set_xlabel("optimizer step")
        figure.legend(loc="outside upper left", ncols=3)
        caption(figure, f"measured · {finding.device} · first guard seed, all layers")
        return figure


def scale_figure(finding: Finding, simulated: Mapping[int, SimulatedScale], *, dark: bool = False) -> Figure:
    """Two panels: measured loss scales of the first guard seed, and simulated ones over more steps."""
    measured = {arm.name: (arm.trajectories["loss_scale"], arm.trajectories["skipped"]) for arm in _scaled(finding)}
    made_up = {f"interval {i}": (s.scale.tolist(), s.skipped.tolist()) for i, s in simulated.items()}
    with styled(dark=dark):
        figure = Figure(figsize=(8, 5.2))
        above, below = figure.subplots(2, 1)
        _scales(above, measured)
        above.set_title(f"measured on {finding.device}")
        _scales(below, made_up)
        below.set_title("simulated, log-normal gradients")
        below.set_xlabel("optimizer step")
        caption(
            figure, "× marks a step whose update was skipped; shares are of all steps, the first calibration included"
        )
        return figure


def _scales(axes: Axes, histories: Mapping[str, tuple[list[float], list[float]]]) -> None:
    for k, (name, (scale, skipped)) in enumerate(histories.items()):
        said = f"{name}: {np.mean(skipped):.2%} skipped" if len(skipped) else name
        axes.step(range(len(scale)), scale, where="post", color=ink(k), linestyle=LINES[k % len(LINES)], label=said)
        at = np.flatnonzero(skipped)
        axes.plot(at, np.array(scale)[at], "x", color=ink(k), markersize=6, markeredgewidth=1.6)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.legend(loc="best", fontsize=8.5)


def _recorded(finding: Finding, prefix: str) -> list[ArmResult]:
    """The arms that recorded a series, the baseline first.

    Raises:
        Refused: the baseline recorded none.
    """
    series(finding.arm(finding.baseline), prefix)
    return [arm for arm in finding.arms if any(name.startswith(prefix) for name in arm.trajectories)]


def _scaled(finding: Finding) -> list[ArmResult]:
    """The arms whose loss scale is dynamic.

    Raises:
        Refused: there is none.
    """
    static = {"mode": "static"}.items()
    arms = [
        arm for arm in finding.arms
        if "skipped" in arm.trajectories and not static <= arm.settings.get("loss_scaling", {}).items()
    ]  # fmt: skip
    if not arms:
        raise Refused("a finding without a dynamic loss scale", fix="add such an arm")
    return arms


def _largest_logit(arm: ArmResult) -> np.ndarray:
    return series(arm, LOGIT)[1].max(axis=1)


def _skips(skipped: np.ndarray) -> list[str]:
    return [str(len(skipped)), str(int(skipped.sum())), f"{skipped.mean():.2%}"]


def _inside(operators: Mapping[str, list[str]]) -> list[str]:
    """The operators by the dtypes of their inputs, in a few words."""
    by_dtype: dict[str, list[str]] = {}
    for operator, dtypes in sorted(operators.items()):
        by_dtype.setdefault(", ".join(dtypes), []).append(operator.strip("_"))
    return ["; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in sorted(by_dtype.items()))]


def _show(figure: Figure, alt: str) -> None:
    data = base64.b64encode(render(figure)).decode()
    display(HTML(f'<img src="data:image/png;base64,{data}" alt="{escape(alt, quote=True)}" width="768">'))
