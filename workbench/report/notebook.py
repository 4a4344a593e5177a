"""What the notebooks show besides a finding: the machine, the prediction before a run, a ladder's parts, the claims ledger."""

import base64
from collections.abc import Sequence

from IPython.display import HTML, display
from matplotlib.figure import Figure

from workbench.experiment.ablation import Ablation
from workbench.experiment.combine import Contribution, product_of_claims
from workbench.experiment.finding import Finding
from workbench.hardware.facts import DeviceFacts
from workbench.records.query import finding, scan
from workbench.records.run import current_root
from workbench.report import tables
from workbench.report.claims import load_claims
from workbench.report.style import MARKERS, ratio_axis, render, styled
from workbench.report.tables import NONE, Badge, Table


def show_machine(facts: DeviceFacts) -> None:
    """The device's name, memory and rates, each with where the figure comes from."""
    rows = [["device", facts.name, ""], ["memory", tables.size(facts.memory_bytes), "usable by this process"]]
    rows += [
        [f"{name} matrix product", f"{rate / 1e12:.3g} TFLOP/s", facts.peak_source]
        for name, rate in facts.peak_flops.items()
    ]
    rows.append(["memory bandwidth", f"{facts.memory_bandwidth / 1e9:.3g} GB/s", facts.bandwidth_source])
    rows.append(["one small operator", tables.seconds(facts.op_overhead_s), "measured"])
    if facts.power_cap_watts:
        rows.append(["power cap", f"{facts.power_cap_watts:.0f} W", "driver"])
    display(HTML(Table(["", "found", "source"], rows, frozenset({1})).html()))


def show_prediction(ablation: Ablation) -> None:
    """What the planner expects of each arm, before anything has run."""
    display(HTML(tables.predictions_before(ablation.predict()).html()))


def show_contributions(parts: Sequence[Contribution], of: Finding) -> None:
    """Each option alone, left out and added, with the product of the single effects beside what all gave together."""
    if not parts:
        display(HTML("<p>No option completed in all the arms that its three views need.</p>"))
        return
    product, together = product_of_claims(of, [p.option for p in parts])
    rows = [[p.option, *(f"{r:.2f}× {tables.bounds(i)}" for r, i in _views(p))] for p in parts] + [
        ["product of the options alone", f"{product:.2f}×", "", ""],
        ["all together, measured", f"{together:.2f}×", "", ""],
    ]
    table = Table(["option", "alone", "last (lost when left out)", "added in order"], rows, frozenset({1, 2, 3}))
    data = base64.b64encode(render(contributions_figure(parts))).decode()
    alt = "Ratio of each option alone, left out and added in order, with intervals"
    display(HTML(f'<img src="data:image/png;base64,{data}" alt="{alt}" width="768">' + table.html()))


def contributions_figure(parts: Sequence[Contribution], *, dark: bool = False) -> Figure:
    """One row per option, one marker per view, on a log ratio axis."""
    with styled(dark=dark):
        figure = Figure(figsize=(7.6, 1.2 + 0.6 * len(parts)), layout="constrained")
        axes = figure.subplots()
        for k, name in enumerate(["alone", "last", "added in order"]):
            points = [_views(p)[k] for p in parts]
            heights = [row + 0.22 * (k - 1) for row in range(len(parts))]
            ratios = [r for r, _ in points]
            errors = [[r - i.low for r, i in points], [i.high - r for r, i in points]]
            axes.errorbar(ratios, heights, xerr=errors, fmt=MARKERS[k], label=name, capsize=3)
        axes.set_yticks(range(len(parts)), [p.option for p in parts])
        axes.invert_yaxis()
        ratio_axis(axes)
        axes.legend(loc="best")
        return figure


def show_claims() -> None:
    """The claims ledger; beside each claim, the findings among this run's neighbours that speak to it."""
    speaking: dict[str, set[str]] = {}
    for record in scan(current_root()):
        for claim in finding(record.dir).get("claims", []):
            speaking.setdefault(claim, set()).add(record.notebook)
    rows = [
        [c.id, c.stage, c.claim, Badge(c.verdict), ", ".join(sorted(speaking.get(c.id, ()))) or NONE]
        for c in load_claims()
    ]
    display(HTML(Table(["claim", "stage", "what is claimed", "verdict", "findings here"], rows).html()))


def _views(p: Contribution) -> list[tuple[float, "tables.Interval"]]:
    return [(p.alone, p.alone_interval), (p.last, p.last_interval), (p.added, p.added_interval)]
