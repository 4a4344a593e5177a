"""Figures of a finding: functions from a finding to a ``matplotlib`` figure, in one style, readable without colour."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.errors import Refused, nearest
from workbench.experiment.finding import ArmResult, Effect, Finding, PredictionCheck
from workbench.report import tables
from workbench.report.style import (
    DECISION_MARKS,
    LINES,
    MARKERS,
    caption,
    in_unit,
    ink,
    label,
    log_axis,
    ratio_axis,
    right_labels,
    rows,
    styled,
)

PARTS = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other",
}
PART_FILLS = [(1, "///"), (0, ""), (2, "\\\\\\"), (3, "..."), (5, "xx")]
SERIES_ORDER = ["loss", "grad_norm", "loss_scale"]
QUANTITIES = {"step_time": "step time", "ratio": "ratio to the baseline", "peak_memory_bytes": "peak memory"}

TITLES = {
    "effects": "Each variant against the baseline",
    "anatomy": "Where a step's time goes",
    "distribution": "Step time of every block",
    "trajectories": "Training curves",
    "prediction": "Predicted and measured",
}


class View(Protocol):
    """A figure of a finding; ``arms`` restricts it to some, ``log`` picks the axis, ``dark`` the page it is for."""

    def __call__(
        self, finding: Finding, *, arms: Sequence[str] | None = None, log: bool = True, dark: bool = False
    ) -> Figure: ...


VIEWS: dict[str, View] = {}


def _view(draw: Callable[[Finding, list[ArmResult], bool], Figure]) -> View:
    @functools.wraps(draw)
    def drawn(finding: Finding, *, arms: Sequence[str] | None = None, log: bool = True, dark: bool = False) -> Figure:
        chosen = _chosen(finding, arms)
        with styled(dark=dark):
            return draw(finding, chosen, log)

    VIEWS[draw.__name__] = drawn
    return drawn


def available(finding: Finding) -> list[str]:
    """The views for which this finding holds anything."""
    measured = [arm.measurement for arm in finding.arms if arm.measurement]
    holds = {
        "effects": bool(finding.effects),
        "anatomy": any(sum(m.anatomy.model_dump().values()) > 0 for m in measured),
        "distribution": any(m.block_step_times for m in measured),
        "trajectories": any(arm.trajectories for arm in finding.arms),
        "prediction": any(p.measured is not None for p in finding.predictions),
    }
    return [name for name in VIEWS if holds[name]]


def describe(finding: Finding, view: str) -> str:
    """What a figure shows, for readers who cannot see it."""
    return f"{TITLES[view]}. {finding.headline}."


@_view
def effects(finding: Finding, arms: list[ArmResult], log: bool) -> Figure:
    """Forest plot: each variant's ratio to the baseline with its interval, and what was decided."""
    variants = [arm for arm in arms if arm.name != finding.baseline]
    if not variants:
        return _empty("No variant is chosen: an effect is a variant against the baseline.")
    figure = Figure(figsize=(8, 1.35 + 0.48 * len(variants)))
    axes = figure.add_subplot()
    by_arm = {e.arm: e for e in finding.effects}
    words = {d.arm: d.decision for d in finding.decisions}
    shown = [(arm, by_arm.get(arm.name), words.get(arm.name, "no result")) for arm in variants]
    _forest(axes, [(arm.name, e, word, arm.status) for arm, e, word in shown], log=log)
    known = [e for _, e, _ in shown if e]
    metric = metric_name(known[0].metric) if known else "throughput"
    axes.set_xlabel(f"{metric}, ratio to {label(finding.baseline, 60)}" + (" (log axis)" if log else ""))
    rounds = f"{max(e.rounds for e in known)} rounds, " if known else ""
    confidence = f"bars: {known[0].interval.confidence:.0%} interval" if known else "nothing measured"
    caption(figure, f"{_origin(finding)} · {rounds}{confidence}")
    return figure


