"""Peak memory foretold on fake tensors against the allocator's on a GPU: the same wrapped step, one rank of a fake world.

    python -m tests.benchmarks.bench_dryrun [--out FILE] [--smoke]

Every prediction is made in a process that sees no GPU; the measurement follows in a process of its own. Several are under way at
once, as many as fit the GPU together by prediction, for peaks do not depend on neighbours as times do. Cases that do not fit
alone are left out. At the end, claim C7: a model that takes about 58 GB unsharded, and eight ranks of FSDP.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
GB = 1e9


class Case(NamedTuple):
    model: str
    plan: str
    world: int
    batch: int


CONTEXT_BYTES = 10**9
"""Of a process on the device, outside the allocator."""


class Room:
    """Bytes of the device that measurements under way share."""

    def __init__(self, size: int) -> None:
        self.size, self._free, self._changed = size, size, Condition()

    @contextmanager
    def taking(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: size <= self._free)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


PLANS = ("ddp", "fsdp", "zero2", "hsdp", "offload", "recomputation")
C7 = [
    Case("vit-3b", "ddp", 1, 4),
    Case("vit-3b", "fsdp", 8, 4),
    Case("vit-3b", "hsdp", 8, 4),
    Case("vit-3b", "offload", 8, 4),
    Case("vit-3b", "recomputation", 8, 4),
    Case("vit-3b", "article", 8, 4),
]
"""Unsharded, and the claim's options one at a time. 16 bytes for each of 2.9 billion parameters are 47 GB, and a multi-tensor
AdamW takes 4 more for each while it updates: 58 GB."""


def cases(smoke: bool) -> list[Case]:
    if smoke:
        return [Case("vit-nano", plan, 4, 8) for plan in PLANS]
    small = [Case("vit-3b", plan, world, 32) for world in (8, 32) for plan in PLANS]
    large = [Case("vit-10b", plan, world, 8) for world in (8, 32) for plan in ("fsdp", "hsdp", "recomputation")]
    return small + large + C7


def dry_run(case: Case, *, on_gpu: bool) -> dict[str, Any]:
    """The result of one dry run in a process of its own, or why there is none."""
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.benchmarks.bench_dryrun", "--one", json.dumps([case, on_gpu])]
    environment = {**os.environ, **hidden, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def one(case: Case, on_gpu: bool) -> None:
    from workbench.parallel.dryrun import dry_run as run
    from workbench.parallel.plan import named_plan

    plan = named_plan(case.plan, case.world)
    method: Any = "allocator" if on_gpu else "fake tensors"
    result = run(case.model, plan, world=case.world, batch=case.batch, method=method).model_dump(mode="json")
    if on_gpu:
        import torch

        free, total = torch.cuda.mem_get_info()
        result["outside_bytes"] = total - free - torch.cuda.memory_reserved()
    print(json.dumps(result))


def compare(case: Case, room: Room | None) -> dict[str, Any]:
    """Predict a case and, if it fits, measure it."""
    predicted = dry_run(case, on_gpu=False)
    row: dict[str, Any] = {**case._asdict(), "predicted": predicted}
    if "failed" in predicted or not room:
        return row
    # A margin for a prediction that falls short; the allocator's cache is the larger part of it.
    needed = int(1.05 * predicted["reserved_bytes"]) + CONTEXT_BYTES
    if needed > room.size:
        return row | {"left out": "does not fit this GPU"}
    with room.taking(needed):
        measured = row["measured"] = dry_run(case, on_gpu=True)
    if "failed" not in measured:
        row["error"] = round(predicted["peak_bytes"] / measured["peak_bytes"] - 1, 4)
        row["error_reserved"] = round(predicted["reserved_bytes"] / measured["reserved_bytes"] - 1, 4)
    return row


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:8} {row['plan']:14} world {row['world']:2} batch {row['batch']:2}"
    shown = [
        f"{k} {row[k]['peak_bytes'] / GB:7.2f} GB" for k in ("predicted", "measured") if "peak_bytes" in row.get(k, {})
    ]
    failed = [str(row[k]["failed"]) for k in ("predicted", "measured") if "failed" in row.get(k, {})]
    error = f"{row['error']:+.2%}" if "error" in row else row.get("left out", "")
    return "  ".join([name, *shown, error, *failed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, on_gpu = json.loads(options.one)
        return one(Case(*case), on_gpu)
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    room = Room(gpu.total_memory) if gpu else None
    rows = []
    with ThreadPoolExecutor(max((os.cpu_count() or 2) - 2, 1)) as pool:
        for row in pool.map(lambda case: compare(case, room), cases(options.smoke)):
            rows.append(row)
            print(line(row), flush=True)
    errors = [abs(row["error"]) for row in rows if "error" in row]
    summary = {
        "compared": len(errors),
        "largest_error": max(errors, default=None),
        "failed": sum("failed" in row["predicted"] or "failed" in row.get("measured", {}) for row in rows),
    }
    print(json.dumps(summary))
    if options.out:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": gpu.name if gpu else "none",
            "torch": torch.__version__,
            "summary": summary,
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
