"""The bubble rates of Zero Bubble Pipeline Parallelism (ICLR 2024, Table 5), simulated from the times of its Table 6."""

import csv
from pathlib import Path
from typing import Any

from workbench.parallel.schedules import schedule_table
from workbench.planner.pipeline import simulate

ROWS = list(csv.DictReader((Path(__file__).parents[1] / "data" / "pipeline_bubbles.csv").open()))
CHUNKS = {"GPT 1.5B": 3, "GPT 6.2B": 4}
"""Of interleaved 1F1B, per device: the paper does not say; these are the ones that its bubbles fit."""


def simulated(row: dict[str, str], kept: float | None = None) -> float:
    """The row's bubble rate in the paper's definition; ``kept`` of an activation is held from I until W, by default its share."""
    name = row["schedule"].replace(" ", "-")
    chunks = CHUNKS[row["model"]] if name == "interleaved-1f1b" else 1
    forward, backward_input, backward_weight, transfer = (float(row[k]) for k in ("f_ms", "b_ms", "w_ms", "comm_ms"))
    times = (forward / chunks, backward_input / chunks, backward_weight / chunks)
    table = schedule_table(
        name, int(row["pp"]), int(row["num_microbatches"]), chunks if chunks > 1 else None,
        times=times, transfer=transfer, kept_for_weights=kept_for_weights(row) if kept is None else kept,
    )  # fmt: skip
    return simulate(table, times, transfer).span_bubble_fraction


def kept_for_weights(row: dict[str, str]) -> float:
    """Share of a layer's activations that only W still needs: 32·s·b·h of s·b·h·(34 + 5·a·s/h) bytes, as the paper counts."""
    heads, tokens, width = int(row["heads"]), int(row["seq_len"]), int(row["hidden"])
    return 32 / (34 + 5 * heads * tokens / width)


def error_table() -> list[dict[str, Any]]:
    rows = []
    for row in ROWS:
        published, ours = float(row["bubble_fraction"]), simulated(row)
        rows.append(
            {
                "model": row["model"],
                "ranks": int(row["pp"]),
                "microbatches": int(row["num_microbatches"]),
                "schedule": row["schedule"],
                "published": published,
                "simulated": round(ours, 5),
                "error": round(ours - published, 5),
            }
        )
    return rows
