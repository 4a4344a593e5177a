"""The simulator against published bubble rates, and how fast it is.

    PYTHONPATH=. python tests/benchmarks/bench_bubbles.py

Writes the table of errors to ``results/bubbles.json``; its tier is simulated, against cited. The times are this machine's:
1,000 configurations of 16 ranks and 64 micro-batches, each with its own pass times, a new table for every tenth.
"""

import json
import time
from pathlib import Path

import numpy as np

from tests.planner.published_bubbles import ROWS, error_table
from workbench.parallel.schedules import NAMES, num_chunks, schedule_table
from workbench.parallel.zero_bubble import zero_bubble_table
from workbench.planner.pipeline import compile_table, makespans, simulate

OUT = Path(__file__).parent / "results" / "bubbles.json"
RANKS, MICROBATCHES, CONFIGURATIONS = 16, 64, 1000


def main() -> None:
    table = error_table()
    for row in table:
        print(
            f"{row['model']:9} m={row['microbatches']:<3} {row['schedule']:17} published {row['published']:.4f}  "
            f"simulated {row['simulated']:.4f}  error {row['error']:+.4f}"
        )
    worst = max(abs(row["error"]) for row in table)
    print(f"largest error of {len(table)}: {worst:.4f}")
    result = {
        "source": f"{ROWS[0]['source']}, {ROWS[0]['table_or_figure']}",
        "url": ROWS[0]["url"],
        "command": "python tests/benchmarks/bench_bubbles.py",
        "definition": "(cost - m(F+I+W)) / cost, cost: the longest time from a rank's first pass to the end of its last",
        "tier": "simulated",
        "largest_error": worst,
        "rows": table,
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    _speed()


def _speed() -> None:
    rng = np.random.default_rng(0)
    seconds = {}
    for name in NAMES:
        stages = RANKS * num_chunks(name)
        began = time.perf_counter()
        for k in range(CONFIGURATIONS):
            if k % 10 == 0:  # ten sets of times to a table
                compile_table.cache_clear()
                zero_bubble_table.cache_clear()
                table = compile_table(schedule_table(name, RANKS, MICROBATCHES))
            simulate(table, tuple(rng.uniform(0.5, 1.5, (3, stages)).tolist()), 0.1)
        seconds[name] = time.perf_counter() - began
    for name, spent in seconds.items():
        print(f"{CONFIGURATIONS} simulations of {name:17} {spent:6.2f} s")
    compiled = compile_table(schedule_table("1f1b", RANKS, MICROBATCHES))
    began = time.perf_counter()
    makespans(compiled, rng.uniform(0.5, 1.5, (3, RANKS, CONFIGURATIONS)), 0.1)
    print(f"{CONFIGURATIONS} makespans of one 1f1b table, at once {time.perf_counter() - began:6.2f} s")


if __name__ == "__main__":
    main()
