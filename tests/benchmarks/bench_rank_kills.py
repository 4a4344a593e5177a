"""One training, killed twenty times: does everything end, and is nothing lost but the steps since the last checkpoint?

    python -m tests.benchmarks.bench_rank_kills [--kills 20] [--ranks 4] [--seed 0] [--out FILE]

Gloo ranks train with a checkpoint every five steps. In turn, a random rank is sent SIGKILL at its start, in a forward, in
a collective, while a checkpoint is written. Expected each time: all processes end within 30 seconds, the rank is named, and the
next launch goes on from the newest checkpoint that was whole at the kill, or a newer one; at the end the weights are those of a
run that nobody killed, to the bit. Takes about 5 minutes on two idle cores.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.parallel.kills import LIMIT_S, ordeal
from workbench.records.provenance import collect


def summary(result: dict[str, Any]) -> dict[str, Any]:
    rounds = result["rounds"]
    ended = [r["ended_after_s"] for r in rounds]
    return {
        "kills": len(rounds),
        "good": sum(r["good"] for r in rounds),
        "same_weights": result["same_weights"],
        "limit_s": LIMIT_S,
        "slowest_end_s": max(ended),
        "median_end_s": statistics.median(ended),
        "most_steps_lost": max(r["steps_lost"] for r in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = ordeal(Path(root), options.kills, world=options.ranks, seed=options.seed)
    for row in result["rounds"]:
        print(row)
    said = summary(result)
    print(json.dumps(said, indent=1))
    if options.out:
        record = {
            "ranks": options.ranks,
            "seed": options.seed,
            "summary": said,
            "provenance": collect(),
            "rounds": result["rounds"],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(0 if said["good"] == said["kills"] and said["same_weights"] else 1)


if __name__ == "__main__":
    main()