@_view
def anatomy(finding: Finding, arms: list[ArmResult], log: bool) -> Figure:
    """Where a step's time goes: one stacked bar per arm. They add up on a linear axis only: ``log`` is ignored."""
    timed = [(arm.name, arm.measurement) for arm in arms if arm.measurement]
    if not timed:
        return _empty("None of the chosen arms was measured.")
    figure = Figure(figsize=(8, 1.7 + 0.48 * len(timed)))
    axes = figure.add_subplot()
    heights = rows(axes, [name for name, _ in timed])
    factor, unit = in_unit(max(m.step_time for _, m in timed))
    left = np.zeros(len(timed))
    for (part, title), (colour, hatch) in zip(PARTS.items(), PART_FILLS, strict=True):
        lengths = np.array([getattr(m.anatomy, part) for _, m in timed]) * factor
        if lengths.any():
            axes.barh(
                heights, lengths, 0.6, left, label=title, color=ink(colour), hatch=hatch, edgecolor=axes.get_facecolor()
            )
        left += lengths
    for height, end, (_, m) in zip(heights, left, timed, strict=True):
        axes.annotate(
            f"{m.step_time * factor:.3g} {unit}", (end, height), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, left.max() * 1.13 or 1)
    axes.set_xlabel(f"time of the median step ({unit})")
    figure.legend(loc="outside upper left", ncols=len(PARTS))
    caption(figure, _origin(finding))
    return figure


@_view
def distribution(finding: Finding, arms: list[ArmResult], log: bool) -> Figure:
    """Mean step time of every block: a box over them, and a point each, rising in round order so that drift shows."""
    timed = [(arm.name, np.array(arm.measurement.block_step_times)) for arm in arms if arm.measurement]
    timed = [(name, times) for name, times in timed if len(times)]
    if not timed:
        return _empty("None of the chosen arms has measured blocks.")
    figure = Figure(figsize=(8, 1.45 + 0.62 * len(timed)))
    axes = figure.add_subplot()
    heights = rows(axes, [name for name, _ in timed])
    factor, unit = in_unit(max(float(np.median(times)) for _, times in timed))
    for k, (height, (_, times)) in enumerate(zip(heights, timed, strict=True)):
        paint = {"color": ink(k)}
        axes.boxplot(
            [times * factor], positions=[height], widths=0.62, orientation="horizontal", showfliers=False,
            manage_ticks=False, boxprops=paint, whiskerprops=paint, capprops=paint,
            medianprops={**paint, "linewidth": 2.2},
        )  # fmt: skip
        spread = np.linspace(-0.24, 0.24, len(times)) if len(times) > 1 else np.zeros(1)
        axes.plot(times * factor, height + spread, MARKERS[k % 6], markersize=3.6, alpha=0.75, color=ink(k))
    if log:
        log_axis(axes.xaxis, *axes.get_xlim())
    axes.set_xlabel(f"mean step time of a block ({unit}{', log axis' if log else ''})")
    caption(figure, f"{_origin(finding)} · a point is one block, later rounds higher")
    return figure


@_view
def trajectories(finding: Finding, arms: list[ArmResult], log: bool) -> Figure:
    """Curves over the guard's steps: loss, gradient norm, loss scale and whatever else an arm recorded."""
    # Series of single layers, such as gradient/layer4.conv1, are a heatmap's.
    recorded = {name for arm in arms for name, series in arm.trajectories.items() if series and "/" not in name}
    names = [n for n in SERIES_ORDER if n in recorded] + sorted(recorded - set(SERIES_ORDER))
    if not names:
        return _empty("None of the chosen arms recorded a curve.")
    figure = Figure(figsize=(8, 0.9 + 1.75 * len(names)))
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        drawn = [(k, arm) for k, arm in enumerate(arms) if arm.trajectories.get(name)]
        for k, arm in drawn:
            _curve(axes, np.array(arm.trajectories[name], dtype=float), arm.name, k)
        values = np.concatenate([np.array(arm.trajectories[name], dtype=float) for _, arm in drawn])
        if log and (values[np.isfinite(values)] > 0).all() and name != "accuracy":
            if name == "loss_scale":
                axes.set_yscale("log", base=2)
                axes.yaxis.set_major_formatter(lambda value, _: f"2^{math.log2(value):g}")
            else:
                log_axis(axes.yaxis, *axes.get_ylim())
        axes.set_title(name.replace("_", " "))
        axes.grid(True, axis="both")
    panels[-1].set_xlabel("optimizer step")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines() if line.get_label()[0] != "_"}
    columns = 4 if max(map(len, handles)) < 24 else 2
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=columns)
    caption(figure, f"{_origin(finding)} · first guard seed; × marks the last finite value before NaN or infinity")
    return figure


