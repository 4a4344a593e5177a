"""Runs killed at random moments, and many runs at once: is every record true, is every process gone?

    python -m tests.benchmarks.bench_runs [--kills 30] [--at-once 24] [--seed 0] [--out FILE]

Each killed run loses its runner, its executing process or its kernel to SIGKILL between 0 and 6 seconds after it was started; the
notebook takes about 4. Expected: no untrue status, no process left, and every other record readable. Takes about 5 minutes.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.batch.notebooks import write_notebook
from workbench.batch.processes import processes_of
from workbench.records.provenance import collect
from workbench.records.query import read, scan

ROOT = Path(__file__).parents[2]
PARTS = {"runner": "run", "executor": "workbench.batch.execute", "kernel": "ipykernel_launcher"}
SETTLE_S = 15
CELL = "import time\nfor i in range(10):\n    print(i, flush=True)\n    time.sleep(0.2)"


def begin(notebook: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "workbench.cli", "run", str(notebook), "--out", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def strike(runner: subprocess.Popen, folder: Path, part: str) -> bool:
    """Kill one part of a run; False if it is not there at this moment."""
    if part == "runner":
        found = [runner] if runner.poll() is None else []
    else:
        found = [p for p in processes_of(folder) if PARTS[part] in p.cmdline()]
    for process in found:
        process.send_signal(signal.SIGKILL)
    return bool(found)


def killed_run(notebook: Path, folder: Path, part: str, after_s: float) -> dict[str, Any]:
    runner = begin(notebook, folder)
    time.sleep(after_s)
    hit = strike(runner, folder, part)
    code = runner.wait(120)
    deadline = time.monotonic() + SETTLE_S
    while (left := list(processes_of(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    status = read(folder).status if folder.exists() else "none"
    return {"part": part, "after_s": after_s, "hit": hit, "exit": code, "status": status, "left": len(left)} | {
        "true": is_true(part, hit, status, code) and not left
    }


def is_true(part: str, hit: bool, status: str, code: int) -> bool:
    """Whether a status may be said of a run that lost this part. One that had finished its work is completed."""
    if not hit:
        return (status, code) == ("completed", 0)
    if part == "runner":
        return status in ("none", "broken", "killed", "completed")
    return (status, code) in (("killed", 137), ("completed", 0))


def at_once(notebook: Path, root: Path, number: int) -> dict[str, Any]:
    began = time.monotonic()
    runners = [begin(notebook, root / f"at-once-{i:02}") for i in range(number)]
    codes = [runner.wait(600) for runner in runners]
    statuses = Counter(read(root / f"at-once-{i:02}").status for i in range(number))
    return {
        "number": number,
        "seconds": time.monotonic() - began,
        "exits": dict(Counter(codes)),
        "statuses": dict(statuses),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        root, notebook = Path(scratch) / "runs", write_notebook(Path(scratch) / "n.ipynb", CELL)
        rows = []
        print(f"{'killed':>9} {'after':>6} {'there':>6} {'exit':>5} {'status':>10} {'left':>5}  true")
        for i in range(options.kills):
            row = killed_run(notebook, root / f"killed-{i:02}", draw.choice(list(PARTS)), draw.uniform(0, 6))
            rows.append(row)
            print(
                f"{row['part']:>9} {row['after_s']:6.2f} {row['hit']!s:>6} {row['exit']:>5} {row['status']:>10} "
                f"{row['left']:>5}  {'yes' if row['true'] else 'NO'}",
                flush=True,
            )
        many = at_once(notebook, root, options.at_once)
        readable = len(scan(root))
    untrue = sum(not row["true"] for row in rows) + (many["exits"] != {0: options.at_once})
    print(
        f"{options.at_once} at once: {many['statuses']} in {many['seconds']:.0f} s; {readable} records read; {untrue} untrue"
    )
    if options.out:
        result = {"kills": rows, "at_once": many, "cpus": psutil.cpu_count(), "provenance": collect()}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if untrue else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
