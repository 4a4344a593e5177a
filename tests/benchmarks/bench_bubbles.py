"""The simulator against published bubble rates, and how fast it is.

    PYTHONPATH=. python tests/benchmarks/bench_bubbles.py

Writes the table of errors to ``results/bubbles.json``; its tier is simulated, against cited. Then times the simulator on this
machine, extrapolated from a tenth.
"""

import json
import time
from pathlib import Path

import numpy as np

from tests.planner.published_bubbles import ROWS, error_table, simulated
from workbench.parallel.schedules import NAMES, num_chunks, schedule_table
from workbench.parallel.zero_bubble import zero_bubble_table
from workbench.planner.pipeline import compile_table, makespans, simulate

OUT = Path(__file__).parent / "results" / "bubbles.json"
STAGES, MICROBATCHES, CONFIGURATIONS = 16, 64, 1000


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
        "zb_2p_with_all_activations_held_until_w": [
            {
                "model": r["model"],
                "microbatches": int(r["num_microbatches"]),
                "simulated": round(simulated(r, kept=1.0), 5),
            }
            for r in ROWS
            if r["schedule"] == "zb-2p"
        ],
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    _speed()


def _speed() -> None:
    rng = np.random.default_rng(0)
    print(
        f"seconds of this core for {CONFIGURATIONS} configurations of {STAGES} stages and {MICROBATCHES} micro-batches:"
    )
    for name in NAMES:
        ranks = STAGES // num_chunks(name)
        shared = compile_table(schedule_table(name, ranks, MICROBATCHES))
        tries = CONFIGURATIONS // 10
        times = rng.uniform(0.5, 1.5, (tries, 3, STAGES)).tolist()
        began = time.process_time()
        for forward, backward_input, backward_weight in times:
            simulate(shared, (forward, backward_input, backward_weight), 0.1)
        alone = time.process_time() - began
        began = time.process_time()
        for forward, backward_input, backward_weight in times:
            compile_table.cache_clear()
            zero_bubble_table.cache_clear()
            simulate(schedule_table(name, ranks, MICROBATCHES), (forward, backward_input, backward_weight), 0.1)
        with_table = time.process_time() - began
        scale = CONFIGURATIONS / tries
        print(f"{name:17} {scale * alone:6.2f} over one table  {scale * with_table:6.2f} each with a table of its own")
    at_once = rng.uniform(0.5, 1.5, (3, STAGES, CONFIGURATIONS))
    began = time.process_time()
    makespans(schedule_table("1f1b", STAGES, MICROBATCHES), at_once, 0.1)
    print(f"{'1f1b':17} {time.process_time() - began:6.2f} makespans alone, in one sweep")


if __name__ == "__main__":
    main()
