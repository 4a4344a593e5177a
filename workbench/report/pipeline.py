"""Gantt charts of pipelines, simulated and measured: a lane per rank, a bar per pass, readable without colour."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workbench.errors import Refused
from workbench.planner.pipeline import Simulation
from workbench.report.style import caption, ink, styled

WIDTH = 10.0
"""Of a figure, in inches."""
PASSES = {
    "F": ("F forward", 0, 0.25),
    "I": ("I backward, input", 1, 0.5),
    "B": ("B backward, whole", 1, 0.85),
    "W": ("W backward, weights", 2, 1.0),
}
"""Of each kind of pass: its name, colour, and how much of it over the page's: lighter and darker also in grey."""
CROWDED = 500
"""Bars per lane beyond which they have no outline, and are an image in an SVG too."""
CHUNK_HATCHES = ["", "//", "..", "xx"]


class Bar(NamedTuple):
    """A span of a rank's time. Kinds beside F, B, I and W, such as waits, are drawn low and count as idle."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


Spans = Iterable[Bar | tuple[int, str, int, int, float, float]]


def bars_of(run: Simulation) -> list[Bar]:
    """A simulation's passes."""
    rows = zip(run.table, run.start, run.end, strict=True)
    return [
        Bar(rank, *action, start, end)
        for rank, row in enumerate(rows)
        for action, start, end in zip(*row, strict=True)
    ]  # fmt: skip


def bubble_of(bars: Sequence[Bar]) -> float:
    """Idle over total, from the first bar's start to the last one's end over all ranks that have any."""
    span = max(b.end for b in bars) - min(b.start for b in bars)
    busy = sum(b.end - b.start for b in bars if b.kind in PASSES)
    return 1 - busy / (len({b.rank for b in bars}) * span) if span else 0.0


def gantt_figure(bars: Spans, title: str = "", note: str = "", *, unit: str = "", dark: bool = False) -> Figure:
    """One timeline.

    Args:
        bars: :class:`Bar` or tuples of the same six.
        note: the line under the figure; it should say whether this was measured or simulated, and on what.
        unit: of the times.
    """
    timeline = _timeline(bars)
    with styled(dark=dark):
        figure = Figure(figsize=(WIDTH, 1.5 + 0.34 * _num_ranks(timeline)))
        axes = figure.add_subplot()
        _lanes(axes, timeline, max(b.end for b in timeline))
        axes.set_title(title)
        axes.set_xlabel(f"time ({unit})" if unit else "time")
        _legend(figure, timeline)
        caption(figure, note)
        return figure


def contrast_figure(
    measured: Spans, simulated: Spans, title: str = "", note: str = "", *, unit: str = "", dark: bool = False
) -> Figure:
    """A measured timeline over the simulated one, on one time axis; both begin at 0, and a line marks where each ends."""
    timelines = {"measured": _timeline(measured), "simulated": _timeline(simulated)}
    ends = {name: max(b.end for b in bars) for name, bars in timelines.items()}
    with styled(dark=dark):
        lanes = sum(map(_num_ranks, timelines.values()))
        figure = Figure(figsize=(WIDTH, 2.3 + 0.34 * lanes))
        panels = figure.subplots(2, 1, sharex=True, height_ratios=[_num_ranks(bars) for bars in timelines.values()])
        for axes, (name, bars), line in zip(panels, timelines.items(), ("-", "--"), strict=True):
            _lanes(axes, bars, max(ends.values()))
            for other in panels:
                other.axvline(
                    ends[name], color=matplotlib.rcParams["text.color"], linestyle=line, linewidth=1.2, zorder=3
                )
            axes.set_title(
                f"{name}: ends at {ends[name]:.4g}{' ' + unit if unit else ''}, bubble {bubble_of(bars):.1%}"
            )
        panels[1].set_xlabel(f"time ({unit})" if unit else "time")
        figure.suptitle(title, x=0.005, ha="left", fontsize=11.5, fontweight="bold")
        _legend(figure, [*timelines["measured"], *timelines["simulated"]])
        caption(
            figure, f"{note} · solid line: end of the measured run, dashed: of the simulated one".removeprefix(" · ")
        )
        return figure


def _timeline(bars: Spans) -> list[Bar]:
    """As bars that begin at 0."""
    known = [Bar(*bar) for bar in bars]
    if not known:
        raise Refused("timeline", [], allowed="one bar or more")
    zero = min(b.start for b in known)
    return [b._replace(start=b.start - zero, end=b.end - zero) for b in known]


