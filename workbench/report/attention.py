"""Attention patterns: time and memory over length, what compression means, and whether the models still learn."""

import base64
import math

import numpy as np
from IPython.display import HTML, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.data.sources import check_source
from workbench.experiment.ablation import Ablation
from workbench.experiment.attention import (
    PatternRecords,
    fitted_exponent,
    is_attention,
    pattern_records,
    predicted_density,
)
from workbench.experiment.finding import Finding
from workbench.models.config import vit_config
from workbench.planner.attention import attention_flops, claimed_mebibytes, fused_bytes, score_bytes
from workbench.planner.params import num_parameters
from workbench.report import tables
from workbench.report.style import LINES, MARKERS, caption, ink, log_axis, render, styled
from workbench.report.tables import NONE, Badge, Table

CLAIMED_SHARE = 0.85
"""The case study's compression, of what it does not say."""


def show_pattern_prediction(ablation: Ablation) -> None:
    """By formula, before anything runs: each pattern's density and FLOPs at the greatest length, and the power of n between."""
    shape = ablation.baseline.task_args
    lengths = np.array(shape["lengths"], dtype=float)
    rows = []
    for arm in ablation.arms:
        densities = np.array([predicted_density(arm, int(n)) for n in lengths])
        flops = attention_flops(shape["batch"], shape["heads"], int(lengths[-1]), shape["head_dim"], densities[-1])
        power = fitted_exponent(lengths[-4:], lengths[-4:] ** 2 * densities[-4:]).value
        rows.append(
            [arm.name, f"{densities[-1]:.3g}", f"{flops / 1e9:.3g}", f"{power:.2f}", f"{1 / densities[-1]:.1f}×"]
        )
    headers = ["pattern", f"density at {lengths[-1]:.0f}", "GFLOP, both passes", "work ∝ n^…", "faster at most"]
    display(HTML(Table(headers, rows, frozenset({1, 2, 3, 4})).html()))


def show_attention(finding: Finding) -> None:
    """The figure, and its numbers as tables: memory against formulas, then every pattern."""
    data = base64.b64encode(render(attention_figure(finding))).decode()
    alt = "Time and memory of attention over length, what each pattern saves, and validation accuracy of the models"
    image = f'<img src="data:image/png;base64,{data}" alt="{alt}" width="900" style="max-width: 100%">'
    display(HTML(image + memory_table(finding).html() + pattern_table(finding).html()))


def measured_patterns(finding: Finding) -> list[PatternRecords]:
    """Of the arms that passed the gate, the baseline first."""
    return [pattern_records(arm) for arm in finding.arms if is_attention(arm)]


def memory_table(finding: Finding) -> Table:
    """What dense attention keeps for its backward pass: by the case study's formula, by ours, and measured."""
    shape, params = _shape(finding), num_params(finding)
    batch, heads, head_dim, size = shape
    dense = pattern_records(finding.arm(finding.baseline))
    rows = []
    for n, eager, fused in zip(map(int, dense.lengths), dense.eager_kept, dense.kept, strict=True):
        by_scores, by_rows = score_bytes(batch, heads, n, size), fused_bytes(batch, heads, n, head_dim, size)
        rows.append([
            str(n), tables.size(claimed_mebibytes(n, heads, params) * 2**20), tables.size(by_scores), _size(eager),
            _error(by_scores, eager), tables.size(by_rows), _size(fused), _error(by_rows, fused),
        ])  # fmt: skip
    headers = ["tokens", "case study's formula", "scores, b·h·n²·bytes", "measured", "error", "fused: output and a row's sum",
               "measured", "error"]  # fmt: skip
    return Table(headers, rows, frozenset(range(8)))


