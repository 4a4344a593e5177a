"""What ``workbench schedule`` answers: one pipeline schedule, simulated with equal stages."""

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from workbench.errors import Refused
from workbench.parallel.schedules import num_chunks, schedule_table
from workbench.planner.pipeline import Simulation, check_time, closed_form, simulate

MOST_PASSES = 2_000_000
"""Of a chunk over a micro-batch; beyond it memory and minutes are gone before an answer comes."""
GANTT_KINDS = (".svg", ".png")


def simulate_schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None, times: tuple[float, float, float], transfer: float
) -> Simulation:
    """Equal stages. ``times`` are a rank's, and each of its chunks takes its part of them.

    Raises:
        Refused: the schedule is not known, does not fit, or a time is none.
    """
    v = num_chunks(name, chunks)
    for what, value in zip(
        ("forward", "backward-input", "backward-weight", "transfer"), (*times, transfer), strict=True
    ):
        check_time(what, value)
    if not any(times):
        raise Refused("times of all passes", 0, allowed="one above 0 at least")
    if ranks * v * microbatches * 2 > MOST_PASSES:
        fix = "take fewer micro-batches or stages"
        raise Refused("passes to simulate", ranks * v * microbatches * 2, allowed=f"{MOST_PASSES} at most", fix=fix)
    forward, backward_input, backward_weight = (t / v for t in times)
    per_chunk = (forward, backward_input, backward_weight)
    return simulate(
        schedule_table(name, ranks, microbatches, chunks, times=per_chunk, transfer=transfer), per_chunk, transfer
    )


def summary(name: str, run: Simulation, microbatches: int) -> dict[str, Any]:
    """The answer as JSON. ``peak_in_flight`` counts activations of a whole stage, one number per stage (rank)."""
    ranks = len(run.table)
    v = len(run.peak_in_flight) // ranks
    formula = closed_form(name, ranks, microbatches, v)
    peaks = [held // v if held % v == 0 else held / v for held in run.peak_in_flight_of_rank]
    per_stage = zip(run.busy, run.waiting, run.transfer_wait, run.drain, run.bubble_of_rank, strict=True)
    names = ("busy", "waiting", "transfer_wait", "drain", "bubble_fraction")
    return {
        "schedule": name,
        "stages": ranks,
        "chunks": v,
        "microbatches": microbatches,
        "tier": "simulated",
        "bubble_fraction": run.bubble_fraction,
        "span_bubble_fraction": run.span_bubble_fraction,
        "theory": {"formula": formula[0], "bubble_fraction": formula[1]} if formula else None,
        "makespan": run.makespan,
        "peak_in_flight": peaks,
        "peak_in_flight_of_chunks": list(run.peak_in_flight),
        "per_stage": [dict(zip(names, values, strict=True)) for values in per_stage],
    }


def summary_text(answer: dict[str, Any]) -> Group:
    """Totals, a row per stage, and what the formula says."""
    head = (
        f"{answer['schedule']} on {answer['stages']} stages, {answer['microbatches']} micro-batches: "
        f"bubble {answer['bubble_fraction']:.1%}, makespan {answer['makespan']:.6g}"
    )
    table = Table("stage", box=None, pad_edge=False, header_style="bold")
    for column in ("busy", "waiting", "transfer", "drain", "bubble", "in flight"):
        table.add_column(column, justify="right")
    for k, (row, held) in enumerate(zip(answer["per_stage"], answer["peak_in_flight"], strict=True)):
        times = (row[name] for name in ("busy", "waiting", "transfer_wait", "drain"))
        table.add_row(str(k), *(f"{t:.6g}" for t in times), f"{row['bubble_fraction']:.1%}", f"{held:g}")
    notes = ["simulated; in flight: most micro-batches whose activations a stage holds at once"]
    if theory := answer["theory"]:
        notes.append(f"by formula, with free transfers: {theory['formula']} = {theory['bubble_fraction']:.1%}")
    if answer["span_bubble_fraction"] < answer["bubble_fraction"] - 1e-9:
        notes.append(
            f"from each stage's own start to its end (the rate in Zero Bubble): {answer['span_bubble_fraction']:.1%}"
        )
    return Group(Text(head), table, Text("\n".join(notes), style="dim"))


def check_gantt(path: Path) -> None:
    """Refuses a file that cannot be written or is no picture, before anything is simulated."""
    if path.suffix.lower() not in GANTT_KINDS:
        raise Refused("--gantt", str(path), allowed="a name that ends in " + " or ".join(GANTT_KINDS))
    if path.is_dir() or not path.parent.is_dir():
        raise Refused("--gantt", str(path), allowed="a file in a folder that exists", fix=f"make {path.parent}/ first")


def write_gantt(path: Path, run: Simulation, answer: dict[str, Any], note: str) -> None:
    from workbench.records.atomic import write_bytes
    from workbench.report.pipeline import bars_of, gantt_figure
    from workbench.report.style import render

    title = f"{answer['schedule']}, {answer['stages']} stages, {answer['microbatches']} micro-batches"
    title += f": bubble {answer['bubble_fraction']:.1%}"
    data = render(gantt_figure(bars_of(run), title, note), "svg" if path.suffix.lower() == ".svg" else "png")
    try:
        write_bytes(path, data)
    except OSError as error:
        raise Refused("--gantt", str(path), allowed="a file that can be written", fix=str(error.strerror)) from error