@_view
def prediction(finding: Finding, arms: list[ArmResult], log: bool) -> Figure:
    """What the planner said before the run (hollow) and what was measured (filled), with the error written beside.

    The axes are linear from zero, so that a gap looks as large as the error is; ``log`` is ignored.
    """
    names = {arm.name for arm in arms}
    checks = [p for p in finding.predictions if p.arm in names and p.measured is not None]
    if not checks:
        return _empty("Nothing was predicted for the chosen arms, or nothing measured.")
    quantities = [q for q in QUANTITIES if any(p.quantity == q for p in checks)]
    sizes = [sum(p.quantity == q for p in checks) for q in quantities]
    figure = Figure(figsize=(8, 1.0 + sum(0.62 + 0.42 * n for n in sizes)))
    panels = figure.subplots(len(quantities), 1, squeeze=False, height_ratios=[n + 0.4 for n in sizes])[:, 0]
    for axes, quantity in zip(panels, quantities, strict=True):
        _dumbbells(axes, quantity, [p for p in checks if p.quantity == quantity])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    methods = ", ".join(sorted({p.method for p in checks}))
    caption(figure, f"{_origin(finding)} · predicted by {methods}; error is predicted / measured − 1")
    return figure


def combine(findings: Sequence[Finding], *, allow_mixed: bool = False, log: bool = True, dark: bool = False) -> Figure:
    """Effects of several findings on one axis.

    Raises:
        Refused: their devices, baseline dtypes, power caps or tiers differ and ``allow_mixed`` was not given, for such
            ratios do not compare.
    """
    if not findings:
        raise Refused("findings to combine", [], allowed="one or more")
    for what, values in _settings_of(findings).items():
        if len(values) > 1 and not allow_mixed:
            raise Refused(
                f"one axis for findings of different {what}", sorted(values), allowed="findings that share it",
                fix="draw them apart, or pass allow_mixed=True and say so beside the figure",
            )  # fmt: skip
    shown = [(finding, effect) for finding in findings for effect in finding.effects]
    with styled(dark=dark):
        if not shown:
            return _empty("None of these findings measured an effect.")
        figure = Figure(figsize=(8, 1.35 + 0.48 * len(shown)))
        axes = figure.add_subplot()
        words = [next((d.decision for d in f.decisions if d.arm == e.arm), "no result") for f, e in shown]
        lines = [(f"{f.name}: {e.arm}", e, word, "completed") for (f, e), word in zip(shown, words, strict=True)]
        _forest(axes, lines, log=log)
        axes.set_xlabel("ratio, each to its own baseline" + (" (log axis)" if log else ""))
        mixed = [what for what, values in _settings_of(findings).items() if len(values) > 1]
        note = f" · MIXED: {', '.join(mixed)} differ" if mixed else ""
        caption(figure, " | ".join(dict.fromkeys(_origin(f) for f in findings)) + note)
        return figure


def _settings_of(findings: Sequence[Finding]) -> dict[str, set[str]]:
    return {
        "devices": {f.device for f in findings},
        "baseline dtypes": {_dtype(f) for f in findings},
        "power caps": {_power_cap(f) for f in findings},
        "tiers": {f.tier for f in findings},
    }


def _dtype(finding: Finding) -> str:
    return str(finding.arm(finding.baseline).settings.get("precision", finding.workload.get("precision", "not stated")))


def _power_cap(finding: Finding) -> str:
    watts = finding.device_facts.get("power_cap_watts")
    return "no power cap" if watts is None else f"{watts:g} W"