def _num_ranks(bars: Sequence[Bar]) -> int:
    return max(b.rank for b in bars) + 1


def _lanes(axes: Axes, bars: Sequence[Bar], until: float) -> None:
    ranks = _num_ranks(bars)
    axes.set_xlim(0, until * 1.005 or 1)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_ylabel("rank")
    axes.set_yticks(range(0, ranks, -(-ranks // 16)))
    chunks = _chunks(bars)
    groups: dict[tuple[str, int], list[Bar]] = {}
    for bar in bars:
        groups.setdefault((bar.kind, chunks[bar.rank, bar.stage] if bar.kind in PASSES else 0), []).append(bar)
    crowded = len(bars) > CROWDED * ranks
    for (kind, chunk), members in groups.items():
        colour, corners = _colour(kind), list(_corners(members, 0.86 if kind in PASSES else 0.2))
        filled = PolyCollection(
            corners, label=kind, facecolor=colour, edgecolor=_over(colour), hatch=CHUNK_HATCHES[chunk % 4], linewidth=0, zorder=2
        )  # fmt: skip
        filled.set_rasterized(crowded)
        axes.add_collection(filled, autolim=False)
        if not crowded:  # outlines of their own, for a hatch takes the colour of the edge
            face = matplotlib.rcParams["axes.facecolor"]
            axes.add_collection(
                PolyCollection(corners, facecolor="none", edgecolor=face, linewidth=0.5, zorder=2), autolim=False
            )
    _number(axes, bars, until)


def _corners(bars: Sequence[Bar], height: float) -> np.ndarray:
    """[bars, 4, 2]"""
    left, right, lane = np.array([(b.start, b.end, b.rank) for b in bars]).T
    top, bottom = lane - height / 2, lane + height / 2
    return np.stack(
        [np.stack(corner, -1) for corner in ((left, top), (right, top), (right, bottom), (left, bottom))], 1
    )


def _number(axes: Axes, bars: Sequence[Bar], until: float) -> None:
    """Micro-batches, all in one size, where bars are wide enough for it."""
    passes = [b for b in bars if b.kind in PASSES]
    if not passes:
        return
    points = 0.92 * WIDTH * 72 / (until or 1)
    digit = 0.68 * len(str(max(b.microbatch for b in passes)))
    size = min(8.0, float(np.median([b.end - b.start for b in passes])) * points / digit)
    for bar in passes:
        if size >= 4.5 and (bar.end - bar.start) * points >= 0.6 * size * len(str(bar.microbatch)):
            colour = _colour(bar.kind)
            axes.text(
                (bar.start + bar.end) / 2, bar.rank, str(bar.microbatch), size=size, ha="center", va="center_baseline",
                color=_over(colour), bbox={"boxstyle": "square,pad=0.08", "facecolor": colour, "linewidth": 0},
            )  # fmt: skip


def _legend(figure: Figure, bars: Sequence[Bar]) -> None:
    kinds = {b.kind for b in bars}
    handles = [Patch(facecolor=_colour(k), label=label) for k, (label, *_) in PASSES.items() if k in kinds]
    if kinds - PASSES.keys():
        handles.append(Patch(facecolor=_colour("other"), label=", ".join(sorted(kinds - PASSES.keys()))))
    for chunk in sorted(set(_chunks(bars).values()) - {0}):
        face = matplotlib.rcParams["axes.facecolor"]
        handles.append(
            Patch(
                facecolor=face,
                edgecolor=_over(to_rgb(face)),
                hatch=CHUNK_HATCHES[chunk % 4],
                label=f"chunk {chunk + 1}",
            )
        )
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))


def _chunks(bars: Iterable[Bar]) -> dict[tuple[int, int], int]:
    """Which of its rank's stages a stage is, the first being 0."""
    stages: dict[int, set[int]] = {}
    for bar in bars:
        if bar.kind in PASSES:
            stages.setdefault(bar.rank, set()).add(bar.stage)
    return {(rank, s): k for rank, held in stages.items() for k, s in enumerate(sorted(held))}


def _colour(kind: str) -> tuple[float, float, float]:
    _, k, share = PASSES.get(kind, ("", 5, 0.7))
    page, full = to_rgb(matplotlib.rcParams["axes.facecolor"]), to_rgb(ink(k))
    red, green, blue = (p + share * (f - p) for p, f in zip(page, full, strict=True))
    return red, green, blue


def _over(colour: Sequence[float]) -> str:
    """Black or white, whichever reads on it."""
    return "white" if np.dot(colour, (0.299, 0.587, 0.114)) < 0.55 else "black"