def pattern_table(finding: Finding) -> Table:
    """At the greatest length, pattern by pattern: three meanings of compression, growth, error, and the models' accuracy."""
    guards = {g.arm: g for g in finding.guards}
    found = {r.name: r for r in measured_patterns(finding)}
    dense = found[finding.baseline]
    rows = []
    for arm in finding.arms:
        r = found.get(arm.name)
        if r is None:
            rows.append([arm.name, *[NONE] * 7, Badge(arm.status)])
            continue
        shares = [
            f"{100 * s:.{digits}f} %".replace("-", "−") for s, digits in zip(savings(r, dense), (3, 1, 1), strict=True)
        ]
        gated = np.flatnonzero(np.isfinite(r.error))
        error = (
            f"{r.error[gated[-1]]:.1e} ({r.error[gated[-1]] / r.dense_error[gated[-1]]:.1f}×)" if len(gated) else NONE
        )
        accuracies = [e["accuracy"] for e in arm.evaluations]
        accuracy = f"{np.mean(accuracies):.3f}" if accuracies else NONE
        state = Badge(guards[arm.name].state) if arm.name in guards else NONE
        rows.append([arm.name, *shares, str(r.exponent()), f"{r.work_exponent():.2f}", error, accuracy, state])
    headers = ["pattern", "mask bytes saved", "scores saved", "time saved", "time ∝ n^…", "scores ∝ n^…",
               "worst error (of dense's)", "ViT accuracy", "guard"]  # fmt: skip
    return Table(headers, rows, frozenset(range(1, 8)))


def savings(r: PatternRecords, dense: PatternRecords) -> tuple[float, float, float]:
    """Shares saved at the greatest length: of stored mask bytes, of scores computed, of time."""
    return (
        1 - r.csr_bytes[-1] / r.mask_bytes[-1],
        1 - r.density[-1],
        1 - r.seconds[-1] / dense.seconds[-1],
    )


def attention_figure(finding: Finding, *, dark: bool = False) -> Figure:
    """Four panels: time and kept bytes over length, three meanings of compression, accuracy of every seed."""
    patterns = measured_patterns(finding)
    with styled(dark=dark):
        figure = Figure(figsize=(10.5, 8.2), layout="constrained")
        (time, memory), (saved, learned) = figure.subplots(2, 2)
        _time(time, patterns)
        _memory(memory, finding, patterns)
        _savings(saved, patterns)
        _accuracy(learned, finding)
        figure.legend(*time.get_legend_handles_labels(), loc="outside upper left", ncols=4)
        batch, heads, head_dim, size = _shape(finding)
        shape = f"batch {batch}, {heads} heads of {head_dim}, {8 * size}-bit"
        caption(
            figure,
            f"{finding.tier} · {finding.device} · {shape} · thin lines: time = c·n^p fitted to the longest lengths",
        )
        return figure


def _time(axes: Axes, patterns: list[PatternRecords]) -> None:
    for k, r in enumerate(patterns):
        label = f"{r.name}, ∝ n^{r.exponent().value:.2f}"
        axes.plot(r.lengths, 1e3 * r.seconds, MARKERS[k % 6], color=ink(k), label=label, markersize=6)
        power, ends = r.exponent().value, r.lengths[-4:]
        scale = np.exp(np.mean(np.log(r.seconds[-4:]) - power * np.log(ends)))
        axes.plot(
            ends,
            1e3 * scale * ends.astype(float) ** power,
            linestyle=LINES[k % len(LINES)],
            color=ink(k),
            linewidth=1.2,
        )
    _lengths(axes, patterns[0].lengths)
    _decades(axes, 1e3 * np.concatenate([r.seconds for r in patterns]))
    axes.set(title="Time of both passes", ylabel="ms")


def _memory(axes: Axes, finding: Finding, patterns: list[PatternRecords]) -> None:
    batch, heads, _, size = _shape(finding)
    dense, mib = patterns[0], 2**20
    scores = np.array([score_bytes(batch, heads, int(n), size) for n in dense.lengths])
    axes.plot(dense.lengths, scores / mib, ":", color=ink(5), label="b·h·n²·bytes, by formula")
    axes.plot(dense.lengths, dense.eager_kept / mib, "*", color=ink(5), markersize=10, label="scores written, measured")
    for k, r in enumerate(patterns):
        axes.plot(r.lengths, r.kept / mib, MARKERS[k % 6], linestyle="-", color=ink(k), linewidth=1, markersize=5)
    _lengths(axes, dense.lengths)
    _decades(axes, np.concatenate([scores, *(r.kept for r in patterns)]) / mib)
    axes.set(title="Kept for the backward pass", ylabel="MiB")
    axes.legend(loc="upper left", fontsize=8.5)