def _origin(finding: Finding) -> str:
    parts = [finding.tier, finding.device, f"baseline {_dtype(finding)}"]
    if _power_cap(finding) != "no power cap":
        parts.append(f"capped at {_power_cap(finding)}")
    if finding.synthetic_data:
        parts.append("synthetic data")
    return " · ".join(parts)


def metric_name(metric: str) -> str:
    return "samples per second" if metric == "samples_per_s" else metric.replace("_", " ")


def _chosen(finding: Finding, names: Sequence[str] | None) -> list[ArmResult]:
    known = [arm.name for arm in finding.arms]
    for name in names or ():
        if name not in known:
            raise Refused("arm", name, fix=nearest(name, known))
    return [arm for arm in finding.arms if names is None or arm.name in names]


def _empty(message: str) -> Figure:
    figure = Figure(figsize=(8, 1.2))
    figure.text(0.5, 0.5, message, ha="center", va="center")
    return figure


def _forest(axes: Axes, lines: Sequence[tuple[str, Effect | None, Any, str]], *, log: bool) -> None:
    heights = rows(axes, [name for name, *_ in lines])
    said = []
    for height, (_, effect, word, status) in zip(heights, lines, strict=True):
        if effect is None:
            said.append(status if status != "completed" else word)
            continue
        marker, k, filled = DECISION_MARKS[word]
        colour = ink(k)
        low, high = effect.interval.low, effect.interval.high
        axes.plot([low, high], [height, height], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([low, high], [height, height], "|", color=colour, markersize=9, markeredgewidth=2)
        face = colour if filled else axes.get_facecolor()
        axes.plot(
            effect.ratio,
            height,
            marker,
            color=colour,
            markerfacecolor=face,
            markersize=9,
            markeredgewidth=0 if filled else 1.6,
        )
        said.append(f"{tables.ratio(effect)}  {tables.bounds(effect.interval)}\n{word}")
    known = [e for _, e, *_ in lines if e]
    ratio_axis(axes, [v for e in known for v in (e.interval.low, e.ratio, e.interval.high)], log=log)
    right_labels(axes, heights, said)


def _curve(axes: Axes, values: np.ndarray, name: str, k: int) -> None:
    steps = np.arange(1, len(values) + 1)
    finite = np.isfinite(values)
    shown = np.where(finite, values, np.nan)
    every = max(len(values) // 8, 1)
    axes.plot(
        steps, shown, color=ink(k), linestyle=LINES[k % len(LINES)], marker=MARKERS[k % 6],
        markevery=(every // 2, every), markersize=4, label=label(name, 40),
    )  # fmt: skip
    ends = np.flatnonzero(finite[:-1] & ~finite[1:])
    axes.plot(steps[ends], values[ends], "x", color=ink(k), markersize=9, markeredgewidth=2)


def _dumbbells(axes: Axes, quantity: str, checks: list[PredictionCheck]) -> None:
    heights = rows(axes, [p.arm for p in checks])
    values = np.array([[p.predicted, p.measured] for p in checks], dtype=float)
    factor, unit = 1.0, ""
    if quantity == "step_time":
        factor, unit = in_unit(float(np.nanmax(values[:, 1])))
    elif quantity == "peak_memory_bytes":
        factor, unit = 2.0**-30, "GiB"
    values = values * factor
    axes.hlines(heights, values.min(axis=1), values.max(axis=1), color=ink(5), linewidth=1.5)
    axes.plot(
        values[:, 0],
        heights,
        "D",
        color=ink(1),
        markerfacecolor=axes.get_facecolor(),
        markeredgewidth=1.6,
        label="predicted",
    )
    axes.plot(values[:, 1], heights, "o", color=ink(0), label="measured")
    axes.set_xlim(0, float(np.nanmax(values)) * 1.06)
    axes.set_title(QUANTITIES[quantity] + (f" ({unit})" if unit else ""))
    right_labels(axes, heights, ["" if p.error is None else f"{p.error:+.0%}".replace("-", "−") for p in checks])
