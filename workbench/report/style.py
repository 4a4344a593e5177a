"""How every figure looks, and how one becomes bytes. No pyplot: no figure stays open or shows twice."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from workbench.experiment.finding import DecisionWord

HERE = Path(__file__).parent
LINES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P"]
DECISION_MARKS: dict[DecisionWord, tuple[str, int, bool]] = {
    "adopt": ("o", 0, True),
    "reject": ("s", 1, True),
    "no effect beyond noise": ("o", 5, False),
    "void: guard failed": ("X", 3, True),
    "no result": ("d", 5, False),
}
"""Marker, colour and whether it is filled, by decision: shape tells them apart without colour."""


@contextmanager
def styled(*, dark: bool = False) -> Iterator[None]:
    sheets = [HERE / "workbench.mplstyle", *([HERE / "dark.mplstyle"] if dark else [])]
    with matplotlib.style.context([str(sheet) for sheet in sheets]):
        yield


def ink(k: int) -> str:
    """The k-th colour of the style in force. (A line looks ``"C0"`` up only when drawn, after the style has ended.)"""
    colours: list[str] = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return colours[k % len(colours)]


def render(figure: Figure, kind: Literal["png", "svg"] = "png") -> bytes:
    """The figure's bytes: PNG at twice the screen's resolution, or SVG with letters as paths, which needs no font."""
    target = io.BytesIO()
    options = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 192}
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "workbench"}):
        # A name may hold signs that the font lacks; they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(target, format=kind, **options)
    return target.getvalue()


def label(name: str, width: int = 26) -> str:
    """A name as an axis label: at most two lines, the rest cut."""
    lines = textwrap.wrap(" ".join(name.split()), width, max_lines=2, placeholder="…")
    return "\n".join(lines) or "(unnamed)"


def rows(axes: Axes, names: list[str]) -> np.ndarray:
    """One row per name, the first on top; returns their heights on the axis."""
    heights = np.arange(len(names))[::-1].astype(float)
    axes.set_yticks(heights, [label(name) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    return heights


def log_axis(axis: Axis, low: float, high: float, unit: str = "") -> None:
    """A logarithmic axis with ticks at round values in plain figures, also where it spans much less than a decade."""
    (axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale)("log")
    round_values = LogLocator(subs=(1, 2, 5)) if high / low > 5 else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(FixedLocator([t for t in round_values.tick_values(low, high) if low <= t <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}{unit}"))


def ratio_axis(axes: Axes, values: Iterable[float] | None = None, *, log: bool = True) -> None:
    """A horizontal axis of ratios that shows ``values``, by default all that was drawn, and always 1."""
    shown = [v for v in (axes.dataLim.intervalx if values is None else values) if math.isfinite(v) and v > 0]
    low, high = min([*shown, 1.0]), max([*shown, 1.0])
    pad = (high / low) ** 0.08 if high > low else 1.05
    low, high = low / pad, high * pad
    if log:
        log_axis(axes.xaxis, low, high, "×")
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}×"))
    axes.set_xlim(low, high)
    axes.axvline(1.0, color=matplotlib.rcParams["text.color"], linewidth=1.0, zorder=1)


def right_labels(axes: Axes, heights: np.ndarray, texts: list[str]) -> None:
    """Text at the right end of each row."""
    right = axes.twinx()
    right.set_yticks(heights, texts, fontsize=9)
    right.set_ylim(axes.get_ylim())
    right.grid(False)
    right.spines[["left", "right"]].set_visible(False)


def caption(figure: Figure, text: str) -> None:
    """A line under the figure, at its left edge: what a reader must know to quote it."""
    text = "\n".join(textwrap.wrap(" ".join(text.split()), 125, max_lines=3, placeholder="…"))
    figure.supxlabel(text, x=0.005, ha="left", fontsize=8.5, color=matplotlib.rcParams["xtick.color"])


def in_unit(seconds: float) -> tuple[float, str]:
    """Factor and unit in which a time of this size reads well."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return factor, unit
    return 1.0, "s"