def _lengths(axes: Axes, lengths: np.ndarray) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.grid(True, axis="both")


def _decades(axes: Axes, values: np.ndarray) -> None:
    low, high = values.min() / 1.5, values.max() * 1.5
    log_axis(axes.yaxis, low, high)
    axes.set_ylim(low, high)


def _savings(axes: Axes, patterns: list[PatternRecords]) -> None:
    dense, sparse = patterns[0], patterns[1:]
    heights = np.arange(len(sparse))[::-1].astype(float)
    for k, (kind, hatch) in enumerate([("mask bytes", ""), ("scores", "///"), ("time", "...")]):
        values = [100 * savings(r, dense)[k] for r in sparse]
        axes.barh(heights + 0.25 - 0.25 * k, values, 0.23, label=kind, color=ink(k), hatch=hatch,
                  edgecolor=axes.get_facecolor())  # fmt: skip
    axes.axvline(100 * CLAIMED_SHARE, color=ink(3), linestyle="--", linewidth=1.3)
    axes.set_yticks(heights, [r.name for r in sparse])
    low = min([0.0, *(100 * savings(r, dense)[2] for r in sparse)])
    axes.set_xlim(max(low * 1.05, -110.0), 102)
    axes.axvline(0, color=axes.xaxis.label.get_color(), linewidth=0.8)
    axes.set_xlabel("saved against dense (%); dashed: the claimed 85 %")
    axes.set_title(f"What is saved at {dense.lengths[-1]} tokens")
    axes.legend(loc="upper left", fontsize=8.5, ncols=3, bbox_to_anchor=(0, -0.16))


def _accuracy(axes: Axes, finding: Finding) -> None:
    arms = [arm for arm in finding.arms if arm.evaluations]
    heights = np.arange(len(arms))[::-1]
    for k, (height, arm) in enumerate(zip(heights, arms, strict=True)):
        values = [e["accuracy"] for e in arm.evaluations]
        axes.plot(values, [height] * len(values), MARKERS[k % 6], color=ink(k), alpha=0.6, markersize=6)
        axes.plot([np.mean(values)] * 2, [height - 0.3, height + 0.3], color=ink(k), linewidth=2.4)
    if arms:
        mean, margin = float(np.mean([e["accuracy"] for e in arms[0].evaluations])), _margin(finding)
        if margin:
            axes.axvspan(mean - margin, mean + margin, color=ink(5), alpha=0.15, linewidth=0)
    axes.set_yticks(heights, [arm.name for arm in arms])
    axes.set_xlabel("accuracy, a point per seed; band: dense ± the margin")
    axes.set_title("Validation accuracy of the ViTs")


def _margin(finding: Finding) -> float | None:
    return next((g.margin for g in finding.guards if g.kind == "accuracy equivalence"), None)


def _shape(finding: Finding) -> tuple[int, int, int, int]:
    """Batch, heads, head_dim and bytes per value at which the function was measured."""
    extra = finding.arm(finding.baseline).measurement
    assert extra is not None
    return tuple(int(extra.extra[name]) for name in ("batch", "heads", "head_dim", "value_bytes"))  # type: ignore[return-value]


def num_params(finding: Finding) -> float:
    """Of the trained ViT: what the case study's formula asks for."""
    train, info = finding.workload, check_source(finding.workload["data"])
    shape = {"num_classes": info.num_classes, "in_channels": info.image_shape[0], "image_size": info.image_shape[1]}
    return num_parameters(vit_config(train["model"], **shape, **train["model_args"]))


def _size(value: float) -> str:
    return NONE if math.isnan(value) else tables.size(value)


def _error(predicted: float, measured: float) -> str:
    return NONE if math.isnan(measured) else f"{predicted / measured - 1:+.1%}".replace("-", "−")
